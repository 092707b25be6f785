"""tierd as an L2 of LMCache, beneath its own memory and beside its other adapters.

    {"type": "plugin", "module_path": "tierd.integrations.lmcache", "class_name": "TierdL2",
     "adapter_params": {"target": ...}}

It implements L2AdapterInterface; LMCache decides which objects to store, fetch and keep in L1. Only
close waits for the daemon, with a deadline. Each task ends once; its eventfd rings after that. A
set bit means that the object holds the bytes stored under its key.

A lock is a prefetch: a lookup makes the daemon copy hits to a near tier, and pins nothing. So
nothing needs an unlock, and a dead process holds nothing. An object evicted between lookup and load
is a clear bit, which LMCache's controller counts as a miss.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import lmcache
import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from pydantic import Field

from tierd.client import Group, PutGroup
from tierd.client.values import NO_HASHES, Hashes
from tierd.errors import Unavailable
from tierd.integrations.coding import refuse_codec
from tierd.integrations.courier import Courier
from tierd.integrations.lmcache.names import ObjectNames, Part, bytes_of, facts_of, name_of
from tierd.integrations.options import Options
from tierd.integrations.pieces import Bytes
from tierd.integrations.store import EngineStore
from tierd.integrations.versions import check_version

T = TypeVar("T")
PART_OBJECTS, PART_BYTES = 64, 256 << 20
"""Objects held, or reserved, at a time while they are copied."""
LOOKUP_OBJECTS = 1024
RESULTS_MAX = 4096
"""The most results kept; beyond it the oldest unclaimed ones are dropped."""
logger = init_logger(__name__)


class L2Options(Options):
    """Options in adapter_params. least_load_tokens has no effect.

    object_bytes: 0: objects of equal keys but other shapes or types differ. Else the layout is
    ignored, and no object is longer: LMCache's serde stores other shapes than it looks up.
    close_timeout_s: how long close waits for transfers.
    """

    object_bytes: int = Field(default=0, ge=0)
    close_timeout_s: float = Field(default=30.0, gt=0)


@dataclass(frozen=True, slots=True)
class Stored:
    """A store task's result: whether all objects are stored now, and the bytes of those that are."""

    is_whole: bool = False
    length_bytes: int = 0


class Desk(Generic[T]):
    """Tasks of one kind, run on threads and reported by an eventfd. nothing: the result of a task
    that failed, was refused or never began."""

    def __init__(self, name: str, options: Options, *, ids: Callable[[], int], nothing: Callable[[int], T]) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._courier: Courier[tuple[int, int], T] = Courier(
            name, threads=options.threads, limit=options.queue_limit, wake=self._ring
        )
        self._next, self._nothing = ids, nothing
        self._results: dict[int, T] = {}
        self._turn = threading.Lock()

    def submit(self, work: Callable[[], T], *, count: int) -> int:
        """Accepts a task of so many keys; beyond the limit its result is there at once."""
        task = self._next()
        if not self._courier.submit((task, count), work):
            with self._turn:
                self._results[task] = self._nothing(count)
            self._ring()
        return task

    def take(self, task: int) -> T | None:
        """A task's result, once; None while it has none."""
        with self._turn:
            self._collect()
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """All results not yet taken."""
        with self._turn:
            self._collect()
            taken, self._results = self._results, {}
        return taken

    def close(self, *, timeout_s: float) -> bool:
        """Waits for running tasks and drops others; on timeout the eventfd stays open. Later tasks never ring."""
        ended = self._courier.close(timeout_s=timeout_s)
        if ended:
            fd, self.fd = self.fd, -1
            os.close(fd)
        return ended

    def _collect(self) -> None:
        for outcome in self._courier.finished():
            task, count = outcome.key
            if outcome.error:
                logger.warning("tierd: a task failed, which costs hits only: %s", outcome.error)
            self._results[task] = self._nothing(count) if outcome.value is None else outcome.value
        for oldest in list(itertools.islice(self._results, max(0, len(self._results) - RESULTS_MAX))):
            del self._results[oldest]

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # closed
            os.eventfd_write(self.fd, 1)


