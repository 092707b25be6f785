"""Start of a daemon whose store holds ten million blocks: time, peak memory, and cost of later
calls.

    python -m tools.bench.many_start [--blocks 10000000] [--starts 3] [--json]

Real processes, from exec to "ready", and to the first block that a client gets from the host tier.
A start reads no slot, so the slot files are sparse: ten million blocks take 2.6 GB of disk, the
snapshot's. Promises: ready in 15 s, the host tier in the first second, at most 1.3 times the later
memory. Calls are about a thousand blocks in memory, in turn with those of a daemon with the same
tiers and no other blocks. Each promises at most 1.3 times that daemon's time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console

from tierd.checksum import record_checksum
from tierd.client import Client, NamespaceSpec
from tierd.core.formats.meta import new_meta, seal
from tierd.core.formats.model import PAGE_ALIGN_BYTES, StructArray
from tierd.errors import TierdError
from tierd.testing import Daemon
from tierd.tiers.store.journal import SegmentBegun
from tierd.tiers.store.recovery import load_index
from tierd.tiers.store.snapshot import write_snapshot
from tierd.tiers.store.store_files import slots_path
from tierd.tiers.store.stored_index import StoredIndex
from tools.bench import daemon_start, size
from tools.bench.rows import Row, row_of
from tools.bench.table import WIDE, table_of

BLOCKS = 10_000_000
PROMISE_S, PROMISE_SERVES_S = 15.0, 1.0
CLASS_BYTES = 2 * PAGE_ALIGN_BYTES
PAGES = 1 << 17
"""Of a segment: 1 GiB, as a store of this size has."""
SEALED = 1 << 16
TOKENS = 16
PROMPT = range(4 * TOKENS)
ASKED_EVERY_S = 0.02
RUNS = 31
"""Of each call."""
SETTLED_S = 3.0
"""After this time the start has freed all of its memory."""
INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Overrides the shell: the life before the first measured start compiles, as an install does."""
CONFIG = daemon_start.CONFIG + "\n[scrub]\nperiod = 0\n"
"""No scrub: the slots are empty."""


