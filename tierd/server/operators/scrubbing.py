"""Scrubs and the quarantine as messages of the Admin service. cache/scrub.py runs the passes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from tierd._proto import admin_pb2 as pb
from tierd.cache.cache import Cache
from tierd.cache.scrub import Pass, Scrub, TierPass
from tierd.core.formats.model import Fault, PageState

INTERVAL_S = 0.1
"""Time between two progress messages."""


class Scrubbing:
    """The operators' verbs on one scrub."""

    def __init__(self, cache: Cache, scrub: Scrub) -> None:
        self._cache, self._core, self._scrub = cache, cache.core, scrub

    async def run(self, request: pb.ScrubRequest, tier: int | None) -> AsyncGenerator[pb.ScrubPass, None]:
        """Runs a pass over one tier or all, and yields its progress. Raises Overloaded,
        Unavailable. audit: checks the core at its end."""
        tiers = range(len(self._cache.tiers)) if tier is None else [tier]
        reported_at, passed = -INTERVAL_S, None
        async with contextlib.aclosing(self._scrub.ask(tiers, bandwidth=request.bandwidth)) as passes:
            async for passed in passes:
                if not passed.finished and _now() - reported_at >= INTERVAL_S:
                    reported_at = _now()
                    yield self._pass(passed)
        assert passed is not None, "a pass is yielded at its end"
        last = self._pass(passed)
        if request.audit:
            last.audited, last.audit_fault = True, await self._audit()
        yield last

    def status(self, tier: int | None) -> pb.ScrubStatusReply:
        """The background's pass, the last whole one, and the quarantine of one tier or of all."""
        scrub = self._scrub
        return pb.ScrubStatusReply(
            period_s=scrub.period_s,
            bandwidth=scrub.bandwidth,
            current=self._pass(scrub.current) if scrub.current else None,
            last=self._pass(scrub.last) if scrub.last else None,
            quarantine=[
                page
                for position in range(len(self._cache.tiers))
                if tier in (None, position)
                for page in self._bad(position)
            ],
        )

    async def _audit(self) -> str:
        """The first inconsistency in the core, empty if none. Other calls run between its steps."""
        for step in self._core.audit():
            try:
                step()
            except AssertionError as error:
                return str(error)
            await asyncio.sleep(0)
        return ""

    def _bad(self, position: int) -> Iterator[pb.QuarantinedPage]:
        name, now = self._cache.tiers[position].spec.name, self._cache.clock.now()
        for row in self._core.quarantined(position):
            yield pb.QuarantinedPage(
                tier=name,
                segment=int(row["extent"]["segment"]),
                slot=int(row["extent"]["slot"]),
                offset=int(row["extent"]["offset"]),
                fault=Fault(int(row["fault"])).name.lower(),
                age_s=max(0.0, now - float(row["since"])),
            )

    def _pass(self, passed: Pass) -> pb.ScrubPass:
        return pb.ScrubPass(
            tiers=[self._tier_pass(done) for done in passed.tiers],
            finished=bool(passed.finished),
            elapsed_s=(passed.finished or _now()) - passed.begun,
            ended_ago_s=_now() - passed.finished if passed.finished else 0.0,
        )

    def _tier_pass(self, done: TierPass) -> pb.ScrubTier:
        counts = self._core.page_counts(done.tier)
        return pb.ScrubTier(
            tier=self._cache.tiers[done.tier].spec.name,
            pages=done.pages,
            bytes=done.bytes,
            pages_held=counts[PageState.READY] + counts[PageState.RETIRING],
            bad=done.bad,
            unread=done.unread,
            pages_quarantined=counts[PageState.QUARANTINED],
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
