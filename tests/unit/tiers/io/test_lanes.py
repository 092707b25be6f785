"""Lanes: each job runs once or is given up, a bundle ends with its last job, hashes decide storage."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.tiers.store_world import (
    CLASS_BYTES,
    CORRUPT,
    FAILED,
    LENGTH,
    READY,
    World,
    content,
    extents_of,
    metas_of,
    pages,
    tables_of,
    told,
)
from tierd.core.plan import Plan
from tierd.tiers.io.calls import Calls, HangError, Kind
from tierd.tiers.io.files import OsFiles
from tierd.tiers.io.lanes import Lanes
from tierd.tiers.tier import SliceTable

SOON_S = 10.0


@dataclass
class Step:
    """Logs its name when it has run. gate: awaited first; error: raised; instead: the jobs returned."""

    log: list[str]
    name: str
    gate: threading.Event | None = None
    error: Exception | None = None
    instead: Sequence[Step] = ()
    entered: threading.Event = field(default_factory=threading.Event)
    kind: Kind = "read"

    def run(self) -> Sequence[Step]:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(SOON_S)
        self.log.append(self.name)
        if self.error is not None:
            raise self.error
        return self.instead

    def give_up(self) -> None:
        self.log.append(f"{self.name} given up")


class Brief(Step):
    """A job of a tenth of a second."""

    def run(self) -> Sequence[Step]:
        threading.Event().wait(0.1)
        return super().run()


@pytest.fixture
async def lanes() -> AsyncIterator[Lanes]:
    """Two lanes."""
    made = Lanes(2, name="lane", calls=Calls())
    yield made
    await asyncio.wait_for(made.idle(), SOON_S)
    made.close()


async def test_what_stands_in_for_a_job_belongs_to_its_bundle(lanes: Lanes) -> None:
    """A bundle ends when all jobs and all their replacements have run, each once."""
    log, gate = list[str](), threading.Event()
    parts = [Step(log, f"part {i}", gate=gate) for i in range(3)]
    carrying = asyncio.ensure_future(lanes.carry([Step(log, "whole", instead=parts)], hang_s=SOON_S))
    assert await asyncio.to_thread(parts[0].entered.wait, SOON_S)
    await asyncio.sleep(0)
    assert not carrying.done()
    gate.set()
    await asyncio.wait_for(carrying, SOON_S)
    assert sorted(log) == ["part 0", "part 1", "part 2", "whole"]


async def test_a_job_that_raises_is_told_when_the_last_has_ended(lanes: Lanes) -> None:
    """A job's error reaches the caller only when no lane has a job of the bundle. The lanes go on."""
    log, gate = list[str](), threading.Event()
    slow = Step(log, "slow", gate=gate)
    carrying = asyncio.ensure_future(
        lanes.carry([Step(log, "bad", error=ValueError("a fault of ours")), slow], hang_s=SOON_S)
    )
    assert await asyncio.to_thread(slow.entered.wait, SOON_S)
    await asyncio.sleep(0)
    assert not carrying.done()
    gate.set()
    with pytest.raises(ValueError, match="a fault of ours"):
        await asyncio.wait_for(carrying, SOON_S)
    await asyncio.wait_for(lanes.carry([Step(log, "next")], hang_s=SOON_S), SOON_S)
    assert log[-2:] == ["slow", "next"]


