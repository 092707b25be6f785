"""tierd beneath vLLM's own offloading of GPU memory to pinned host memory.

It is a SecondaryTierManager for TieringOffloadingSpec. Threads of the engine's process copy once
between vLLM's mapping and the daemon's pages. The OffloadingConnector of vLLM decides which blocks
move, when, and how much of a match is used. Only drain_jobs and shutdown wait for the daemon, with
a deadline. Each job is reported once. A chunk reported as loaded holds the bytes stored under its
key. After shutdown nothing refers to vLLM's mapping.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager, LookupPhase
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tierd.errors import Unavailable
from tierd.integrations.coding import refuse_codec
from tierd.integrations.courier import Courier, Outcome
from tierd.integrations.options import Options
from tierd.integrations.store import EngineStore
from tierd.integrations.vllm.chunks import ChunkNames, Chunks, facts_of

LOAD_BLOCKS = 64
"""Chunks held at a time while they are copied."""
COUNTERS = {
    "lookups": "Lookups sent to tierd",
    "loaded_blocks": "Chunks loaded from tierd",
    "loaded_bytes": "Bytes loaded from tierd",
    "saved_blocks": "Chunks stored in tierd, including chunks that it had already",
    "dropped_blocks": "Chunks that were not stored in tierd, for lack of space or of a daemon",
    "failed_loads": "Loads that ended in an error",
    "failed_saves": "Saves that ended in an error",
    "refused_jobs": "Transfers refused because too many were waiting",
}
logger = init_logger(__name__)


class TierOptions(Options):
    """Options beside `type` and `module_path` in an entry of secondary_tiers. enable_kv_events:
    report stored chunks, if vLLM's own switch is on too. locality: of those events.
    drain_timeout_s: how long a cache reset and the shutdown wait for transfers.
    least_load_tokens has no effect: vLLM claims the match."""

    enable_kv_events: bool = False
    locality: Literal["LOCAL", "REMOTE"] | None = "LOCAL"
    drain_timeout_s: float = 30.0


class ChunkLookups(AsyncLookupManager):
    """Lookups in flight, one call to the daemon for all of a request's keys in a step."""

    def __init__(self, present: Callable[[Sequence[OffloadKey]], list[bool]], tier_type: str) -> None:
        self._present = present
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Which of the keys are stored."""
        return self._present(keys)

    def mark_miss(self, keys: Collection[OffloadKey]) -> None:
        """Marks failed keys, except those with a newer lookup in flight (vLLM before 0.33 fails on it)."""
        states = ((key, self._lookup_state.get(key)) for key in keys)
        super().mark_miss([key for key, state in states if state and state.phase is LookupPhase.RESOLVED])


class TierdTier(SecondaryTierManager):
    """`{"type": "TierdTier", "module_path": "tierd.integrations.vllm", "target": ...}`. At start it
    raises ConfigError, Unsupported; later only `shutdown` raises Unavailable, if a transfer does
    not end and vLLM must keep the mapping."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **words: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options = TierOptions.read(words, where=f"secondary_tiers.{tier_type}")
        refuse_codec(self._options, "TierdTier", "use TierdConnector")
        self.locality = Locality(self._options.locality) if self._options.locality else None
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8)  # [chunks, row_bytes]
        self._store = EngineStore(self._options, facts_of(offloading_spec))
        self._names = ChunkNames(self._store, offloading_spec, row_bytes=self.block_size_bytes, options=self._options)
        self._lookups = ChunkLookups(self._present, tier_type)
        self._loads, self._saves = self._courier("tierd-load"), self._courier("tierd-save")
        self._jobs: dict[int, TransferJob] = {}
        self._refused: list[int] = []
        self._refusals = 0
        self._hurry = threading.Event()
        self._last_counts: Counter[str] = Counter()
        self._events: list[OffloadingEvent] | None = [] if self._wants_events() else None

    # -- the interface of a tier in vLLM

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks as they come."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """RETRY until the daemon has answered."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Sends the step's lookups."""
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forgets the request's lookups."""
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Accepts the job, or drops it if too many wait."""
        self._submit(self._saves, job_metadata, self._save)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Accepts the job, or reports it as a miss if too many wait."""
        self._submit(self._loads, job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended since the last call."""
        refused, self._refused = self._refused, []
        ended = [*self._loads.finished(), *self._saves.finished()]
        return [*(self._result(job, (), None) for job in refused), *(self._outcome(one) for one in ended)]

    def has_pending_work(self) -> bool:
        """Whether jobs are in flight."""
        return bool(self._jobs)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks stored by this engine. tierd's own events (`Client.watch`) report removals."""
        taken: list[OffloadingEvent] = self._events or []
        if taken:
            self._events = []
        return taken

    def drain_jobs(self) -> None:
        """Waits until no job is in flight; jobs not begun after half of drain_timeout_s end at once."""
        if not self._drained():
            logger.error(
                "tierd: transfers did not end in %s s; vLLM cannot reset its cache", self._options.drain_timeout_s
            )

    def shutdown(self) -> None:
        """Ends jobs in flight and releases vLLM's mapping. Raises Unavailable if a transfer does
        not end: then the mapping must stay."""
        ended = self._drained()
        self._hurry.set()
        self._lookups.shutdown()
        for courier in (self._loads, self._saves):
            courier.close(timeout_s=0.0)
        self._store.close()
        if not ended:
            raise Unavailable(
                f"tier: transfers did not end in {self._options.drain_timeout_s} s; end the engine's process"
            )
        self._rows = self._primary_kv_view = None

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counts since the last call."""
        counts = Counter({name: self._store.counts[name] for name in COUNTERS} | {"refused_jobs": self._refusals})
        stats = OffloadingConnectorStats()
        for name, amount in (counts - self._last_counts).items():
            stats.increase_counter(_metric(name), amount, (self.tier_type,))
        self._last_counts = counts
        return None if stats.is_empty() else stats

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 -- vLLM's words
        """Counters, by the name of the tier."""
        return {
            _metric(name): OffloadingCounterMetadata(documentation=f"{text}, by tier.", labelnames=("tier",))
            for name, text in COUNTERS.items()
        }

    # -- on the threads

    def _present(self, keys: Sequence[OffloadKey]) -> list[bool]:
        present = dict.fromkeys(keys, False)
        for group, members in _by_group(keys).items() if not self._hurry.is_set() else ():
            found = self._store.lookup([self._names.group(members, group=group)])
            for tiers in found.tier_of[:1]:
                present.update(zip(members, (tiers[0] >= 0).tolist(), strict=True))
        return [present[key] for key in keys]

    def _load(self, chunks: Chunks) -> list[OffloadKey]:
        """The loaded keys: of each group those before the first failure."""
        rows = dict(zip(chunks.keys, chunks.rows, strict=True))
        loaded: list[OffloadKey] = []
        for group, members in _by_group(chunks.keys).items():
            for start in range(0, len(members), LOAD_BLOCKS):
                part = members[start : start + LOAD_BLOCKS]
                good = self._load_part(part, [rows[key] for key in part], group=group)
                loaded += part[:good]
                if good < len(part):
                    break
        return loaded

    def _load_part(self, keys: Sequence[OffloadKey], rows: Sequence[int], *, group: int) -> int:
        if self._hurry.is_set():
            return 0
        wanted = self._names.group(keys, group=group)
        if len(wanted.hashes) < len(keys):  # no daemon
            return 0
        return self._store.load([wanted], [[[self._rows[row]] for row in rows]]).good[0]

    def _save(self, chunks: Chunks) -> list[OffloadKey]:
        """The keys that are stored now."""
        saved: list[OffloadKey] = []
        for run in self._names.runs(chunks):
            if self._hurry.is_set():
                break
            group = self._names.put_group(chunks, run)
            stored = self._store.save(group, [[self._rows[chunks.rows[i]]] for i in run.members])
            saved += [chunks.keys[i] for i in run.members[:stored]]
        return saved

    # -- between them

    def _submit(
        self,
        courier: Courier[int, list[OffloadKey]],
        job: TransferJob,
        work: Callable[[Chunks], list[OffloadKey]],
    ) -> None:
        ends = dict(getattr(job.req_context, "_offload_key_positions", ()))
        chunks = Chunks(tuple(job.keys), [int(row) for row in job.chunk_ids], ends)
        self._jobs[job.job_id] = job
        if not courier.submit(job.job_id, partial(work, chunks)):
            self._refusals += 1
            self._refused.append(job.job_id)

    def _outcome(self, outcome: Outcome[int, list[OffloadKey]]) -> JobResult:
        if outcome.error:
            logger.warning("tierd: a transfer failed, which costs hits only: %s", outcome.error)
        return self._result(outcome.key, outcome.value or (), outcome.seconds)

    def _result(self, job_id: int, done: Sequence[OffloadKey], seconds: float | None) -> JobResult:
        job = self._jobs.pop(job_id)
        if job.is_promotion:
            self._lookups.mark_miss(set(job.keys).difference(done))
        elif done and self._events is not None:
            self._events.append(OffloadingEvent(list(done), self.medium, removed=False, locality=self.locality))
        is_whole = len(done) == len(job.keys)
        some = tuple(done) if done and job.is_promotion and not is_whole else None
        return JobResult(job_id, is_whole, some, seconds, len(done) * self.block_size_bytes)

    def _drained(self) -> bool:
        """Half of the time is for all jobs, half for jobs that have begun."""
        for hurry in (False, True):
            if hurry:
                self._hurry.set()
            ends = time.monotonic() + self._options.drain_timeout_s / 2
            left = [c.drain(timeout_s=max(0.0, ends - time.monotonic())) for c in (self._loads, self._saves)]
            if all(left):
                break
        self._hurry.clear()
        return all(left)

    def _courier(self, name: str) -> Courier[int, list[OffloadKey]]:
        return Courier(name, threads=self._options.threads, limit=self._options.queue_limit)

    def _wants_events(self) -> bool:
        wanted = self._options.enable_kv_events
        if wanted and not self._offloading_spec.kv_events_config.enable_kv_cache_events:
            logger.warning(
                "tierd: enable_kv_events is without effect until vLLM's --kv-events-config enables KV cache events"
            )
            return False
        return wanted


def _by_group(keys: Sequence[OffloadKey]) -> dict[int, list[OffloadKey]]:
    groups: dict[int, list[OffloadKey]] = {}
    for key in keys:
        groups.setdefault(get_offload_group_idx(key), []).append(key)
    return groups


def _metric(name: str) -> str:
    return f"vllm:kv_offload_tierd_{name}"