class TierdL2(L2AdapterInterface):
    """Raises ConfigError, Unsupported while it is made. Later only close raises, Unavailable if a
    transfer does not end."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        check_version("lmcache", lmcache.__version__)
        super().__init__()
        self._options = L2Options.read(params, where="adapter_params")
        refuse_codec(self._options, "LMCache's adapter", "let LMCache encode")
        self._store = EngineStore(self._options, facts_of(self._options))
        self._names = ObjectNames(self._store, self._options, object_bytes=self._options.object_bytes)
        self._hurry = threading.Event()
        self._closed = False
        ids = itertools.count().__next__
        self._stores: Desk[Stored] = Desk("tierd-store", self._options, ids=ids, nothing=lambda _: Stored())
        self._lookups: Desk[Any] = Desk("tierd-lookup", self._options, ids=ids, nothing=Bitmap)
        self._loads: Desk[Any] = Desk("tierd-load", self._options, ids=ids, nothing=Bitmap)

    # -- eventfds

    def get_store_event_fd(self) -> int:
        """Rings when a store has ended."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Rings when a lookup has ended."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """Rings when a load has ended."""
        return self._loads.fd

    # -- tasks

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Accepts the task; beyond the limit it fails at once."""
        return self._stores.submit(partial(self._save, list(keys), list(objects)), count=len(keys))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results since the last call: successful if every object is stored."""
        return {task: _store_result(stored) for task, stored in self._stores.take_all().items()}

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Accepts the task; beyond the limit it is a miss at once."""
        return self._lookups.submit(partial(self._find, list(keys), dict(group_layout_descs)), count=len(keys))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Bitmap of the stored objects, once; None before."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Does nothing: nothing is held."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Accepts the task; beyond the limit it is a miss at once."""
        return self._loads.submit(partial(self._load, list(keys), list(objects)), count=len(keys))

    def query_load_result(self, task_id: int) -> Any:
        """Bitmap of the loaded objects, once; None before."""
        return self._loads.take(task_id)

    # -- the rest

    def get_usage(self) -> AdapterUsage:
        """Unknown: tierd evicts by its own rules, and LMCache must not count evicted objects."""
        return AdapterUsage(total_bytes_used=0, total_capacity_bytes=0)

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status page."""
        counts = dict(self._store.counts)
        return {
            "is_healthy": not self._closed,
            "type": type(self).__name__,
            "tiers": list(self._store.tiers),
            "counts": counts,
        }

    def close(self) -> None:
        """Ends running tasks and releases LMCache's memory. Raises Unavailable if a transfer does
        not end: then that memory must stay."""
        if self._closed:
            return
        self._closed = True
        self._hurry.set()
        ended = [
            desk.close(timeout_s=self._options.close_timeout_s) for desk in (self._stores, self._lookups, self._loads)
        ]
        self._store.close()
        if not all(ended):
            raise Unavailable(
                f"l2: transfers did not end in {self._options.close_timeout_s} s; end the engine's process"
            )

    # -- on the threads

    def _save(self, keys: Sequence[Any], objects: Sequence[Any]) -> Stored:
        stored, length = [], 0
        for part in self._names.parts_of_objects(keys, objects):
            sources = [bytes_of(objects[i]) for i in part.members]
            hashes = self._hashes(part, keys)
            for start, stop in _cuts(sources):
                good = self._save_some(part, hashes[start:stop], sources[start:stop])
                at = [i for i, is_stored in zip(range(start, stop), good, strict=True) if is_stored]
                stored += [part.members[i] for i in at]
                length += sum(len(sources[i]) for i in at)
        if stored:
            self._notify_keys_stored([keys[i] for i in stored], [len(objects[i].byte_array) for i in stored])
        return Stored(len(stored) == len(keys), length)

    def _save_some(self, part: Part, hashes: Hashes, sources: Sequence[Bytes]) -> list[bool]:
        if self._hurry.is_set() or len(hashes) < len(sources):  # closing, or no daemon
            return [False] * len(sources)
        groups = [PutGroup(part.space, hashes[i : i + 1], lengths=[len(source)]) for i, source in enumerate(sources)]
        return self._store.save_each(groups, [[source] for source in sources])

    def _find(self, keys: Sequence[Any], groups: dict[int, Any]) -> Any:
        bits = Bitmap(len(keys))
        for part in self._names.parts_of_keys(keys, groups):
            hashes = self._hashes(part, keys)
            for start in range(0, len(hashes), LOOKUP_OBJECTS):
                here = hashes[start : start + LOOKUP_OBJECTS]
                found = self._store.lookup([Group(part.space, here)]) if not self._hurry.is_set() else None
                for tiers in found.tier_of[:1] if found else ():
                    bits.batched_set([part.members[start + i] for i in np.flatnonzero(tiers[0] >= 0).tolist()])
                    self._bring_near(part, here[tiers[0] > 0])
        return bits

    def _bring_near(self, part: Part, hashes: Hashes) -> None:
        if len(hashes):
            self._store.prefetch([Group(part.space, hashes)])

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        bits = Bitmap(len(keys))
        for part in self._names.parts_of_objects(keys, objects):
            targets = [bytes_of(objects[i], writable=True) for i in part.members]
            hashes = self._hashes(part, keys)
            for start, stop in _cuts(targets) if len(hashes) == len(targets) else ():
                good = self._load_some(part, hashes[start:stop], targets[start:stop])
                bits.batched_set([part.members[start + i] for i in good])
        loaded = [keys[i] for i in range(len(keys)) if bits.test(i)]
        if loaded:
            self._notify_keys_accessed(loaded)
        return bits

    def _load_some(self, part: Part, hashes: Hashes, targets: Sequence[Bytes]) -> list[int]:
        """The loaded objects: all in one call, but after the first failure one call each."""
        good = self._load_run(part, hashes, targets)
        return [
            *range(good),
            *(i for i in range(good, len(targets)) if self._load_run(part, hashes[i : i + 1], targets[i : i + 1])),
        ]

    def _load_run(self, part: Part, hashes: Hashes, targets: Sequence[Bytes]) -> int:
        if self._hurry.is_set():
            return 0
        return self._store.load([Group(part.space, hashes)], [[[target] for target in targets]]).good[0]

    def _hashes(self, part: Part, keys: Sequence[Any]) -> Hashes:
        """Hashes of the part's keys; none while there is no daemon."""
        if not part.space.is_open:
            self._store.lookup([Group(part.space, NO_HASHES)])  # opens it if there is a daemon
        return part.space.fold([name_of(keys[i]) for i in part.members])


def _cuts(pieces: Sequence[Bytes]) -> list[tuple[int, int]]:
    """Runs of pieces that are moved in one call."""
    cuts, start, length = [], 0, 0
    for i, piece in enumerate(pieces):
        if i > start and (i - start == PART_OBJECTS or length + len(piece) > PART_BYTES):
            cuts.append((start, i))
            start, length = i, 0
        length += len(piece)
    return [*cuts, (start, len(pieces))] if pieces else []


def _store_result(stored: Stored) -> L2StoreResult:
    return L2StoreResult(stored.is_whole, stored.length_bytes)
