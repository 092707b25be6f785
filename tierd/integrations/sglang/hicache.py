"""tierd as the storage of SGLang's HiCache, below the host pools.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":
        "tierd", "module_path": "tierd.integrations.sglang", "class_name": "TierdHiCache",
        "interface_v1": 1}'

It implements HiCacheStorage, versions 1 (by pointer), 2 (side pools of hybrid models) and 0 (flat
tensors). SGLang decides which pages to fetch and when. After a pool is registered nothing raises,
and no call waits longer than the options allow. A page reported as loaded holds the bytes that the
same rank of the same shape stored under its key. Only the writer of a replicated pool writes it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.version import __version__

from tierd.errors import InvalidArgument, TierdError
from tierd.integrations.pieces import Pieces
from tierd.integrations.sglang.advised import count, teach
from tierd.integrations.sglang.names import facts_of, has_no_writers, options_of, place_of, spec_of
from tierd.integrations.sglang.pages import FlatPages, HostPages, PointerPages, pages_of
from tierd.integrations.sglang.stored import StoredPages, leading
from tierd.integrations.sglang.values import geometry_of, order_of
from tierd.integrations.store import EngineStore
from tierd.integrations.versions import check_version

KV = PoolName.KV.value
STATS_MAX = 1024
"""Transfers that get_stats remembers between two calls."""
logger = logging.getLogger(__name__)


class Shelf:
    """A pool's pages in host memory and in tierd. One without bytes (a logical anchor) has everything."""

    def __init__(self, pages: HostPages, stored: StoredPages | None, *, is_writer: bool) -> None:
        self.pages, self.stored, self.is_writer = pages, stored, is_writer

    def worth(self, keys: Sequence[str]) -> int:
        """Pages, from the first on, that are stored and worth loading."""
        return self.stored.worth(keys) if self.stored else len(keys)

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are stored."""
        return self.stored.present(keys) if self.stored else [True] * len(keys)

    def load(self, keys: Sequence[str], host_indices: Any) -> int:
        """Storage to host memory; returns leading pages loaded. Raises InvalidArgument for misfit indices."""
        if not self.stored:
            return len(keys)
        targets = self.pages.targets(host_indices, pages=len(keys))
        good = self.stored.load(keys, targets)
        self.pages.settle(host_indices, targets, good=good)
        return good

    def save(self, keys: Sequence[str], host_indices: Any, *, before: Sequence[str]) -> int:
        """Host memory to storage; returns leading pages stored. Raises InvalidArgument for misfit indices."""
        if not self.stored:
            return len(keys)
        if not self.is_writer:
            return 0
        return self.stored.save(keys, self.pages.sources(host_indices, pages=len(keys)), before=before)


class TierdHiCache(HiCacheStorage):
    """The class that StorageBackendFactory makes for "dynamic". Raises ConfigError, Unsupported
    while it is made and when a pool is registered, later nothing."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        check_version("sglang", __version__)
        self._config = storage_config
        self._options = options_of(storage_config)
        self._is_by_pointer = bool((storage_config.extra_config or {}).get("interface_v1"))
        if not self._is_by_pointer:
            logger.warning('tierd: each page is copied twice; set "interface_v1": 1 in the extra config')
        self._store = EngineStore(self._options, facts_of(storage_config, self._options))
        teach(self._store.advice, self._options.prefill_tokens_per_s)
        self._pools: dict[str, Any] = {}
        self._shelves: dict[str, Shelf] = {}
        self._cleared = ""
        self._moved: dict[str, deque[tuple[int, float]]] = {
            "prefetch": deque(maxlen=STATS_MAX),
            "backup": deque(maxlen=STATS_MAX),
        }

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the pool of the model's KV. Raises Unsupported for a layout without buffers by
        pointer (page_unified), ConfigError without a model's name or for an unfit codec."""
        super().register_mem_pool_host(mem_pool_host)
        pages = PointerPages(mem_pool_host) if self._is_by_pointer else FlatPages(mem_pool_host)
        self._store.introduce(facts_of(self._config, self._options, pages))
        self._pools[KV] = mem_pool_host
        self._shelves[KV] = self._shelf(pages, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Takes a pool of a hybrid model; the anchor may come again."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if self._pools.get(name) is not host_pool:
            self._pools[name] = host_pool
            self._shelves[name] = self._shelf(pages_of(host_pool), name)
            if has_no_writers(self._config, name, host_pool):
                logger.warning(
                    "tierd: pool %s gets no hits: each rank has its own heads, but SGLang stores one rank's", name
                )

    # -- version 1: by pointer

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Stored pages, from the first on. With a prefill rate, those that are worth loading: SGLang
        loads what it learns of here."""
        shelf = self._shelves.get(KV)
        return shelf.worth(keys) if shelf else 0

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """The pages that are in host memory now: those before the first that is not stored."""
        return self._counted("prefetch", KV, keys, lambda shelf: shelf.load(keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """The pages that are stored now."""
        before = _before(extra_info)
        return self._counted("backup", KV, keys, lambda shelf: shelf.save(keys, host_indices, before=before))

    # -- version 2: side pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The prefixes that every pool can serve. BLOCK_GROUPS never restricts a hit."""
        kv_pages = self.batch_exists(keys, extra_info)
        hits = {KV: kv_pages} if kv_pages else {}
        stops = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if not stops or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue
            servable = self._stops(transfer, keys[:kv_pages])
            if servable:
                hits[transfer.name] = max(servable)
            stops = [stop for stop in stops if stop in servable]
        return PoolTransferResult(stops[-1] if stops else 0, hits, stops)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Per pool, the pages that are in host memory now."""
        return {t.name: self._done(str(t.name), t.keys or [], partial(_load, t)) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Per pool, the pages that are stored now."""
        before = _before(extra_info)
        return {t.name: self._done(str(t.name), t.keys or [], partial(_save, t, before)) for t in transfers}

    # -- version 0: flat tensors

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        shelf = self._shelves.get(KV)
        return shelf is not None and shelf.present([key]) == [True]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The tensor, filled; None if the page is not stored."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """The tensors, filled; None from the first page on that is not stored."""
        tensors = list(target_locations or [])
        done = self._done(KV, keys, lambda shelf: self._take(shelf, keys, tensors))
        return [tensors[i] if good else None for i, good in enumerate(done)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Whether a page is stored now."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Whether all pages are stored now."""
        tensors = list(values or [])
        return all(self._done(KV, keys, lambda shelf: self._keep(shelf, keys, tensors)))

    # -- the rest

    def clear(self) -> None:
        """Hides all pages stored before from this process.

        `tierctl epoch bump` removes them for all engines; ranks that share pages need that.
        """
        self._cleared = uuid.uuid4().hex
        logger.warning("tierd: cleared for this rank only; run `tierctl epoch bump` to clear for all engines")
        for name, shelf in list(self._shelves.items()):
            self._shelves[name] = self._shelf(shelf.pages, name)

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call; None if they are off. Counts decisions, too."""
        if not self._config.enable_storage_metrics:
            return None
        count(self._store.advice.take_counts(), self._config)
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415 -- heavy

        taken = {name: [moved.popleft() for _ in range(len(moved))] for name, moved in self._moved.items()}
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in taken["prefetch"]],
            backup_pgs=[pages for pages, _ in taken["backup"]],
            prefetch_bandwidth=[speed for _, speed in taken["prefetch"]],
            backup_bandwidth=[speed for _, speed in taken["backup"]],
        )

    def close(self) -> None:
        """Ends the session and releases the pools."""
        self._store.close()
        self._shelves.clear()
        self._pools.clear()
        self.mem_pool_host = None
        self.registered_pools: dict[str, Any] = {}

    # -- inner

    def _shelf(self, pages: HostPages, name: str) -> Shelf:
        place = place_of(self._config, name, pages.pool)
        if pages.is_logical:
            return Shelf(pages, None, is_writer=place.is_writer)
        spec = spec_of(self._config, self._options, pages, name=name, cleared=self._cleared)
        if name == KV:  # side pools have states and indices, which codecs do not know
            spec = self._store.codings.spec(spec, geometry_of(pages))
            if spec.codec:
                self._store.codings.arrange(spec, order_of(pages))
        stored = StoredPages(
            self._store, spec, rank=place.rank, publishes_names=name == KV
        )  # other pools have the same keys
        return Shelf(pages, stored, is_writer=place.is_writer)

    def _done(self, name: str, keys: Sequence[str], work: Callable[[Shelf], int]) -> list[bool]:
        """One verdict a key: true for the leading keys that `work` counts."""
        shelf = self._shelves.get(name)
        try:
            good = work(shelf) if shelf and keys else 0
        except TierdError as error:
            logger.warning("tierd: %s pages of pool %s were not moved: %s", len(keys), name, error)
            good = 0
        return [True] * good + [False] * (len(keys) - good)

    def _counted(self, what: str, name: str, keys: Sequence[str], work: Callable[[Shelf], int]) -> list[bool]:
        began = time.perf_counter()
        done = self._done(name, keys, work)
        seconds = max(time.perf_counter() - began, 1e-9)
        pages = leading(done)
        if what == "prefetch" and name in self._shelves:
            self._store.advice.loaded_tokens(pages * self._shelves[name].pages.page_tokens, seconds)
        if pages and self._config.enable_storage_metrics:
            length = sum(self._shelves[name].pages.lengths)
            self._moved[what].append((pages, pages * length / seconds / 1e9))
        return done

    def _stops(self, transfer: PoolTransfer, keys: Sequence[str]) -> Collection[int]:
        """Prefix lengths, in pages, that the transfer's pool can serve."""
        shelf = self._shelves.get(str(transfer.name))
        if shelf is None:
            return ()
        present = shelf.present(keys)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return range(1, leading(present) + 1)
        return set(_window_ends(present, window=max(1, len(transfer.keys or ()))))

    def _take(self, shelf: Shelf, keys: Sequence[str], tensors: Sequence[Any]) -> int:
        return shelf.stored.load(keys, _pieces(tensors, pages=len(keys))) if shelf.stored else 0

    def _keep(self, shelf: Shelf, keys: Sequence[str], tensors: Sequence[Any]) -> int:
        return shelf.stored.save(keys, _pieces(tensors, pages=len(keys))) if shelf.stored and shelf.is_writer else 0


def _load(transfer: PoolTransfer, shelf: Shelf) -> int:
    return shelf.load(transfer.keys or [], transfer.host_indices)


def _save(transfer: PoolTransfer, before: Sequence[str], shelf: Shelf) -> int:
    return shelf.save(transfer.keys or [], transfer.host_indices, before=before)


def _window_ends(present: Sequence[bool], *, window: int) -> Iterator[int]:
    """Prefix lengths whose last `window` pages, or all, are there."""
    run = 0
    for stop, here in enumerate(present, 1):
        run = run + 1 if here else 0
        if run >= min(window, stop):
            yield stop


def _pieces(tensors: Sequence[Any], *, pages: int) -> list[Pieces]:
    if len(tensors) != pages or any(tensor is None for tensor in tensors):
        raise InvalidArgument(f"tensors: {len(tensors)} for {pages} pages, or some are None; pass one each")
    return [[tensor] for tensor in tensors]


def _before(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    return (extra_info.prefix_keys if extra_info else None) or ()
