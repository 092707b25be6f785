"""Direct reads from NVMe to a GPU, on the fake driver and cuFile: the chosen path, and every failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.depth import report, slow
from tests.system.blocks import await_true, connected
from tests.system.damaged import flip, slots
from tests.system.device_driver import fake_only, use_driver
from tests.system.device_worker import CONFIG, SPEC, evict, gpu_process, serve
from tests.system.elsewhere import Elsewhere
from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tests.unit.gpu.processes import descriptors as opened
from tierd._proto import admin_pb2 as apb
from tierd.client import Client, PutGroup
from tierd.testing import chain

pytestmark = fake_only("its cuFile takes orders and tells its counts; `make gpu` asks a true one")

BLOCKS = 6
HOST_PAGES = (32 << 20) // SPEC.block_bytes
DIRECT, DETOUR = "nvme.0 read directly by nvidia-fs", "nvme.0 by way of host memory"
NOT_USED = "GPUDirect Storage is not used"


class Counts(NamedTuple):
    """Reads of the fake cuFile in a GPU process."""

    total: int
    nvfs: int
    p2p: int
    posix: int
    bytes: int


class CuFile:
    """The fake cuFile of a daemon's GPU processes."""

    def __init__(self, folder: Path) -> None:
        self.orders, self.told = folder / "orders", folder / "counts"

    @property
    def environment(self) -> dict[str, str]:
        return {"TIERD_FAKE_CUFILE_ORDERS": str(self.orders), "TIERD_FAKE_CUFILE_COUNTS": str(self.told)}

    def order(self, word: str) -> None:
        """Sets the outcome of every later read; "" for success."""
        new = self.orders.with_suffix(".new")
        new.write_text(word)
        new.rename(self.orders)

    def counts(self) -> Counts:
        """Counts of the GPU process that read last."""
        return Counts(*map(int, self.told.read_text().split()))

    def await_hung(self) -> None:
        """Waits until a read hangs."""
        await_true(self.orders.with_name("orders.held").exists, "a read that hangs")


@pytest.fixture
def cufile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CuFile:
    """A fake cuFile whose reads are direct unless a test says otherwise."""
    fake = CuFile(tmp_path)
    use_driver(monkeypatch, TIERD_FAKE_CUFILE="nvfs", **fake.environment)
    return fake


@pytest.fixture
def daemon(cufile: CuFile) -> Iterator[Daemon]:
    with Daemon(CONFIG) as running:
        yield running


@pytest.fixture
def worker(daemon: Daemon) -> Iterator[Elsewhere]:
    with Elsewhere(serve, daemon.target) as one:
        yield one


def far(daemon: Daemon, worker: Elsewhere, seed: int, blocks: int = BLOCKS) -> None:
    """Stores a chain on NVMe alone."""
    assert worker.ask(["put", [seed, blocks, "durable"]]) == blocks
    send_far(daemon)


def send_far(daemon: Daemon) -> None:
    """Evicts the device and host tiers."""
    for tier in ("device.0", "host.0"):
        evict(daemon.target, tier)


def look(daemon: Daemon) -> tuple[dict[str, apb.TierInfo], list[str]]:
    """The tiers, and the notices about direct reads."""
    with connected(daemon) as client:
        return client.tiers(), [notice for notice in client.status().notices if NOT_USED in notice]


def is_leased(worker: Elsewhere, seed: int, blocks: int = BLOCKS) -> bool:
    """Leases a chain on the device, checks its bytes and drops it; whether all blocks were hits."""
    found = worker.ask(["lease", [seed, blocks]])
    assert worker.ask(["right", []]) == [found, found]
    worker.ask(["drop", []])
    return bool(found == blocks)


def resume(daemon: Daemon) -> None:
    """Makes the daemon probe its device at once."""
    with RawClient(daemon.target) as operator:
        operator.call(operator.admin.Resume, apb.ResumeRequest(tier="device.0"))


