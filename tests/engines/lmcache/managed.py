"""LMCache's own StorageManager over tierd, set up by its own command line, and objects through it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.engines.lmcache.plugin import SOON_S, layout, raw
from tests.system.blocks import await_true


@contextmanager
def manager(entry: dict[str, Any]) -> Iterator[StorageManager]:
    """LMCache's storage with 64 MiB of memory, and the adapter of the entry beneath it."""
    given = ["--l1-size-gb", "0.0625", "--no-l1-use-lazy", "--eviction-policy", "noop"]
    made = StorageManager(parse_args([*given, "--l2-adapter", json.dumps(entry)]))
    try:
        yield made
    finally:
        made.close()


def write(made: StorageManager, keys: Sequence[ObjectKey], *, seed: int) -> list[bytes]:
    """Writes objects of random bits to LMCache's memory, for its store controller; returns their bytes."""
    given = made.reserve_write(list(keys), layout())
    torch.manual_seed(seed)
    for one in given.values():
        one.raw_data.copy_(torch.randint(0, 256, one.raw_data.shape, dtype=torch.uint8))
    written = [raw(given[one]) for one in keys]
    made.finish_write(list(keys))
    return written


def fetch(made: StorageManager, keys: Sequence[ObjectKey]) -> tuple[int, list[bytes]]:
    """How many keys its prefetch controller loaded from L2, and the bytes of all keys that are present."""
    task = made.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(list(keys), 0, layout())]))
    assert made.wait_prefetch_status(task, SOON_S)
    result = made.query_prefetch_status(task)
    assert result is not None
    there = [one for i, one in enumerate(keys) if result.hit_cells[0].test(i)]
    if not there:
        return 0, []
    with made.read_prefetched_results(there) as objects:
        assert objects is not None
        found = [raw(one) for one in objects]
    made.finish_read_prefetched(there)
    return result.l2_hit_cells[0].popcount(), found


def forget(made: StorageManager) -> None:
    """Empties LMCache's memory; waits until its store controller holds nothing more."""

    def is_empty() -> bool:
        made.clear()
        return bool(made.report_status()["l1_manager"]["total_object_count"] == 0)

    await_true(is_empty, "LMCache's memory emptied")


def saved(made: StorageManager) -> int:
    """The number of objects that its first adapter has stored."""
    (_, adapter), *_ = made.l2_adapters()
    return int(adapter.report_status()["counts"].get("saved_blocks", 0))
