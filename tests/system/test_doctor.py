"""`tierctl doctor` finds planted faults of a machine.

They are real where they can be made, else planted in copies of /proc and /sys."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.config import Config, DeviceConfig, HostConfig, NvmeConfig, resolve
from tierd.doctor import disks, engines, gpus, memory, system
from tierd.doctor.check import Check, Host
from tierd.doctor.examine import examine
from tierd.tiers.arena.arena_files import user_directory
from tierd.tiers.drives.drives import Machine

MIB = 1 << 20


@dataclass
class Planted:
    """A machine with one fault. The configuration's directories lie in the test's own."""

    folder: Path

    @property
    def host(self) -> Host:
        return Host(root=self.folder / "root", environ={})

    def config(self, *, memory: int = 8 * MIB, device: Sequence[DeviceConfig] = (), **store: object) -> Config:
        """Of small tiers."""
        disk = NvmeConfig(**{"path": str(self.folder / "store"), "capacity": 8 * MIB, **store})
        config = Config(host=(HostConfig(capacity=memory),), nvme=(disk,), device=tuple(device))
        environ = {"TIERD_RUNTIME_DIR": str(self.folder / "run"), "TIERD_STATE_DIR": str(self.folder / "state")}
        return resolve(config, environ=environ)

    def write(self, path: str, text: str) -> None:
        """A file of the planted /proc or /sys."""
        file = self.host.at(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


def old_kernel(planted: Planted) -> Check:
    planted.write("/proc/sys/kernel/osrelease", "5.10.0-30-amd64\n")
    return system.check_kernel(planted.host)


def slow_clock(planted: Planted) -> Check:
    planted.write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
    return system.check_clock(planted.host)


def two_nodes(planted: Planted) -> Check:
    for node in range(2):
        planted.write(f"/sys/devices/system/node/node{node}/cpulist", "0\n")
    return system.check_numa(planted.config(), planted.host)


def strangers_directory(planted: Planted) -> Check:
    if os.geteuid():
        pytest.skip("gives a directory to another user, which takes root")
    planted.folder.chmod(0o777)
    (planted.folder / "run").mkdir()
    os.chown(planted.folder / "run", 12345, 12345)
    return system.check_directory("server.runtime_dir", str(planted.folder / "run"))


def state_in_a_file(planted: Planted) -> Check:
    (planted.folder / "state").write_text("")
    return system.check_directory("server.state_dir", str(planted.folder / "state" / "tierd"))


def small_group(planted: Planted) -> Check:
    planted.write("/proc/self/cgroup", "0::/box\n")
    planted.write("/sys/fs/cgroup/box/memory.max", f"{4 * MIB}\n")
    return memory.check_limit(planted.config(), planted.host)


def more_than_the_machine(planted: Planted) -> Check:
    planted.write("/proc/meminfo", "MemTotal:        4096 kB\nSwapTotal: 0 kB\n")
    return memory.check_limit(planted.config(), planted.host)


def eager_swap(planted: Planted) -> Check:
    planted.write("/proc/meminfo", "MemTotal: 99999999 kB\nSwapTotal:  4194304 kB\n")
    planted.write("/proc/sys/vm/swappiness", "60\n")
    return memory.check_swap(planted.host)


def segments_on_a_disk(planted: Planted) -> Check:
    folder = Path(__file__).parent
    if memory._mode_of(folder, list(memory.read_mounts())) != "file":
        pytest.skip("the checkout is on a tmpfs, so no directory on a disk is known")
    return memory.check_room("host.0", HostConfig(capacity=MIB, arena_dir=str(folder)))


def no_segments_directory(planted: Planted) -> Check:
    return memory.check_room("host.0", HostConfig(capacity=MIB, arena_dir=str(planted.folder / "none")))


def store_in_a_file(planted: Planted) -> Check:
    (planted.folder / "store").write_text("")
    check = next(disks.check_disks(planted.config(), planted.host, measure=False, show=print))
    assert check.found.endswith("store is no directory"), "the parent's rights do not matter"
    return check


def store_without_files(planted: Planted) -> Check:
    if os.geteuid():
        pytest.skip("only root passes the check of rights in /proc")
    found = disks.check_disks(planted.config(path="/proc/tierd"), planted.host, measure=False, show=print)
    return next(check for check in found if check.name == "nvme.0.path")


def store_read_only(planted: Planted) -> Check:
    check = with_mount(planted, "ro", lambda there: next(disks_at(planted, there)))
    assert "read-only" in check.found, "a read-only place is no matter of its owner"
    return check


def segments_read_only(planted: Planted) -> Check:
    return with_mount(
        planted, "ro", lambda there: memory.check_room("host.0", HostConfig(capacity=MIB, arena_dir=there))
    )


def disks_at(planted: Planted, there: str) -> Iterator[Check]:
    return disks.check_disks(planted.config(path=there), planted.host, measure=False, show=print)


def with_mount(planted: Planted, options: str, examined: Callable[[str], Check]) -> Check:
    """The check of a tmpfs with these options."""
    there = planted.folder / "mounted"
    there.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", options, "none", str(there)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounts a tmpfs, which takes root and the right to mount")
    try:
        return examined(str(there))
    finally:
        subprocess.run(["umount", "--lazy", str(there)], check=True)


def full_disk(planted: Planted) -> Check:
    room = os.statvfs(planted.folder)
    store = planted.config(capacity=(room.f_bavail * room.f_frsize // MIB + 1024) * MIB).nvme[0]
    return disks.check_space("nvme.0", store, planted.folder)


def slow_disk(planted: Planted) -> Check:
    return disks.judge_speed("nvme.0.speed", 300e6)


def no_direct_reads(planted: Planted) -> Check:
    folder = planted.folder / "ramfs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "none", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("mounts a ramfs, which takes root and the right to mount")
    try:
        return disks.check_direct("nvme.0", planted.config(direct="on").nvme[0], folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def worn_drive(planted: Planted) -> Check:
    return next(disks.check_drives("nvme.0", planted.folder, nvme_of(planted, '{"percentage_used": 103}')))


def failing_drive(planted: Planted) -> Check:
    answer = '{"percentage_used": 3, "critical_warning": 4}'
    return next(disks.check_drives("nvme.0", planted.folder, nvme_of(planted, answer)))


def rotational_disk(planted: Planted) -> Check:
    return next(disks.check_drives("nvme.0", planted.folder, disk_of(planted, "sda", rotational=1)))


def disk_of(planted: Planted, name: str, *, rotational: int) -> Machine:
    """A /sys in which the test's folder lies on this disk."""
    device = os.stat(planted.folder).st_dev
    planted.write(f"/sys/block/{name}/queue/rotational", str(rotational))
    link = planted.host.at(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    link.parent.mkdir(parents=True)
    link.symlink_to(planted.host.at(f"/sys/block/{name}"))
    return Machine(planted.host.at("/sys"), planted.host.at("/none"), str(planted.folder / "bin"))


def nvme_of(planted: Planted, answer: str) -> Machine:
    """The same on an NVMe drive whose health log is this."""
    machine, program = disk_of(planted, "nvme0n1", rotational=0), planted.folder / "bin" / "nvme"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '%s' '{answer}'\n")
    program.chmod(0o755)
    return machine


def gpu_without_driver(planted: Planted) -> Check:
    return next(gpus.check_gpus(planted.config(device=[DeviceConfig(kind="cuda")]), planted.host))


def narrow_link(planted: Planted) -> Check:
    for name, text in {
        "vendor": "0x10de",
        "class": "0x030200",
        "current_link_width": "4",
        "max_link_width": "16",
    }.items():
        planted.write(f"/sys/bus/pci/devices/0000:17:00.0/{name}", text)
    return list(gpus.check_gpus(planted.config(), planted.host))[1]


def no_direct_storage(planted: Planted) -> Check:
    planted.write("/proc/modules", "ext4 1 0 - Live 0x0\n")
    return gpus.check_direct_storage(planted.host)


def engine_of_another_time(planted: Planted) -> Check:
    return engines.check_engine("vllm", "0.9.1")


def untried_engine(planted: Planted) -> Check:
    return engines.check_engine("vllm", "0.33.0")


def engine_without_seed(planted: Planted) -> Check:
    planted.write("/proc/4242/cmdline", "/usr/bin/python3\0/opt/bin/vllm\0serve\0--prefix-caching-hash-algo=xxhash\0")
    planted.write("/proc/4242/environ", "HOME=/root\0")
    return list(engines.check_engines(planted.host))[-1]


FAULTS: dict[Callable[[Planted], Check], tuple[str, str]] = {
    old_kernel: ("kernel", "failure"),
    slow_clock: ("clock", "warning"),
    two_nodes: ("numa", "note"),
    strangers_directory: ("server.runtime_dir", "failure"),
    state_in_a_file: ("server.state_dir", "failure"),
    small_group: ("memory-limit", "failure"),
    more_than_the_machine: ("memory-limit", "failure"),
    eager_swap: ("swap", "note"),
    segments_on_a_disk: ("host.0.memory", "warning"),
    no_segments_directory: ("host.0.memory", "failure"),
    segments_read_only: ("host.0.memory", "failure"),
    store_in_a_file: ("nvme.0.path", "failure"),
    store_without_files: ("nvme.0.path", "failure"),
    store_read_only: ("nvme.0.path", "failure"),
    full_disk: ("nvme.0.space", "failure"),
    slow_disk: ("nvme.0.speed", "warning"),
    no_direct_reads: ("nvme.0.direct", "failure"),
    worn_drive: ("nvme.0.drive", "warning"),
    failing_drive: ("nvme.0.drive", "warning"),
    rotational_disk: ("nvme.0.drive", "warning"),
    gpu_without_driver: ("gpu.driver", "failure"),
    narrow_link: ("gpu.0000:17:00.0.link", "warning"),
    no_direct_storage: ("gpu.direct-storage", "note"),
    engine_of_another_time: ("engines.vllm", "failure"),
    untried_engine: ("engines.vllm", "note"),
    engine_without_seed: ("engines.hash-seed", "warning"),
}
"""Plants a fault: the check that finds it, and its status."""


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(planted: Planted, plant: Callable[[Planted], Check]) -> None:
    """Each fault gives a row with the thing, the fault, the consequence and a remedy."""
    check = plant(planted)
    assert (check.name, check.status) == FAULTS[plant]
    assert check.found and check.consequence and check.remedy


def test_a_sound_machine_has_no_failure(planted: Planted) -> None:
    """A small configuration on this machine gives no failure, and no row without its facts."""
    checks = list(examine(planted.config(), Host(), measure=False))
    assert [check for check in checks if check.status == "failure"] == []
    assert all(check.found for check in checks)
    assert [p for p in planted.folder.iterdir() if p.name.startswith(".tierd-doctor")] == []


def test_a_directory_of_the_node_counts_not_the_base_around_it(planted: Planted) -> None:
    """In a container with the node's arena below a small /dev/shm, the room is the arena's."""

    def examined(base: str) -> Check:
        (directory := user_directory(Path(base))).mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(directory)], check=True)
        try:
            return memory.check_room("host.0", HostConfig(capacity=32 * MIB, arena_dir=base))
        finally:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)

    assert with_mount(planted, "size=1m", examined).status == "ok"


