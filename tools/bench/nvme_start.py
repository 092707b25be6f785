"""Time to open a store of many blocks, against a raw read of its snapshot.

    python tools/bench/nvme_start.py [--blocks 100000] [--directory DIR] [--repeats 5] [--json]

Prints medians: `open` after a clean life (the snapshot alone) and after a crash (all in the
journal). Others are loading the index alone, and a raw read with the cache as warm as for `open`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tierd.checksum import record_checksum
from tierd.core.formats.meta import new_meta, seal
from tierd.core.formats.model import PAGE_ALIGN_BYTES, TierKind, TierSpec
from tierd.tiers.store.buffered import BufferedIO
from tierd.tiers.store.journal import BlocksStored, Journal, Marks, Record, SegmentBegun
from tierd.tiers.store.nvme import NvmeStore
from tierd.tiers.store.recovery import load_index
from tierd.tiers.store.snapshot import write_snapshot
from tierd.tiers.store.store_files import open_store
from tierd.tiers.store.stored_index import StoredIndex, replay

CLASS_BYTES = 2 * PAGE_ALIGN_BYTES
PAGES = 4096
BATCH = 64


def spec_for(blocks: int) -> TierSpec:
    """A store that the blocks fill to below its watermarks. Its slots are empty: open() does not
    read them."""
    segments = -(-blocks * 5 // (PAGES * 4))
    segment_bytes = CLASS_BYTES * PAGES
    return TierSpec(TierKind.NVME, 0, segments * segment_bytes, segment_bytes, slot_overhead_bytes=PAGE_ALIGN_BYTES)


def records_of(blocks: int, store: bytes, *, namespace: int = 0) -> list[Record]:
    """The journal's records of a store that holds this many blocks of one namespace."""
    metas = new_meta(blocks)
    metas["namespace"], metas["domain"], metas["tokens"], metas["epoch"] = namespace, 1, 16, 1
    metas["logical_length"], metas["slices"] = PAGE_ALIGN_BYTES, 1
    metas["hash"] = np.random.default_rng(1).integers(0, 256, (blocks, 32), dtype=np.uint8)
    metas["segment"], slots = np.divmod(np.arange(blocks), PAGES)
    metas["segment"] += 1
    metas["offset"], metas["generation"] = slots * CLASS_BYTES, np.arange(blocks) + 1
    metas["stored_length"] = PAGE_ALIGN_BYTES
    metas["store"] = np.frombuffer(store, dtype=np.uint8)
    metas = seal(metas, record_checksum)
    segments = [SegmentBegun(i, i + 1, 1, CLASS_BYTES, PAGES) for i in range(-(-blocks // PAGES))]
    return [*segments, *(BlocksStored(metas[i : i + BATCH]) for i in range(0, blocks, BATCH))]


def prepare(spec: TierSpec, directory: Path, records: list[Record] | None) -> bytes:
    """Makes the store, or files as at the end of a life: in a snapshot (records None), or in a
    journal."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        opened = open_store(spec, directory=directory, direct="off", buffered=BufferedIO(1, loop))
        store, number = opened.store, opened.journal.number
        opened.close(release=False)
    if records is not None:
        for path in [*directory.glob("snapshot-*"), *directory.glob("journal-*")]:
            path.unlink()
        write_snapshot(directory, StoredIndex(), store=store, number=number)
        Journal.create(directory, store=store, number=number, first=[Marks(1, 1), *records]).close()
    return store


async def open_once(spec: TierSpec, directory: Path, blocks: int) -> float:
    """Seconds of one open()."""
    tier = NvmeStore(spec, position=0, path=directory)
    start = time.perf_counter()
    found = (await tier.open()).gathered()
    elapsed = time.perf_counter() - start
    assert len(found.extents) == blocks
    await tier.close(release=False)
    return elapsed


def median_s(repeats: int, run: Callable[[], float]) -> float:
    """The median of this many runs, seconds."""
    return statistics.median(run() for _ in range(repeats))


def timed(work: Callable[[], object]) -> float:
    """Seconds that work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(directory: Path, *, blocks: int, repeats: int) -> dict[str, float]:
    """The figures, times in milliseconds."""
    spec = spec_for(blocks)
    records = records_of(blocks, prepare(spec, directory, None))

    def after_crash() -> float:
        prepare(spec, directory, records)
        return asyncio.run(open_once(spec, directory, blocks))

    crashed_s = median_s(repeats, after_crash)
    clean_s = median_s(repeats, lambda: asyncio.run(open_once(spec, directory, blocks)))
    snapshot = max(directory.glob("snapshot-*.bin"))
    raw_s = median_s(repeats, lambda: timed(lambda: np.fromfile(snapshot, dtype=np.uint8)))
    store = prepare(spec, directory, None)
    load_s = median_s(repeats, lambda: timed(lambda: load_index(directory, store=store)))
    replay_s = median_s(repeats, lambda: timed(lambda: replay(StoredIndex(), records)))
    return {
        "blocks": blocks,
        "snapshot_bytes": snapshot.stat().st_size,
        "bytes_per_block": snapshot.stat().st_size / max(1, blocks),
        "open_after_clean_ms": clean_s * 1e3,
        "open_after_crash_ms": crashed_s * 1e3,
        "load_snapshot_ms": load_s * 1e3,
        "replay_journal_ms": replay_s * 1e3,
        "raw_read_ms": raw_s * 1e3,
        "ratio_load_to_raw": load_s / raw_s,
        "ratio_open_to_raw": clean_s / raw_s,
    }


def main() -> None:
    """Reads the arguments, prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured; default: the temporary directory")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        figures = measure(Path(directory) / "store", blocks=given.blocks, repeats=given.repeats)
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value:14,.1f}")


if __name__ == "__main__":
    main()
