"""The simulation notices a promise broken on purpose: some seed fails with the right text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.depth import report
from tests.sim.script import Script, write
from tests.sim.world import run
from tierd import mover
from tierd.cache.flights import Flights
from tierd.cache.persistence import Persistence
from tierd.cache.verification import Verification
from tierd.client.blocks import one_sided_get
from tierd.core.formats.directory import Directory
from tierd.core.formats.model import BlockStatus
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.core.index.pages import Pages
from tierd.core.upkeep import Upkeep
from tierd.mover import Mover
from tierd.tiers.arena.arena_recovery import FoundSegment
from tierd.tiers.arena.holds import HoldTable

SEEDS = 400
"""Number of seeds tried for each fault."""

Patch = pytest.MonkeyPatch


def trusts_what_it_finds(patch: Patch) -> None:
    find = FoundSegment.extents

    def extents(self: FoundSegment) -> np.ndarray:
        rows = find(self)
        rows["flags"] = 0
        return rows

    patch.setattr(FoundSegment, "extents", extents)


def verifies_no_hit(patch: Patch) -> None:
    patch.setattr(Verification, "_suspect", lambda self, extents: np.zeros(len(extents), np.bool_))


def verifies_no_copy(patch: Patch) -> None:
    patch.setattr(mover, "_judge", lambda hashed, metas: np.full(len(metas), BlockStatus.READY, np.uint16))


def gives_transfers_up(patch: Patch) -> None:
    copy = Mover.copy

    async def hasty(self: Mover, batch: np.ndarray, metas: np.ndarray) -> np.ndarray:
        work = asyncio.ensure_future(copy(self, batch, metas))
        done, _ = await asyncio.wait([work], timeout=0.002)
        return work.result() if done else np.full(len(batch), BlockStatus.FAILED, np.uint16)

    patch.setattr(Mover, "copy", hasty)


def keeps_generations(patch: Patch) -> None:
    take = Pages.take

    def stale(self: Pages, key: object, count: int, generation: int) -> np.ndarray:
        before = self.generation.copy()
        pages = take(self, key, count, generation)
        known = pages[pages < len(before)]
        again = known[before[known] > 0]
        self.generation[again] = before[again]
        return pages

    patch.setattr(Pages, "take", stale)


def acknowledges_unsynced(patch: Patch) -> None:
    async def at_once(self: Persistence, *_args: object) -> bool:
        return True

    patch.setattr(Persistence, "_sync", at_once)


def overlooks_failures(patch: Patch) -> None:
    finish = Flights._finish
    patch.setattr(
        Flights, "_finish", lambda self, batch, statuses: finish(self, batch, np.full_like(statuses, BlockStatus.READY))
    )


def waits_for_its_own_only(patch: Patch) -> None:
    landed = Flights.landed

    async def alone(self: Flights, plan: object, *, timeout_s: float) -> bool:
        return await landed(self, replace(plan, waits=np.zeros(0, np.uint64)), timeout_s=timeout_s)

    patch.setattr(Flights, "landed", alone)


def serves_old_epochs(patch: Patch) -> None:
    patch.setattr(NamespaceRegistry, "is_current", lambda self, namespace: True)
    patch.setattr(Upkeep, "forget_namespaces", lambda self, namespaces, draft: 0)  # the second guard


def writes_no_session_table(patch: Patch) -> None:
    append = HoldTable.append

    def unwritten(self: HoldTable, *args: Any, **options: Any) -> np.ndarray:
        rows = append(self, *args, **options)
        self._rows[rows, -1] = 0
        return rows

    patch.setattr(HoldTable, "append", unwritten)


def serves_copies_unchecked(patch: Patch) -> None:
    copy_to = one_sided_get.Pages.copy_to

    def unchecked(self: one_sided_get.Pages, *args: Any, **options: Any) -> list[bool]:
        return [True] * len(copy_to(self, *args, **options))

    patch.setattr(one_sided_get.Pages, "copy_to", unchecked)


def reads_ended_epochs_unasked(patch: Patch) -> None:
    patch.setattr(Directory, "runs", lambda self, namespace: True)


BREAKS: dict[Callable[[Patch], None], str] = {
    trusts_what_it_finds: "bytes changed by a writer",
    verifies_no_hit: "bytes changed by a writer",
    verifies_no_copy: "wrong bytes|bytes changed by a writer",
    gives_transfers_up: "while a transfer uses it",
    keeps_generations: "generation was used before|generation",
    acknowledges_unsynced: "durable blocks are lost",
    overlooks_failures: "wrong bytes|durable blocks are lost",
    waits_for_its_own_only: "missed by a failed transfer",
    serves_old_epochs: "after its epoch had ended",
    writes_no_session_table: "are not in the session table",
    serves_copies_unchecked: "wrong bytes in a copy",
    reads_ended_epochs_unasked: "copied by a get that began after its epoch had ended",
}
"""A fault in the code, and the text that the simulation must report."""
CHANGES, ENDS = {"client_scribbles", "host_rots"}, {"restart", "crash", "crash_at_point"}
"""Kinds of events: changes of bytes, and ends of the daemon."""

FITS: dict[Callable[[Patch], None], Callable[[Script], bool]] = {
    waits_for_its_own_only: lambda script: script.is_calm,  # in other scripts a miss may have any cause
    reads_ended_epochs_unasked: lambda script: any(event.what == "bump" for event in script.events),
    trusts_what_it_finds: lambda script: not script.kinds.isdisjoint(CHANGES) and not script.kinds.isdisjoint(ENDS),
    verifies_no_copy: lambda script: not script.kinds.isdisjoint(CHANGES),
}
"""Faults that few scripts can show, with a test for such scripts; ten times as many seeds."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda break_it: break_it.__name__)
def test_a_broken_promise_is_noticed(monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Patch], None]) -> None:
    """Each of these faults in the daemon's own code fails some of the seeds."""
    break_it(monkeypatch)
    fits = FITS.get(break_it, lambda _script: True)
    scripts = (write(seed) for seed in range(SEEDS if break_it not in FITS else 10 * SEEDS))
    for script in filter(fits, scripts):
        found = [text for text in run(script).violations if re.search(BREAKS[break_it], text)]
        if found:
            report("simulation notices", fault=break_it.__name__, seed=script.seed, says=found[0])
            return
    pytest.fail(f"{SEEDS} seeds, and nothing was noticed")
