"""`tierctl bench ttft` against a real daemon, with a small shape: its JSON, its table, its failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.system.warm import Daemon
from tierd.cli import ctl
from tierd.client import Lease
from tierd.errors import OperatorError
from tierd.ttft.bench import Bench
from tierd.ttft.engine import Engine

SMALL = ["--layers", "8", "--kv-heads", "1", "--head-dim", "64", "--tokens-per-block", "512", "--scale", "1"]
"""Blocks of 1 MiB, so that the daemon reads 8 of them in two parts."""
MACHINE = ["--disk", "100MB/s", "--link", "500MB/s", "--prefill-rate", "40000"]
SERIES = {
    "device",
    *(f"{source} {how}" for source in ("host", "nvme") for how in ("whole", "by layer", "advised")),
    "nowhere",
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for the file."""
    with Daemon() as daemon:
        yield daemon


def run(daemon: Daemon, *arguments: str) -> Result:
    words = ["bench", "ttft", *SMALL, *MACHINE, "--runs", "1", "--target", daemon.target, *arguments]
    return CliRunner().invoke(ctl.cli, words, prog_name="tierctl")


def blocks_in(daemon: Daemon) -> int:
    left = CliRunner().invoke(ctl.cli, ["status", "--json", "--target", daemon.target])
    return int(json.loads(left.stdout)["blocks"])


def test_rows_add_up_and_beat_no_bound(daemon: Daemon, tmp_path: Path) -> None:
    """Each series has its rows; their parts are their time, at least the bound; no block is left."""
    done = run(daemon, "--prefix", "1K,4K", "--json", "--plot", str(tmp_path / "ttft.png"))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    rows = {(f"{row['source']} {row['how']}".strip(), row["prefix"]): row for row in report["rows"]}
    assert set(rows) == {(name, prefix) for name in SERIES for prefix in (1024, 4096)}
    for (name, prefix), row in rows.items():
        parts = sum(row[part] for part in ("call_s", "disk_s", "link_s", "compute_s"))
        assert row["bound_s"] - 1e-6 <= parts <= row["first_token_s"] + 1e-6
        assert len(row["layers"]) == 8
        assert "advised" in name or row["loaded"] == (0 if name == "nowhere" else prefix)
    far = rows["nvme whole", 4096]
    assert far["call_s"] + far["disk_s"] >= (8 << 20) / 100e6
    assert rows["host whole", 4096]["link_s"] >= (8 << 20) / 500e6
    assert {each["source"] for each in report["crossovers"]} == {"host", "nvme"}
    assert (tmp_path / "ttft.png").read_bytes()[:4] == b"\x89PNG"
    assert blocks_in(daemon) == 0


def test_the_table_names_bars_waits_and_crossovers(daemon: Daemon) -> None:
    """The table has each series, a bar with its arithmetic, and a timeline with a legend."""
    done = run(daemon, "--prefix", "8K", "--source", "device,host,nowhere")
    assert done.exit_code == 0, done.output
    assert "host by layer" in done.stdout and "nvme" not in done.stdout.split("scaled down")[0]
    assert "by layer adds" in done.stdout and "(bar 5 %, arithmetic " in done.stdout
    assert "# computes" in done.stdout and "loading by layer is" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prefix", "100"], "100 tokens are no whole blocks of 512; use multiples of 512"),
        (["--prefix", "64K"], "use a shorter --prefix, a larger --scale, or other sources"),
        (["--prefix", "1K", "--memory", "1 MiB"], "use a shorter one, a larger --scale, or more --memory"),
        (["--prefix", "1K", "--limit", "1 s", "--runs", "1000"], "use fewer runs"),
        (["--prefix", "1K", "--plot", "x.gif"], "does not end in .png or .svg"),
        (["--prefix", "one"], "write 1K,8K,65536"),
        (["--source", "tape"], "there are device, host, nvme, nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_remedy(daemon: Daemon, arguments: list[str], said: str) -> None:
    """A wrong option, or one beyond the daemon's tiers, ends with 2 and a remedy."""
    done = run(daemon, *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_a_copy_with_wrong_bytes_is_no_result(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the engine's memory has other bytes than were stored, the measurement fails."""
    monkeypatch.setattr(Engine, "_copy", lambda *_: None)
    done = run(daemon, "--prefix", "1K", "--source", "host")
    assert done.exit_code == 1
    assert "a loaded block has other bytes than were stored" in done.stderr


def test_blocks_of_another_source_are_no_result(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the prefix lies in host memory, it does not count as one from NVMe."""
    monkeypatch.setattr(Bench, "_place", lambda *_: None)
    done = run(daemon, "--prefix", "1K", "--source", "nvme")
    assert done.exit_code == 1
    assert "0 of 1024 tokens came from nvme" in done.stderr


@pytest.mark.parametrize("step", ["_check_source", "_stream"])
def test_a_failed_measurement_leaves_no_block(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """An error in the middle of a load ends its lease, so that its blocks are removed too."""

    def broken(_engine: Engine, lease: Lease, *_: object) -> None:
        views = lease.views()
        raise OperatorError(f"broken with {len(views)} views")

    monkeypatch.setattr(Engine, step, broken)
    done = run(daemon, "--prefix", "1K", "--source", "host")
    assert done.exit_code == 1 and "broken with 2 views" in done.stderr
    assert blocks_in(daemon) == 0


def test_blocks_are_removed_although_one_is_gone(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that the daemon has lost does not keep the others there."""

    def losing(bench: Bench) -> None:
        bench._evict(bench._hashes[-1:], everywhere=True)
        raise OperatorError("broken")

    monkeypatch.setattr(Bench, "results", losing)
    assert run(daemon, "--prefix", "2K").exit_code == 1
    assert blocks_in(daemon) == 0
