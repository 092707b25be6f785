"""The drives under a path and their reported wear: health logs as programs print them, and a fake
/sys."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.tiers.drives.drives import Drive, Machine, drives_under, read_wear
from tierd.tiers.drives.smart import DATA_UNIT_BYTES, Smart, parse_smart

NVME_1 = """{
  "critical_warning" : 0, "temperature" : 311, "avail_spare" : 100, "spare_thresh" : 10, "percent_used" : 3,
  "data_units_read" : 228744653, "data_units_written" : 464403132, "host_read_commands" : 2894926909,
  "host_write_commands" : 9043251297, "controller_busy_time" : 13, "power_cycles" : 19, "power_on_hours" : 27567,
  "unsafe_shutdowns" : 0, "media_errors" : 0, "num_err_log_entries" : 0, "warning_temp_time" : 0, "critical_comp_time" : 0,
  "thm_temp1_trans_count" : 0, "thm_temp2_trans_count" : 0, "thm_temp1_total_time" : 0, "thm_temp2_total_time" : 0
}"""
"""nvme-cli 1.9 of an Intel DC P3700."""
NVME_2_FLOAT = """{
  "critical_warning":0, "temperature":301, "avail_spare":100, "spare_thresh":5, "percent_used":15,
  "endurance_grp_critical_warning_summary":0, "data_units_read":499296134.0, "data_units_written":1.474968593e+09,
  "host_read_commands":9347931143.0, "host_write_commands":51493840602.0, "controller_busy_time":1974546.0,
  "power_cycles":290.0, "power_on_hours":38313.0, "unsafe_shutdowns":139.0, "media_errors":0.0, "num_err_log_entries":17.0,
  "warning_temp_time":0, "critical_comp_time":0, "temperature_sensor_1":306, "temperature_sensor_2":301
}"""
"""Long counters as nvme-cli 2.0 wrote them."""
NVME_2_VERBOSE = """{
  "critical_warning":{"value":4, "available_spare":0, "temp_threshold":0, "reliability_degraded":1, "ro":0, "vmbu_failed":0, "pmr_ro":0},
  "temperature":307, "avail_spare":100, "spare_thresh":10, "percent_used":103, "endurance_grp_critical_warning_summary":0,
  "data_units_read":"1454046", "data_units_written":"1,658,016", "power_cycles":"23", "power_on_hours":"696"
}"""
"""nvme-cli 2 with --verbose, and counters as strings."""
SMARTCTL = """{
  "json_format_version": [1, 0], "device": {"name": "/dev/nvme3", "info_name": "/dev/nvme3", "protocol": "NVMe"},
  "smart_status": {"passed": true},
  "nvme_smart_health_information_log": {"nsid": -1, "critical_warning": 0, "temperature": 44, "available_spare": 100,
    "available_spare_threshold": 3, "percentage_used": 1, "data_units_read": 12345, "data_units_written": 67890, "power_on_hours": 5000}
}"""
LOGS = {
    "nvme-1": (NVME_1, Smart(3, 464403132 * DATA_UNIT_BYTES, 27567)),
    "nvme-2-float": (NVME_2_FLOAT, Smart(15, 1474968593 * DATA_UNIT_BYTES, 38313)),
    "nvme-2-verbose": (NVME_2_VERBOSE, Smart(103, 1658016 * DATA_UNIT_BYTES, 696, warning=4)),
    "smartctl": (SMARTCTL, Smart(1, 67890 * DATA_UNIT_BYTES, 5000)),
    "little": ('{"percentage_used": "7%"}', Smart(7)),
}
FAKE_NVME = """#!/bin/sh
printf '%s\\n' "$@" > "{directory}/asked"
cat "{directory}/answer" 2>/dev/null
cat "{directory}/fault" >&2 2>/dev/null
exit {status}
"""


@pytest.mark.parametrize("name", LOGS)
def test_what_each_version_prints_is_understood(name: str) -> None:
    """The parser reads the log of every program and version, under any name and notation."""
    text, smart = LOGS[name]
    assert parse_smart(text) == parse_smart(text.encode()) == smart


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{}",
        '{"percent_used": true}',
        '{"percent_used": null}',
        "\xff",
        "{" * 5000,
        '{"percent_used": "many"}',
    ],
)
def test_what_is_no_log_is_refused(text: str) -> None:
    """A text without a percentage raises ValueError and no other error."""
    with pytest.raises(ValueError, match=r"."):
        parse_smart(text)


junk = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["percent_used", "data_units_written", "value", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(value=junk)
def test_no_json_breaks_the_reader(value: object) -> None:
    """Any JSON gives a log or a ValueError."""
    with contextlib.suppress(ValueError):
        assert parse_smart(json.dumps(value)).percentage_used >= 0


@dataclass
class Bench:
    """A machine made of files. root: its directory; machine: the paths for drives.py; store: a
    directory whose file system has the number `devno`."""

    root: Path
    machine: Machine
    store: Path

    @property
    def devno(self) -> str:
        number = os.stat(self.store).st_dev
        return f"{os.major(number)}:{os.minor(number)}"

    def disk(self, name: str, *, model: str = "Fast 9", sectors: int = 2_000_000) -> Path:
        """A whole disk in sysfs."""
        place = self.root / "sys" / "devices" / name
        (place / "device").mkdir(parents=True)
        (place / "queue").mkdir()
        (place / "device" / "model").write_text(f"{model}   \n")
        (place / "queue" / "rotational").write_text("0\n")
        (place / "size").write_text(f"{sectors}\n")
        return place

    def part(self, disk: Path, name: str) -> Path:
        """A partition of the disk."""
        (disk / name).mkdir()
        (disk / name / "partition").write_text("1\n")
        return disk / name

    def mapped(self, name: str, *slaves: Path) -> Path:
        """A device made of other devices."""
        place = self.root / "sys" / "devices" / "virtual" / name
        (place / "slaves").mkdir(parents=True)
        for slave in slaves:
            (place / "slaves" / slave.name).symlink_to(slave)
        return place

    def under_store(self, place: Path) -> None:
        """Puts the store's file system on this device."""
        (self.root / "sys" / "dev" / "block").mkdir(parents=True)
        (self.root / "sys" / "dev" / "block" / self.devno).symlink_to(place)

    def install(self, answer: str = "", *, fault: str = "", status: int = 0) -> None:
        """A program `nvme` that gives this answer."""
        (self.root / "answer").write_text(answer)
        (self.root / "fault").write_text(fault)
        program = self.root / "bin" / "nvme"
        program.write_text(FAKE_NVME.format(directory=self.root, status=status))
        program.chmod(0o700)

    @property
    def asked(self) -> list[str]:
        """The arguments that the program was called with."""
        path = self.root / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "bin").mkdir()
    (tmp_path / "store").mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"27 1 0:99 / / rw - ext4 nowhere rw\n28 1 0:98 / {tmp_path} rw - zfs pool\\040one rw\n")
    path = f"{tmp_path / 'bin'}{os.pathsep}/bin{os.pathsep}/usr/bin"
    return Bench(tmp_path, Machine(tmp_path / "sys", mounts, path), tmp_path / "store")


