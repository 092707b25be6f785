"""The answers of /page.json, made on the event loop: one a second at most, for all readers.

An answer has the present state, the samples that the reader lacks, and the latest walk. Every
process of the machine may read it. So it has no tenant, session name, model, request id, token or
hash: who guesses a prompt of another tenant could compare its hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from tierd._proto import admin_pb2 as pb
from tierd.cache.cache import Cache
from tierd.core.plan import SessionStats
from tierd.errors import TierdError
from tierd.page.history import INTERVAL_S, History
from tierd.page.survey import Survey

log = structlog.get_logger(__name__)

FRESH_S = 1.0
VERBS_FRESH_S = 5.0
"""Replies of verbs of the Admin service serve for so long: they may take some milliseconds."""
SESSIONS_SHOWN = 20
DECISIONS_SHOWN = 12
HIDDEN_CAUSES = {"other_tenant": "never_stored"}
"""A cause that would tell one tenant what another has -> the cause that the tenant sees."""
VERB_S = 1.0
"""Time for the decisions and for the ceiling; a section without an answer is left out."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A session as the page shows it. state: open, ended or restored."""

    id: int
    engine: Mapping[str, str]
    state: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Sources:
    """The page's view of the daemon.

    verbs: of the Admin service, by name; Explain and Ceiling are used. started: monotonic seconds.
    """

    cache: Cache
    version: str
    instance: str
    started: float
    state: Callable[[], str]
    notices: Callable[[], list[str]]
    sessions: Callable[[], Sequence[Seen]]
    verbs: Mapping[str, Callable[[Any, Any], Awaitable[Any]]]


class View:
    """Samples and answers of one daemon. Use it on its event loop."""

    def __init__(self, sources: Sources) -> None:
        self._from = sources
        names = [tier.spec.name for tier in sources.cache.tiers]
        self.history = History(sources.cache.metrics, tiers=names, started=sources.started)
        self.survey = Survey(sources.cache)
        self._turn, self._state, self._made = asyncio.Lock(), b"", -FRESH_S
        self._told: dict[str, Any] = {}
        self._asked = -VERBS_FRESH_S
        self._run = secrets.token_hex(8)
        """Differs in each run of the daemon, unlike its instance."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts to sample."""
        self._tasks = [asyncio.create_task(self._sample_for_ever()), asyncio.create_task(self._walk_for_ever())]

    def stop(self) -> None:
        """Stops sampling."""
        for task in self._tasks:
            task.cancel()

    async def answer(self, *, run: str, since: int, walk: int) -> bytes:
        """The JSON for a reader that has the samples up to `since` and the walk `walk` of a run. A
        reader of another run has none."""
        self.survey.want()
        async with self._turn:
            if time.monotonic() - self._made >= FRESH_S:
                self._state, self._made = await self._describe(), time.monotonic()
        if run != self._run:
            since = walk = 0
        found = self.survey.found if self.survey.number != walk else b"null"
        parts = (b',"rows":', self.history.since(since), b',"last":%d,"walk":' % self.history.count, found, b"}")
        return b"".join((self._state[:-1], *parts))

    async def _sample_for_ever(self) -> None:
        while True:
            try:
                self.history.sample()
            except Exception:
                log.exception("page: a sample is missing")
            await asyncio.sleep(INTERVAL_S)

    async def _walk_for_ever(self) -> None:
        while True:
            try:
                await self.survey.run()
            except Exception:
                log.exception("page: a map is missing")

    async def _describe(self) -> bytes:
        """The part that all readers share, as a JSON object."""
        sources = self._from
        if time.monotonic() - self._asked >= VERBS_FRESH_S:
            last = pb.ExplainRequest(last=DECISIONS_SHOWN, misses=True)
            self._told = {
                "decisions": _decisions(await self._ask("Explain", last)),
                "ceiling": _ceiling(await self._ask("Ceiling", pb.CeilingRequest())),
            }
            self._asked = time.monotonic()
        described = {
            "version": sources.version,
            "instance": sources.instance,
            "run": self._run,
            "state": sources.state(),
            "uptime_s": round(time.monotonic() - sources.started, 1),
            "interval_s": INTERVAL_S,
            "columns": self.history.columns,
            "history_bytes": self.history.size_bytes,
            "tiers": [self._tier(position) for position in range(len(sources.cache.tiers))],
            "notices": sources.notices(),
            "sessions": self._sessions(),
            **self._told,
        }
        return json.dumps(described, separators=(",", ":")).encode()

    async def _ask(self, verb: str, request: Any) -> Any:
        """The reply of a verb of the Admin service. None: there is none, or not in time."""
        if verb not in self._from.verbs:
            return None
        with contextlib.suppress(TimeoutError, TierdError):
            async with asyncio.timeout(VERB_S):
                return await self._from.verbs[verb](request, None)
        return None

    def _tier(self, position: int) -> dict[str, Any]:
        cache, tier = self._from.cache, self._from.cache.tiers[position]
        health, codec = cache.health, cache.store_codecs.codecs.get(position)
        return {
            "name": tier.spec.name,
            "kind": tier.spec.kind.name.lower(),
            "capacity": tier.spec.capacity_bytes,
            "serving": cache.core.is_serving(position),
            "writable": cache.core.is_writable(position),
            "codec": codec.name if codec else "",
            "trouble": health.trouble(position) if position in health.breakers else "",
        }

    def _sessions(self) -> dict[str, Any]:
        """The sessions with most pinned, and how many there are."""
        held = {stats.session: stats for stats in self._from.cache.core.session_stats()}
        rows = [_session(seen, held.get(seen.id)) for seen in self._from.sessions()]
        rows.sort(key=lambda row: (-row["pinned"] - row["reserved"], -row["age_s"]))
        return {"all": len(rows), "shown": rows[:SESSIONS_SHOWN]}


def _session(seen: Seen, held: SessionStats | None) -> dict[str, Any]:
    names = ("engine", "version", "role")
    return {
        "engine": " ".join(seen.engine[name] for name in names if name in seen.engine),
        "state": seen.state,
        "age_s": round(seen.age_s),
        "leases": held.leases if held else 0,
        "reservations": held.reservations if held else 0,
        "pinned": sum(held.pinned_bytes) if held else 0,
        "reserved": sum(held.reserved_bytes) if held else 0,
    }


def _decisions(reply: pb.ExplainReply | None) -> list[dict[str, Any]] | None:
    """The latest requests with a miss; their causes by name, without the texts and facts."""
    if reply is None:
        return None
    return [
        {
            "ago_s": round(each.ago_s, 1),
            "kind": each.kind,
            "namespace": each.namespace,
            "asked": each.tokens_asked,
            "missed": each.tokens_missed,
            "tiers": dict(each.tier_tokens),
            "waited_s": round(each.waited_s, 4),
            "cause": HIDDEN_CAUSES.get(each.cause.cause, each.cause.cause),
            "tier": each.cause.tier,
        }
        for each in reply.requests
    ]


def _ceiling(reply: pb.CeilingReply | None) -> dict[str, Any] | None:
    """Hit ratios by memory, for each window; factor 0: without a limit, which JSON cannot say."""
    if reply is None:
        return None
    windows = [
        {
            "seconds": window.seconds,
            "covered_s": round(window.covered_s),
            "tokens": window.tokens,
            "hit": round(window.hit_ratio, 4),
            "points": [
                [point.factor if math.isfinite(point.factor) else 0, point.bytes, round(point.hit_ratio, 4)]
                for point in window.points
            ],
        }
        for window in reply.windows
    ]
    return {"windows": windows, "trouble": reply.trouble}