def test_a_store_that_has_its_files_needs_no_more_room(planted: Planted) -> None:
    """Beside a running daemon the files of its store are not wanted again."""
    (store := planted.folder / "store").mkdir()
    with (store / "seg-0.slots").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 * MIB)
    check = disks.check_space("nvme.0", planted.config().nvme[0], store)
    assert (check.status, check.found.startswith("0 B and 0 B of index wanted")) == ("ok", True)


def test_stores_on_one_disk_share_its_room(planted: Planted) -> None:
    """The second store gets no bytes that the first one wants."""
    room = os.statvfs(planted.folder)
    config = planted.config(capacity=room.f_bavail * room.f_frsize * 6 // 10 // MIB * MIB)
    config = replace(config, nvme=(config.nvme[0], replace(config.nvme[0], path=str(planted.folder / "second"))))
    checks = disks.check_disks(config, planted.host, measure=False, show=print)
    found = [check.status for check in checks if check.name.endswith(".space")]
    assert found == ["ok", "failure"]


def test_a_group_that_one_tier_exceeds_refuses_the_start(planted: Planted) -> None:
    """Above the control group's limit the daemon does not start; two tiers that exceed it together do."""
    planted.write("/proc/self/cgroup", "0::/box\n")
    planted.write("/sys/fs/cgroup/box/memory.max", f"{12 * MIB}\n")
    one, two = planted.config(memory=16 * MIB), planted.config()
    two = replace(two, host=two.host * 2)
    said = [memory.check_limit(config, planted.host).consequence for config in (one, two)]
    assert ["cannot start" in said[0], "kills" in said[1]] == [True, True]


def test_an_unreadable_place_is_a_row(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that may not look is a warning that names the place, and the others go on."""

    def refused(config: Config, host: Host) -> Iterator[Check]:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret")

    monkeypatch.setattr("tierd.doctor.examine.check_memory", refused)
    checks = {check.name: check for check in examine(planted.config(), Host(), measure=False)}
    assert (checks["memory"].status, checks["memory"].found) == ("warning", "Permission denied (/secret)")
    assert "user" in checks["memory"].remedy and "nvme.0.space" in checks


def test_hash_seed_of_an_engine_is_read_from_its_process(planted: Planted) -> None:
    """A running engine with a seed is well; the word "random" is no seed, which hashes of xxhash need."""
    planted.write("/proc/77/cmdline", "/opt/bin/vllm\0serve\0")
    planted.write("/proc/77/environ", "PYTHONHASHSEED=0\0HOME=/\0")
    planted.write("/proc/78/cmdline", "/opt/bin/vllm\0serve\0--prefix-caching-hash-algo\0xxhash_cbor\0")
    planted.write("/proc/79/cmdline", "/opt/bin/vllm\0serve\0")
    planted.write("/proc/79/environ", "HOME=/\0")
    planted.write("/proc/78/environ", "PYTHONHASHSEED=random\0")
    found = {check.found: check.status for check in engines.check_engines(planted.host) if "seed" in check.name}
    assert list(found.values()) == ["ok", "warning", "note"]


# -- the program


def doctor(*words: str, before: Sequence[str] = (), **environ: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Runs `tierctl doctor --json`: its exit code, and the checks by name."""
    program = [*before, sys.executable, "-m", "tierd.cli.ctl", "doctor", "--json", *words]
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environ}
    )
    assert done.stdout, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_container_with_little_shared_memory(tmp_path: Path) -> None:
    """64 MiB of /dev/shm, docker's default, are a failure whose remedy names --shm-size."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("mounts a /dev/shm of its own, which takes root and unshare")
    shell = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", shell, "sh"]
    code, checks = doctor("--no-measure", before=before, TIERD_STATE_DIR=str(tmp_path))
    assert (code, checks["host.0.memory"]["status"]) == (1, "failure")
    assert "--shm-size" in checks["host.0.memory"]["remedy"]


def test_low_limits_of_the_process(tmp_path: Path) -> None:
    """Low hard limits of open files and of locked memory are found, the second with a GPU configured."""
    config = tmp_path / "tierd.toml"
    config.write_text('[[device]]\nkind = "cuda"\n[[host]]\ncapacity = "64 MiB"\n')
    before = ["prlimit", f"--memlock={MIB}:{MIB}", "--nofile=512:512"]
    if not shutil.which("prlimit"):
        pytest.skip("sets limits by prlimit")
    code, checks = doctor("--no-measure", "--config", str(config), before=before, TIERD_STATE_DIR=str(tmp_path))
    assert code == 1, "a GPU without a driver is a failure"
    assert {name: checks[name]["status"] for name in ("nofile", "memlock")} == {
        "nofile": "warning",
        "memlock": "warning",
    }


def test_a_wrong_file_does_not_end_the_examination(tmp_path: Path) -> None:
    """A configuration that the daemon refuses is a failure with its remedy, and the machine is examined."""
    config = tmp_path / "tierd.toml"
    config.write_text("[server]\nsesion_limit = 3\n")
    code, checks = doctor("--no-measure", "--config", str(config), TIERD_STATE_DIR=str(tmp_path))
    assert (code, checks["config"]["status"]) == (1, "failure")
    assert "session_limit" in checks["config"]["found"] + checks["config"]["remedy"]
    assert "kernel" in checks


def test_a_running_daemon_is_asked() -> None:
    """Beside a daemon the examination names its state and version; a draining one is a warning."""
    with Daemon() as daemon:
        _, checks = doctor("--no-measure", "--target", daemon.target)
        with RawClient(daemon.target) as operator:
            operator.call(operator.admin.Drain, apb.DrainRequest(deadline_s=0))
        _, later = doctor("--no-measure", "--target", daemon.target)
    assert (later["daemon"]["status"], "--undo" in later["daemon"]["remedy"]) == ("warning", True)
    assert checks["daemon"]["status"] == "ok"
    assert "serving" in checks["daemon"]["found"]