def test_a_drive_is_found_through_its_partition(bench: Bench) -> None:
    """A store on an NVMe partition gives model, size and log of the whole drive, read as JSON."""
    bench.under_store(bench.part(bench.disk("nvme0n1"), "nvme0n1p2"))
    bench.install(NVME_1)
    assert drives_under(bench.store, bench.machine) == [
        Drive("/dev/nvme0n1", "Fast 9", 2_000_000 * 512, smart=LOGS["nvme-1"][1])
    ]
    assert bench.asked == ["smart-log", "/dev/nvme0n1", "-o", "json"]


def test_drives_are_found_through_volumes_and_arrays(bench: Bench) -> None:
    """An encrypted volume on an array of two drives' partitions names both drives, each once."""
    one, two = bench.disk("nvme0n1"), bench.disk("nvme1n1")
    array = bench.mapped(
        "md0", bench.part(one, "nvme0n1p1"), bench.part(two, "nvme1n1p1"), bench.part(two, "nvme1n1p2")
    )
    bench.under_store(bench.mapped("dm-0", array))
    bench.install(NVME_1)
    assert [drive.device for drive in drives_under(bench.store, bench.machine)] == ["/dev/nvme0n1", "/dev/nvme1n1"]


def test_a_volume_of_itself_ends(bench: Bench) -> None:
    """The search through devices that name each other ends at a bound."""
    one = bench.mapped("dm-0")
    two = bench.mapped("dm-1", one)
    (one / "slaves" / "dm-1").symlink_to(two)
    bench.under_store(one)
    assert drives_under(bench.store, bench.machine)[0].device == ""


