"""If tierd is gone, hangs or gets bad arguments, SGLang gets fewer pages, no exception and no long
wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "sglang", reason="sglang is not installed: make test-engines runs this in an environment of its own"
)

import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation

from tests.depth import report
from tests.engines.sglang.pools import PAGE, backend, fill, indices, mha, page
from tests.system.blocks import await_true
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(300)
KEYS = ["a", "b"]


def served(made: Any, keys: list[str]) -> bool:
    return bool(made.batch_exists(keys) == len(keys))


def test_a_daemon_that_dies(daemon: Daemon) -> None:
    """While the daemon is gone every call misses or drops its pages; after its return pages are
    served again."""
    pool = mha("page_first")
    made = backend(daemon.target, pool, model_name="dies")
    fill(pool, seed=1)
    assert made.batch_set_v1(KEYS, indices(0, 1)) == [True, True]
    daemon.kill()
    assert made.batch_exists(KEYS) == 0
    assert made.batch_get_v1(KEYS, indices(2, 3)) == [False, False]
    assert made.batch_set_v1(["c"], indices(4)) == [False]
    daemon.start()

    def back() -> bool:
        return made.batch_set_v1(["c", "d"], indices(4, 5)) == [True, True]

    await_true(back, "pages stored after the daemon came back")
    assert made.batch_get_v1(["c", "d"], indices(6, 7)) == [True, True]
    assert page(pool, 6 * PAGE) == page(pool, 4 * PAGE)


def test_an_engine_without_a_daemon(tmp_path: Path) -> None:
    """An engine starts, misses and ends without a daemon."""
    made = backend(str(tmp_path / "nobody"), mha("page_first"))
    assert made.batch_exists(KEYS) == 0 and made.batch_set_v1(KEYS, indices(0, 1)) == [False, False]
    assert made.batch_get_v1(KEYS, indices(0, 1)) == [False, False] and made.get_stats() is None
    made.close()


def test_a_hung_daemon(daemon: Daemon) -> None:
    """A daemon that does not answer costs a call at most its timeout, and most calls nothing."""
    pool = mha("page_first")
    made = backend(daemon.target, pool, model_name="hung", extra={"timeout_s": 1.0, "lookup_timeout_s": 0.5})
    fill(pool, seed=5)
    assert made.batch_set_v1(KEYS, indices(0, 1)) == [True, True]
    slowest = 0.0
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for call in (made.batch_exists, lambda keys: made.batch_get_v1(keys, indices(2, 3)), made.batch_exists) * 3:
            began = time.monotonic()
            assert call(KEYS) in (0, len(KEYS), [False] * len(KEYS), [True] * len(KEYS))
            slowest = max(slowest, time.monotonic() - began)
        if made.batch_get_v1(KEYS, indices(2, 3)) == [True, True]:
            assert [page(pool, i * PAGE) for i in (2, 3)] == [page(pool, i * PAGE) for i in (0, 1)]
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    report("SGLang, hung daemon", slowest_call_s=slowest)
    assert slowest < 10.0
    await_true(lambda: served(made, KEYS), "hits after the daemon went on")


def test_wrong_sizes_lose_nothing(daemon: Daemon) -> None:
    """Indices, tensors and pools that do not fit move nothing, and stored pages are unchanged."""
    pool = mha("page_first")
    made = backend(daemon.target, pool, model_name="sizes")
    fill(pool, seed=3)
    kept = page(pool, 0)
    assert made.batch_set_v1(KEYS, indices(0, 1)) == [True, True]
    assert made.batch_set_v1(["c", "d"], indices(2)) == [False, False]
    assert made.batch_get_v1(KEYS, torch.arange(3)) == [False, False]
    assert made.batch_get_v1(KEYS, None) == [False, False] and made.batch_get_v1([], indices(0)) == []
    flat = backend(daemon.target, pool, model_name="sizes", interface_v1=0)
    short = torch.zeros(4, dtype=torch.uint8)
    assert not flat.batch_set(["a"], [short]) and not flat.batch_set(["a"], []) and not flat.set("a", None)
    assert flat.set("a", pool.get_data_page(0))
    assert (
        flat.get("a", short) is None and flat.get("a") is None and flat.batch_get(["a", "b"], [short]) == [None, None]
    )
    whole = pool.get_dummy_flat_data_page()
    assert flat.get("a", whole) is whole and not made.batch_exists(["c"])
    assert made.batch_get_v1(KEYS, indices(5, 6)) == [True, True] and page(pool, 5 * PAGE) == kept


def test_what_was_cleared_is_not_served(daemon: Daemon) -> None:
    """After clear this engine misses pages stored before and hits pages stored later."""
    made = backend(daemon.target, mha("page_first"), model_name="clear")
    other = backend(daemon.target, mha("page_first"), model_name="clear")
    assert made.batch_set_v1(KEYS, indices(0, 1)) == [True, True]
    made.clear()
    assert made.batch_exists(KEYS) == 0 and made.batch_get_v1(KEYS, indices(0, 1)) == [False, False]
    assert made.batch_set_v1(KEYS[:1], indices(0)) == [True] and made.batch_exists(KEYS) == 1
    assert other.batch_exists(KEYS) == 2


def test_statistics(daemon: Daemon) -> None:
    """get_stats reports pages and speeds of transfers once, in SGLang's own class."""
    made = backend(daemon.target, mha("page_first"), model_name="stats", enable_storage_metrics=True)
    made.batch_set_v1(KEYS, indices(0, 1))
    made.batch_get_v1(KEYS, indices(2, 3))
    stats = made.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2]) and stats.prefetch_bandwidth[0] > 0
    assert made.get_stats().backup_pgs == []