def await_direct(daemon: Daemon) -> None:
    """Waits until the next GPU process reads directly and the daemon plans for it."""
    await_true(lambda: DIRECT in look(daemon)[0]["device.0"].place, "the direct way")
    resume(daemon)


@contextmanager
def full_host(daemon: Daemon) -> Iterator[None]:
    """Two clients reserve every page of the host tier."""
    with Client(daemon.target) as one, Client(daemon.target) as two:
        kept = []
        for client in (one, two):
            pages = client.reserve(PutGroup.private(client.open_namespace(SPEC), HOST_PAGES // 2), tier="host")
            assert len([page for page in pages.buffers() if page is not None]) == HOST_PAGES // 2
            kept.append(pages)
        yield
        for pages in kept:
            pages.abort()


def test_blocks_come_past_host_memory(daemon: Daemon, worker: Elsewhere, cufile: CuFile) -> None:
    """With a full host tier, blocks go from NVMe to the device by direct reads alone, and status shows it."""
    far(daemon, worker, 1)
    with full_host(daemon):
        assert is_leased(worker, 1)
    size = SPEC.block_bytes * BLOCKS + (1 << 20)
    assert cufile.counts() == Counts(BLOCKS + 1, BLOCKS + 1, 0, 0, size)  # one read was the probe
    tiers, notices = look(daemon)
    assert tiers["host.0"].pages_ready == 0 and tiers["device.0"].pages_ready == BLOCKS
    assert DIRECT in tiers["device.0"].place and notices == []


def test_host_memory_comes_first(daemon: Daemon, worker: Elsewhere, cufile: CuFile) -> None:
    """A block that host memory holds is not read from the disk again."""
    far(daemon, worker, 2)
    with Client(daemon.target) as client:
        assert client.get(client.open_namespace(SPEC), chain(2, BLOCKS)).tokens == 16 * BLOCKS
    before = cufile.counts()
    assert is_leased(worker, 2)
    assert cufile.counts() == before


@pytest.mark.parametrize("length", [4095, 4097, 300_001])
def test_lengths_that_are_no_whole_pages(daemon: Daemon, length: int) -> None:
    """A block of any length is read directly, right to its last byte."""
    with Elsewhere(serve, daemon.target) as worker:
        assert worker.ask(["resize", [length]]) == length
        far(daemon, worker, 3)
        assert is_leased(worker, 3)


@pytest.mark.parametrize(
    ("way", "setting", "reason"),
    [
        ("posix", "auto", "cuFile read it through host memory"),
        ("", "auto", "DRIVER_NOT_INITIALIZED"),
        ("wrong", "auto", "other bytes than the file has"),
        ("nvfs", "off", 'direct_reads = "off"'),
        ("nvfs", "buffered", "nvme.0 is read through the page cache"),
        ("nvfs", "rdma", "MEMORY_TYPE_INVALID"),
    ],
)
def test_what_is_not_direct_goes_by_host_memory(
    cufile: CuFile, monkeypatch: pytest.MonkeyPatch, way: str, setting: str, reason: str
) -> None:
    """Without a right read counted as direct, blocks go through host memory; status says why, once."""
    monkeypatch.setenv("TIERD_FAKE_CUFILE", way)
    monkeypatch.setenv("TIERD_FAKE_CUDA_WITHOUT", setting)
    config = CONFIG
    if setting == "off":
        config = config.replace('kind = "cuda"', 'kind = "cuda"\ndirect_reads = "off"')
    if setting == "buffered":
        config = config.replace("[[nvme]]", '[[nvme]]\ndirect = "off"')
    with Daemon(config) as daemon, Elsewhere(serve, daemon.target) as worker:
        far(daemon, worker, 4)
        assert is_leased(worker, 4)
        tiers, notices = look(daemon)
        assert tiers["host.0"].pages_ready == BLOCKS
        assert DETOUR in tiers["device.0"].place and len(notices) == 1 and reason in notices[0]
        assert daemon.log.count(notices[0]) == 1
    assert not cufile.told.exists() or cufile.counts().total <= 1


@pytest.mark.parametrize("word", ["error", *slow("eio", "short"), "wrong"])
def test_a_way_that_goes_wrong_is_left(daemon: Daemon, worker: Elsewhere, cufile: CuFile, word: str) -> None:
    """After a failed, short or wrong direct read the blocks go through host memory, with a notice.
    The next GPU process reads directly again."""
    far(daemon, worker, 5)
    cufile.order(word)
    assert is_leased(worker, 5)
    tiers, notices = look(daemon)
    assert tiers["nvme.0"].pages_quarantined == 0 and tiers["nvme.0"].serving
    assert DETOUR in tiers["device.0"].place and len(notices) == 1
    assert daemon.log.count(notices[0]) == 1
    reads = cufile.counts().total
    far(daemon, worker, 6)
    assert is_leased(worker, 6) and cufile.counts().total == reads
    cufile.order("")
    gpu_process(daemon).kill()
    await_direct(daemon)
    assert look(daemon)[1] == []
    far(daemon, worker, 7)
    await_true(lambda: is_leased(worker, 7), "the blocks")
    assert cufile.counts().nvfs == BLOCKS + 1


@pytest.mark.parametrize("shift", [4096 + 5, 100, 258], ids=["payload", "header", "table"])
def test_a_corrupt_slot_is_a_miss(daemon: Daemon, worker: Elsewhere, shift: int) -> None:
    """A flipped bit on the disk costs one block, quarantines its slot, and keeps the direct path."""
    far(daemon, worker, 8)
    flip(slots(daemon)[chain(8, BLOCKS)[3].tobytes()], shift)
    assert worker.ask(["lease", [8, BLOCKS]]) == 3
    assert worker.ask(["right", []]) == [3, 3]
    worker.ask(["drop", []])
    tiers, notices = look(daemon)
    assert tiers["nvme.0"].pages_quarantined == 1
    assert DIRECT in tiers["device.0"].place and notices == []
    assert worker.ask(["put", [8, BLOCKS]]) == BLOCKS and is_leased(worker, 8)


def in_mid_read(daemon: Daemon, worker: Elsewhere, cufile: CuFile, end: Callable[[], None]) -> object:
    """Kills something by `end` while a lease's reads hang; the worker's answer."""
    far(daemon, worker, 9)
    cufile.order("hang")
    worker.say(["lease", [9, BLOCKS]])
    cufile.await_hung()
    end()
    return worker.hear()


def descriptors(daemon: Daemon) -> list[int]:
    """The daemon's descriptors of store files and device memory, and the GPU process's of any kind."""
    own = [name for name in opened(daemon.pid).values() if "/state/" in name or "tierd-fake-gpu" in name]
    return [len(own), len(opened(gpu_process(daemon).pid))]


def test_the_gpu_process_dies_in_mid_read(daemon: Daemon, worker: Elsewhere, cufile: CuFile) -> None:
    """SIGKILL of the GPU process in a read gives a miss and frees all pages; the next reads directly."""
    far(daemon, worker, 10)
    assert is_leased(worker, 10)
    before = descriptors(daemon)

    def end() -> None:
        assert look(daemon)[0]["device.0"].pages_reserved == BLOCKS
        gpu_process(daemon).kill()
        cufile.order("")

    assert in_mid_read(daemon, worker, cufile, end) == 0
    await_direct(daemon)
    send_far(daemon)  # some blocks may have reached host memory
    await_true(lambda: is_leased(worker, 9), "the blocks")
    tiers, notices = look(daemon)
    assert (tiers["device.0"].pages_reserved, tiers["device.0"].pages_ready, notices) == (0, BLOCKS, [])
    assert cufile.counts().nvfs == BLOCKS + 1
    await_true(lambda: descriptors(daemon) == before, "as many descriptors as before")


def test_the_daemon_dies_in_mid_read(daemon: Daemon, worker: Elsewhere, cufile: CuFile) -> None:
    """SIGKILL of the daemon during a direct read ends its GPU process; the next daemon has whole blocks."""
    gone: list[psutil.Process] = []

    def end() -> None:
        gone.append(gpu_process(daemon))
        daemon.kill()
        cufile.order("")

    assert in_mid_read(daemon, worker, cufile, end) != BLOCKS
    await_true(lambda: not gone[0].is_running(), "the end of the GPU process")
    daemon.start()
    with Elsewhere(serve, daemon.target) as other:
        assert is_leased(other, 9)
    assert cufile.counts().nvfs == BLOCKS + 1


@pytest.mark.parametrize(
    "point", ["mover.direct.before_read", *slow("cuda.direct.before_read", "cuda.direct.before_return")]
)
def test_the_daemon_dies_at_a_point(cufile: CuFile, point: str) -> None:
    """After a death before, in or after a direct read the next daemon reads the whole blocks directly."""
    with Daemon(CONFIG, faults=True) as daemon:
        with Elsewhere(serve, daemon.target) as worker:
            far(daemon, worker, 14)
            with daemon.faults() as faults:
                faults.arm(point, "kill")
            worker.say(["lease", [14, BLOCKS]])
            assert daemon.await_end() == -9
        daemon.start()
        with Elsewhere(serve, daemon.target) as worker:
            assert is_leased(worker, 14)
        assert cufile.counts().nvfs == BLOCKS + 1


def test_a_read_that_hangs_ends_by_patience(cufile: CuFile) -> None:
    """A read beyond `device.hang_limit` ends with its GPU process; later blocks go through host memory."""
    with (
        Daemon(CONFIG.replace('kind = "cuda"', 'kind = "cuda"\nhang_limit = "1 s"')) as daemon,
        Elsewhere(serve, daemon.target) as worker,
    ):
        far(daemon, worker, 11)
        first = gpu_process(daemon).pid
        cufile.order("hang")
        assert worker.ask(["lease", [11, BLOCKS]]) == 0
        await_true(lambda: is_leased(worker, 11), "the blocks by way of host memory")
        tiers, notices = look(daemon)
        assert tiers["device.0"].pages_reserved == 0 and DETOUR in tiers["device.0"].place
        assert len(notices) == 1 and "hung during a direct read" in notices[0]
        assert gpu_process(daemon).pid != first


def test_a_way_that_kills_is_left(daemon: Daemon, worker: Elsewhere, cufile: CuFile) -> None:
    """After three GPU processes died in direct reads, blocks go through host memory, with a notice."""
    far(daemon, worker, 13)
    cufile.order("crash")
    assert worker.ask(["lease", [13, BLOCKS]]) == 0
    await_true(lambda: is_leased(worker, 13), "the blocks by way of host memory")
    tiers, notices = look(daemon)
    assert DETOUR in tiers["device.0"].place and tiers["device.0"].pages_reserved == 0
    assert len(notices) == 1 and "3 GPU processes died during a direct read" in notices[0]


def test_descriptors_stay_as_many(daemon: Daemon, worker: Elsewhere) -> None:
    """Rounds of put, evict and direct read leak no descriptor; the GPU process keeps one a store file."""
    before = descriptors(daemon)
    for turn in range(12):
        far(daemon, worker, 100 + turn)
        assert is_leased(worker, 100 + turn) and is_leased(worker, 100)
    after = descriptors(daemon)
    files = {name for name in opened(gpu_process(daemon).pid).values() if name.endswith(".slots")}
    report("direct reads, descriptors after rounds", daemon=after[0], gpu_process=after[1], files=len(files))
    assert after[0] == before[0] and after[1] == before[1] + len(files) and files


def test_resume_asks_no_way_again(daemon: Daemon, worker: Elsewhere, cufile: CuFile) -> None:
    """A failed direct path is not probed again while its GPU process lives, even after a resume."""
    far(daemon, worker, 12)
    cufile.order("error")
    assert is_leased(worker, 12)
    reads = cufile.counts().total
    resume(daemon)
    far(daemon, worker, 15)
    assert is_leased(worker, 15)
    assert cufile.counts().total == reads and os.path.exists(f"/proc/{gpu_process(daemon).pid}")