def test_what_has_no_disk_says_what_it_lies_on(bench: Bench) -> None:
    """A file system without a block device is named, with the remedy; a missing directory is reported."""
    (found,) = drives_under(bench.store, bench.machine)
    assert found.device == "" and "pool one" in found.trouble and "nvme.path" in found.trouble
    (gone,) = drives_under(bench.root / "gone", bench.machine)
    assert "does not exist" in gone.trouble


FAULTS = {
    "permission": ({"fault": "smart log: Permission denied\n", "status": 1}, "sudo nvme smart-log /dev/nvme0n1"),
    "old": ({"fault": "NVMe status: Operation not permitted\n", "status": 1}, "CAP_SYS_ADMIN"),
    "failed": ({"fault": "No such device", "status": 19}, "No such device"),
    "silent": ({"status": 3}, "status 3"),
    "garbled": ({"answer": "Smart Log for NVME device"}, "not understood"),
    "other": ({"answer": '{"temperature": 300}'}, "percent_used"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_log_that_cannot_be_had_says_why_and_what_to_do(bench: Bench, name: str) -> None:
    """Without a readable log, model and size are reported, with the reason and the remedy."""
    answer, word = FAULTS[name]
    bench.under_store(bench.disk("nvme0n1"))
    bench.install(**answer)  # type: ignore[arg-type]
    (drive,) = drives_under(bench.store, bench.machine)
    assert (drive.device, drive.model, drive.smart) == ("/dev/nvme0n1", "Fast 9", None)
    assert word in drive.trouble and drive.trouble.startswith("/dev/nvme0n1: ")


def test_without_the_program_it_is_named(bench: Bench) -> None:
    """Without nvme-cli the message names the package."""
    machine = Machine(bench.machine.sys, bench.machine.mounts, str(bench.root / "bin"))
    assert "install it (package nvme-cli)" in read_wear(Drive("/dev/nvme0n1"), machine).trouble


def test_another_kind_of_disk_is_not_asked(bench: Bench) -> None:
    """A disk that is no NVMe drive is not asked for an NVMe log."""
    bench.under_store(bench.disk("sda", model="Old 3"))
    bench.install(NVME_1)
    (drive,) = drives_under(bench.store, bench.machine)
    assert drive.smart is None and "smartctl" in drive.trouble and bench.asked == []


def test_a_program_that_hangs_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that does not answer costs SMART_TIMEOUT_S, and is named."""
    monkeypatch.setattr("tierd.tiers.drives.drives.SMART_TIMEOUT_S", 0.2)
    bench.under_store(bench.disk("nvme0n1"))
    program = bench.root / "bin" / "nvme"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    (drive,) = drives_under(bench.store, bench.machine)
    assert "did not answer" in drive.trouble


def test_this_machine_is_understood(tmp_path: Path) -> None:
    """On the test machine a directory has a drive, or a reason for none."""
    for drive in drives_under(tmp_path):
        assert drive.device.startswith("/dev/") or drive.trouble
        assert drive.smart or drive.trouble