async def test_who_writes_to_a_store_interrupts_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writer threads run as SCHED_BATCH, which preempts no thread; readers and the caller as SCHED_OTHER."""
    policies = dict[str, set[int]](pwritev=set(), preadv=set())
    for name, seen in policies.items():
        monkeypatch.setattr(OsFiles, name, staticmethod(noting_policy(getattr(OsFiles(), name), seen)))
    assert await world.write([1, 2], segment=1, slots=[0, 1]) == [READY, READY]
    assert await world.read([1]) == [content(1)]
    assert policies == {"pwritev": {os.SCHED_BATCH}, "preadv": {os.SCHED_OTHER}}
    assert policy_of_thread() == os.SCHED_OTHER


def noting_policy(real: Callable[..., int], seen: set[int]) -> Callable[..., int]:
    """The same function, which also records the scheduling policy of its thread."""

    def noting(*given: Any) -> int:
        seen.add(policy_of_thread())
        return real(*given)

    return noting


def policy_of_thread() -> int:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


async def test_what_no_lane_begins_while_all_hang_is_given_up(lanes: Lanes) -> None:
    """If every lane hangs, a queued bundle is given up; a bundle in a hung lane ends with that lane."""
    log, gate = list[str](), threading.Event()
    hung = [Step(log, "hung", gate=gate) for _ in range(2)]
    first = asyncio.ensure_future(lanes.carry(hung, hang_s=0.05))
    for job in hung:
        assert await asyncio.to_thread(job.entered.wait, SOON_S)
    await asyncio.wait_for(lanes.carry([Step(log, "late")], hang_s=0.05), SOON_S)
    assert log == ["late given up"]
    assert not first.done()
    gate.set()
    await asyncio.wait_for(first, SOON_S)
    assert log == ["late given up", "hung", "hung"]


async def test_who_waited_in_vain_gives_up_what_waited_as_long(lanes: Lanes) -> None:
    """A job that waited in vain for the disk is given up with all jobs queued when it began. They
    do not wait in turn, and later jobs run."""
    log, ends, turn, held = list[str](), threading.Event(), threading.Event(), threading.Event()
    first, stuck = Step(log, "first", ends), Step(log, "stuck", turn, HangError())
    carried = [[Step(log, "held", held)], [first], [stuck, Step(log, "a")], [Step(log, "b")]]
    works = [asyncio.create_task(lanes.carry(jobs, hang_s=SOON_S)) for jobs in carried]
    assert await asyncio.to_thread(first.entered.wait, SOON_S)
    ends.set()
    assert await asyncio.to_thread(stuck.entered.wait, SOON_S)
    late = asyncio.create_task(lanes.carry([Step(log, "late")], hang_s=SOON_S))
    await asyncio.sleep(0)
    turn.set()
    await asyncio.wait_for(asyncio.gather(*works[1:], late), SOON_S)
    held.set()
    await asyncio.wait_for(works[0], SOON_S)
    assert log == ["first", "stuck", "stuck given up", "a given up", "b given up", "late", "held"]


async def test_a_lane_that_goes_on_leaves_nothing_to_be_given_up(lanes: Lanes) -> None:
    """While one lane hangs, the other runs all jobs, even one that waits longer than a call may take."""
    log, gate = list[str](), threading.Event()
    hung = Step(log, "hung", gate=gate)
    first = asyncio.ensure_future(lanes.carry([hung], hang_s=SOON_S))
    assert await asyncio.to_thread(hung.entered.wait, SOON_S)
    await asyncio.wait_for(lanes.carry([Brief(log, str(i)) for i in range(12)], hang_s=1.0), SOON_S)
    gate.set()
    await asyncio.wait_for(first, SOON_S)
    assert log == [*map(str, range(12)), "hung"]


async def test_no_job_is_left_behind_where_no_thread_is_to_be_had(lanes: Lanes) -> None:
    """Awake lanes run the jobs of a lane without a thread; without such lanes the jobs are given
    up. No job runs after its bundle has ended."""
    log, gate = list[str](), threading.Event()
    slow = Step(log, "slow", gate=gate)
    first = asyncio.ensure_future(lanes.carry([slow], hang_s=SOON_S))
    assert await asyncio.to_thread(slow.entered.wait, SOON_S)
    lanes.threads.shutdown(wait=False)  # as if the system gives no more threads
    second = asyncio.ensure_future(lanes.carry([Step(log, "second")], hang_s=SOON_S))
    await asyncio.sleep(0)
    assert not second.done()
    gate.set()
    await asyncio.wait_for(asyncio.gather(first, second), SOON_S)
    await asyncio.wait_for(lanes.idle(), SOON_S)
    await asyncio.wait_for(lanes.carry([Step(log, "third"), Step(log, "fourth")], hang_s=SOON_S), SOON_S)
    assert log == ["slow", "second", "third given up", "fourth given up"]


async def test_a_block_whose_bytes_are_wrong_stays_out_of_its_slot(world: World) -> None:
    """Of adjacent slots, a block with wrong sums is CORRUPT and not written; the others are stored."""
    keys, tables = [1, 2, 3], tables_of([1, 2, 3])
    extents, sources = extents_of(1, [0, 1, 2], generation=1), pages(3)
    for key, source in zip(keys, sources, strict=True):
        source[:LENGTH] = content(key)
    world.store.apply(Plan(reserved=extents))

    statuses = await world.store.write(extents, metas_of(keys), told([tables[0], None, tables[2]]), sources)
    assert statuses.tolist() == [READY, CORRUPT, READY]
    assert world.store.holds(extents).tolist() == [True, False, True]
    world.held = {key: (extents[i : i + 1], metas_of([key])) for i, key in enumerate(keys)}
    assert await world.read(keys) == [content(1), FAILED, content(3)]
    slot = world.store._opened.files[0].path.read_bytes()[CLASS_BYTES : 2 * CLASS_BYTES]
    assert not any(slot)


async def test_each_row_that_came_is_told_once(world: World) -> None:
    """A read reports each row once, when its bytes are in the page."""
    keys = [1, 2, 3, 4]
    await world.write(keys, segment=1, slots=[0, 1, 4, 6])
    extents, metas, targets = extents_of(1, [0, 1, 4, 6], generation=1), metas_of(keys), pages(4)
    seen = dict[int, bytes]()

    def arrived(rows: Sequence[int]) -> list[None]:
        assert not seen.keys() & set(rows)
        seen.update((row, bytes(targets[row][:LENGTH])) for row in rows)
        return [None] * len(rows)

    result = await world.store.read(extents, targets, metas, arrived=arrived)
    assert set(result.statuses.tolist()) == {READY}
    assert seen == {row: content(key) for row, key in enumerate(keys)}


async def test_one_lane_hashes_at_a_time(world: World) -> None:
    """Of many concurrent runs only one lane hashes, so lanes do not wait for each other's slices."""
    keys, slots = [1, 2, 3, 4], [0, 2, 4, 6]  # a run each
    extents, metas, tables, within = extents_of(1, slots, generation=1), metas_of(keys), tables_of(keys), list[int]()
    most, lock = 0, threading.Lock()

    def hash_rows(rows: Sequence[int]) -> list[SliceTable]:
        nonlocal most
        with lock:
            within.append(rows[0])
            most = max(most, len(within))
        threading.Event().wait(0.02)  # time for other lanes to start
        with lock:
            within.remove(rows[0])
        return [tables[row] for row in rows]

    world.store.apply(Plan(reserved=extents))
    sources = pages(4)
    for key, source in zip(keys, sources, strict=True):
        source[:LENGTH] = content(key)
    assert set((await world.store.write(extents, metas, hash_rows, sources)).tolist()) == {READY}
    assert most == 1
    assert set((await world.store.read(extents, pages(4), metas, arrived=hash_rows)).statuses.tolist()) == {READY}
    assert most == 1