def test_threads_share_it(daemon: Daemon) -> None:
    """SGLang's threads store, load and look up at the same time, and every page has its own bytes."""
    pool = mha("layer_first")
    made = backend(daemon.target, pool, model_name="threads")
    fill(pool, seed=4)
    faults: list[str] = []

    def work(number: int) -> None:
        key, own = f"t{number}", indices(number, 8 + number)
        for _ in range(10):
            if made.batch_set_v1([key], own[:PAGE]) != [True] or made.batch_exists([key]) != 1:
                faults.append(f"{key} was not stored")
            if made.batch_get_v1([key], own[PAGE:]) != [True] or page(pool, (8 + number) * PAGE) != page(
                pool, number * PAGE
            ):
                faults.append(f"{key} is not what was stored")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert faults == [] and not any(one.is_alive() for one in threads)


def test_sglangs_own_loops(daemon: Daemon) -> None:
    """The transfer loops of SGLang's controller, without its threads, store and fetch 200 pages in
    batches."""
    pool = mha("page_first_direct")
    pages, keys = 24, [f"k{number}" for number in range(200)]
    controller: Any = HiCacheController.__new__(HiCacheController)
    controller.page_size, controller.storage_host_pool = PAGE, pool
    controller.storage_backend = backend(daemon.target, pool, model_name="loops")
    controller.page_get_func, controller.page_set_func = controller._page_get_zero_copy, controller._page_set_zero_copy
    fill(pool, seed=5)
    places = indices(*(number % pages for number in range(200)))
    operation = StorageOperation(places, [0] * len(places), hash_value=keys, prefix_keys=[])
    controller._page_backup(operation)
    assert operation.completed_tokens == 200 * PAGE
    wanted = [page(pool, number * PAGE) for number in range(pages)]
    pool.kv_buffer.zero_()

    class Sync:
        def put(self, ack: Any) -> None:
            self.ack = ack

    controller.prefetch_sync_queue = Sync()
    fetch = PrefetchOperation("r", [0] * len(places))
    fetch.hash_value, fetch.host_indices = keys, places
    assert controller._page_transfer(fetch) == 200
    assert [page(pool, number * PAGE) for number in range(pages)] == wanted