def places(blocks: int) -> int:
    """Segments of a store that the blocks fill to below its watermarks."""
    return -(-blocks * 5 // (PAGES * 4))


def make_sparse(directory: Path, blocks: int) -> None:
    """Slot files that take no disk space, for a store that is opened for the first time."""
    directory.mkdir(parents=True, mode=0o700)
    for place in range(places(blocks)):
        fd = os.open(slots_path(directory, place), os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, PAGES * CLASS_BYTES)
        os.close(fd)


def metas_of(blocks: int, store: bytes, *, namespace: int) -> StructArray:
    """A store's records of this many blocks of one namespace."""
    metas = new_meta(blocks)
    metas["namespace"], metas["domain"], metas["tokens"], metas["epoch"] = namespace, 1, 16, 1
    metas["logical_length"], metas["stored_length"], metas["slices"] = PAGE_ALIGN_BYTES, PAGE_ALIGN_BYTES, 1
    metas["store"] = np.frombuffer(store, dtype=np.uint8)
    random = np.random.default_rng(1)
    for start in range(0, blocks, SEALED):
        part = metas[start : start + SEALED]
        numbers = np.arange(start, start + len(part))
        part["hash"] = random.integers(0, 256, (len(part), 32), dtype=np.uint8)
        part["segment"], part["offset"] = numbers // PAGES + 1, numbers % PAGES * CLASS_BYTES
        part["generation"], part["time_ms"] = numbers + 1, numbers + 1
        part[:] = seal(part, record_checksum)
    return metas


def fill(directory: Path, blocks: int, namespace: int) -> None:
    """Writes them into the store's snapshot, as its last life would have."""
    store = bytes.fromhex(json.loads((directory / "store.json").read_text())["store"])
    former = load_index(directory, store=store)
    segments = {i: SegmentBegun(i, i + 1, 1, CLASS_BYTES, PAGES) for i in range(-(-blocks // PAGES))}
    index = StoredIndex(segments, metas_of(blocks, store, namespace=namespace), former.index.namespaces)
    index = dataclasses.replace(index, next_segment=len(segments) + 1, next_generation=blocks + 1)
    for path in [*directory.glob("snapshot-*"), *directory.glob("journal-*")]:
        path.unlink()
    write_snapshot(directory, index, store=store, number=former.next_number)


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes: resident now, and at most so far."""
    told = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, most = (int(told[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def first_served_s(target: str, namespace: NamespaceSpec) -> float:
    """The time.perf_counter() at which a client first got the prompt in host memory."""
    page = bytearray(len(PROMPT) // TOKENS * PAGE_ALIGN_BYTES)
    while True:
        with contextlib.suppress(TierdError), Client(target) as client:
            if client.get(client.open_namespace(namespace), PROMPT, out=page).tokens == len(PROMPT):
                return time.perf_counter()
        time.sleep(ASKED_EVERY_S)


def measure(blocks: int, starts: int) -> list[Row]:
    """The rows, of this many starts."""
    config = CONFIG.format(capacity=places(blocks) * PAGES * CLASS_BYTES, segment=PAGES * CLASS_BYTES)
    daemon = Daemon(config, env=INSTALLED)
    directory = daemon.root / "state" / "nvme-0"
    took, served, peaks, steady, calls = list[float](), list[float](), list[float](), list[float](), list[Row]()
    namespace = NamespaceSpec(model="bench", tokens_per_block=TOKENS, block_bytes=PAGE_ALIGN_BYTES)
    make_sparse(directory, blocks)
    with daemon:
        with Client(daemon.target) as client:
            opened = client.open_namespace(namespace)
            client.put(opened, PROMPT, [bytes(PAGE_ALIGN_BYTES)] * (len(PROMPT) // TOKENS))
        daemon.stop()
        filling = [sys.executable, "-m", "tools.bench.many_start", "--fill", str(directory)]
        subprocess.run([*filling, "--blocks", str(blocks), "--namespace", str(opened.id)], check=True)
        for number in range(starts):
            begun = time.perf_counter()
            with ThreadPoolExecutor(1) as asking:
                first = asking.submit(first_served_s, daemon.target, namespace)
                daemon.start()
                took.append(time.perf_counter() - begun)
                served.append(first.result() - begun)
            time.sleep(SETTLED_S)
            now, most = memory_of(daemon.pid)
            peaks.append(most / 1e9)
            steady.append(now / 1e9)
            if number == starts - 1:
                calls = calls_among(blocks, daemon, config)
            daemon.stop()
        if daemon.log.count(f"blocks={blocks + len(PROMPT) // TOKENS} ") != starts:
            raise RuntimeError(f"many_start: not every start took in {blocks} blocks; its log:\n{daemon.log[-2000:]}")
    name, what = f"{blocks // 1_000_000}m", f"{blocks:,} blocks on NVMe"
    return [
        row_of(f"start_{name}", took, unit="s", limits=[PROMISE_S] * starts, meaning=f"from exec to ready with {what}"),
        row_of(
            f"start_{name}_serves",
            served,
            unit="s",
            limits=[PROMISE_SERVES_S] * starts,
            meaning="from exec to a block from host memory",
        ),
        row_of(
            f"start_{name}_memory", peaks, unit="GB", limits=steady, meaning="the most until ready, against what stays"
        ),
        *calls,
    ]


def calls_among(blocks: int, daemon: Daemon, config: str) -> list[Row]:
    """`put_at_10M`, `get_at_10M`, `lookup_at_10M`: milliseconds a call, against an empty daemon."""
    empty = Daemon(config, env=INSTALLED)
    make_sparse(empty.root / "state" / "nvme-0", blocks)
    with empty, Client(empty.target) as first, Client(daemon.target) as second:
        benches = {
            name: size.Bench(client, blocks=size.FEW, batch=size.BATCH)
            for name, client in (("few", first), ("many", second))
        }
        against = f"among {blocks:,} on NVMe, against the same among {size.FEW:,}"
        return size.compared(benches, runs=RUNS, label=size.label_of(blocks), against=against)


def main() -> None:
    """Reads the arguments, prints the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--namespace", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.fill:
        fill(given.fill, given.blocks, given.namespace)
        return
    rows = measure(given.blocks, given.starts)
    if given.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    Console(width=WIDE).print(table_of(rows, title=f"{given.starts} starts", is_wide=True))


if __name__ == "__main__":
    main()
