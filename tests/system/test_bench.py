"""The benchmarks: each suite runs at a tiny size against real daemons and gives its promised rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.depth import slow
from tests.repo.source import ROOT
from tierd.codecs.named import ALL
from tierd.codecs.planes import COMPRESSORS, Planes
from tools.bench.advice import POINTS
from tools.bench.far import TEXT
from tools.bench.peers.known import KNOWN
from tools.bench.promises import PROMISES, SHAPES
from tools.bench.traffic import PATTERNS

ROWS = {
    "data_plane": {
        *("put_2MiB_x16", "get_copy_2MiB_x16", "put_fresh_2MiB_x16", "get_first_2MiB_x16", "copy_streamed_2MiB_x16"),
        "put_sealed_2MiB_x16",
        *(
            "put_128KiB_x64",
            "get_copy_128KiB_x64",
            "put_fresh_128KiB_x64",
            "get_first_128KiB_x64",
            "copy_streamed_128KiB_x64",
        ),
    },
    "one_block": {
        f"{verb}_{size}_{what}"
        for verb in ("put", "put_nowait", "get")
        for size in ("2MiB", "128KiB")
        for what in ("p50", "beyond_copy")
    },
    "awaited": {"async_put", "async_get", "async_get_again", "async_lookup"},
    "calls": {"lookup_empty", "lookup_empty_raw", "lookup_256", "get_view_256"},
    "nvme": {
        *(
            "nvme_read_2MiB",
            "nvme_write_2MiB",
            "nvme_flush_2MiB",
            "nvme_write_first_2MiB",
            "nvme_durable_2MiB_x16",
        ),
        "nvme_durable_put_2MiB_x16",
        *("nvme_read_128KiB", "nvme_write_128KiB", "nvme_flush_128KiB", "nvme_write_first_128KiB"),
    },
    "remote": {
        *("remote_get_2MiB", "remote_get_first_2MiB", "remote_put_2MiB"),
        *("remote_get_lz4_2MiB", "remote_get_first_lz4_2MiB", "remote_put_lz4_2MiB"),
    },
    "demotion": {"get_while_demoting"},
    "size": {"put_at_100K", "get_at_100K", "lookup_at_100K"},
    "chains": {f"chain_{what}_{length}" for what in ("cost", "step", "wait") for length in (64, 1024)},
    "policies": {f"policy_{name}_{tiers}" for name in list(PATTERNS)[:2] for tiers in ("one", "two")},
    "advice": {"advice_mixed", *POINTS},
    "ttft": {f"ttft_{name}" for s in ("host", "nvme") for name in (f"{s}_8K", f"{s}_8K_bound", f"advised_{s}")},
    "prefetch": {"prefetch_staged_synthetic", "prefetch_wasted_synthetic"},
    "far": {"far_step_4K", *(("far_text_hits", "far_text_mass") if (TEXT / "model.safetensors").exists() else ())},
    "clients": {"clients_4", "lookups_4"},  # the full size adds sixteen and sixty-four
    "page": {"page_gets"},
    "idle": {"idle_cpu", "idle_memory"},
    "daemon_start": {"daemon_start_100k"},
    "recording": {"record_acquire_32", "record_acquire_256"},
    "scrape": {"scrape_loop", "scrape_piece", "scrape_gets"},
    "decisions": {f"decisions_{verb}_{blocks}" for verb in ("get", "put") for blocks in (1, 32)},
}
SHORT = ("data_plane", "one_block")
"""`make test` runs these. Every other suite takes some seconds even at its tiny size."""
LIMIT_S = 600
"""A suite takes seconds, but may take long on a busy machine."""
ROWS["codecs"] = {
    f"{codec.name} {work} {shape} {loops}"
    for codec in ALL
    if not codec.is_calibrated
    and (not isinstance(codec, Planes) or find_spec(COMPRESSORS[codec.name].package.split(".")[0]))
    for work in ("encode", "decode")
    for shape in SHAPES
    for loops in ("native", "plain")
}
FULL_ONLY = {
    *(f"policy_{name}_{tiers}" for name in list(PATTERNS)[2:] for tiers in ("one", "two")),
    *(f"chain_{what}_{length}" for what in ("cost", "step", "wait") for length in (8192, 65_536)),
    *(f"ttft_{source}_{prefix}K" for source in ("host", "nvme") for prefix in (16, 32, 64)),
    *("clients_16", "clients_64", "lookups_16", "lookups_64"),
    *("put_at_10M", "get_at_10M", "lookup_at_10M", "start_10m", "start_10m_serves", "start_10m_memory"),
}


def run(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in its own process group. If it takes too long, its daemons are killed too."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **how)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def bench(*names: str, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.bench", "--tiny", "--output", str(output), *names]
    return run(command, env=os.environ | {"TMPDIR": str(output.parent)})


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", [*SHORT, *slow(*(name for name in ROWS if name not in SHORT))])
def test_a_suite_gives_its_rows(name: str, tmp_path: Path) -> None:
    """A suite gives exactly the rows named here, with positive values, and writes no other file."""
    done = bench(name, output=tmp_path / "bench.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {row["name"] for row in rows} == ROWS[name]
    assert [row["name"] for row in rows if row["runs"] < 1 or row["limit"] <= 0] == []
    assert {path.name for path in tmp_path.iterdir()} <= {"bench.json", "bench.png"}


def test_every_promise_has_a_row() -> None:
    """Every promise of the benchmarks belongs to a row of a suite."""
    assert set(PROMISES) - FULL_ONLY <= set.union(*ROWS.values())


@pytest.mark.slow
def test_a_start_with_many_blocks_is_measured() -> None:
    """The start with a thousand blocks gives the rows of millions: time, service, memory, and calls."""
    made = run([sys.executable, "-m", "tools.bench.many_start", "--blocks", "1000", "--starts", "1", "--json"])
    assert made.returncode == 0, made.stderr
    took, serves, memory, *calls = json.loads(made.stdout)
    assert [(row["name"], row["runs"]) for row in calls] == [(f"{verb}_at_1K", 31) for verb in ("put", "get", "lookup")]
    assert took["value"] > 0 and serves["value"] > 0 and memory["value"] >= memory["limit"] > 0


def test_an_unknown_suite_is_refused(tmp_path: Path) -> None:
    """An unknown suite is refused before anything runs, with the list of suites."""
    done = bench("data_plan", output=tmp_path / "bench.json")
    assert done.returncode == 2
    assert "data_plane" in done.stderr
    assert list(tmp_path.iterdir()) == []


def bench_peer(tmp_path: Path, line: str) -> tuple[dict[str, Any], str]:
    """The benchmark's file and output for Redis, with a shell line as Redis's Python.

    The benchmark writes no other file.
    """
    python = tmp_path / "redis" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{line}\n")
    python.chmod(0o700)
    (tmp_path / "redis" / ".made").write_text("\n".join(KNOWN["redis"].packages))
    asked = ["--tiny", "--environments", str(tmp_path), "--output", str(tmp_path / "peers.json")]
    command = [sys.executable, "-m", "tools.bench.peers", "redis", *asked]
    done = run(command, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"redis", "alive", "peers.json", "peers.png"}
    return json.loads((tmp_path / "peers.json").read_text()), done.stdout


def dict_peer(how: str) -> str:
    """The shell line for a peer that keeps its blocks in a dict."""
    return f'shift 2; exec {sys.executable} -m tests.system.dict_peer {how} "$@"'


def test_a_peer_that_cannot_be_measured_is_told_with_the_reason(tmp_path: Path) -> None:
    """A peer whose environment lacks its package is reported with the reason, and the benchmark succeeds."""
    told, printed = bench_peer(tmp_path, f'exec {sys.executable} "$@"')
    assert "No module named 'redis'" in told["refused"]["redis"]
    assert "No module named 'redis'" in printed


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_peer_gives_its_rows_beside_tierd(tmp_path: Path) -> None:
    """The peer and tierd have rows for batches and single blocks; only tierd puts with wait=False."""
    told, printed = bench_peer(tmp_path, dict_peer("honest"))
    batches = {f"{verb}_{shape}" for verb in ("put", "get", "get_again") for shape in ("2MiB_x16", "128KiB_x64")}
    single = {name for name in ROWS["one_block"] if "nowait" not in name}
    names = {f"redis_{name}" for name in batches | single} | {f"tierd_{name}" for name in batches | ROWS["one_block"]}
    assert told["refused"] == {}
    assert {row["name"] for row in told["rows"]} == names
    assert {row["unit"] for row in told["rows"] if row["name"].endswith(("_p50", "_beyond_copy"))} == {"us"}
    assert all(name in printed for name in names)


def test_a_peer_that_gives_other_bytes_has_no_rows(tmp_path: Path) -> None:
    """One wrong bit in a get refuses a peer's rows, with the reason."""
    told, _ = bench_peer(tmp_path, dict_peer("wrong"))
    assert told["rows"] == []
    assert "came back with other bytes" in told["refused"]["redis"]


def test_a_peer_that_crashes_leaves_no_process(tmp_path: Path) -> None:
    """The benchmark ends the processes of a crashed worker and removes its files."""
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    told, _ = bench_peer(tmp_path, dict_peer(str(tmp_path / "alive")))
    assert "ended before it was asked to" in told["refused"]["redis"]
    os.set_blocking(alive, True)
    assert os.read(alive, 1) == b""  # end of file comes when no process holds the other end
    os.close(alive)
