"""The loop under the simulation: time, chance, threads and the ends of processes."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterator

import pytest

from tests.sim.loop import Pace, SimLoop, Stuck


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    made = SimLoop(random.Random(1), in_order=0.0)
    yield made
    made.shut()


def test_sleep_takes_no_time(loop: SimLoop) -> None:
    """A day of sleeps passes at once and in order."""
    woken = []

    async def sleep(hours: int) -> None:
        await asyncio.sleep(3600 * hours)
        woken.append((hours, round(loop.time())))

    async def main() -> None:
        await asyncio.gather(*(sleep(hours) for hours in (24, 3, 12)))

    loop.run(main())
    assert woken == [(3, 10800), (12, 43200), (24, 86400)]


def test_orders_of_turns_differ_by_seed() -> None:
    """Callbacks that are ready together run in the seed's order, the same for the same seed."""

    def order(seed: int) -> tuple[int, ...]:
        ran: list[int] = []
        loop = SimLoop(random.Random(seed), in_order=0.0)

        async def turn(number: int) -> None:
            ran.append(number)

        async def main() -> None:
            await asyncio.gather(*map(turn, range(5)))

        loop.run(main())
        loop.shut()
        return tuple(ran)

    assert len({order(seed) for seed in range(20)}) > 10
    assert order(3) == order(3)


@pytest.mark.parametrize(("share", "moved"), [(0.0, [True, True]), (0.5, [False, True]), (1.0, [False, False])])
def test_bytes_move_when_the_pace_says(loop: SimLoop, share: float, moved: list[bool]) -> None:
    """Work in a thread runs at its start, in between or at its end; its result comes at its end."""
    loop.pace = lambda _work: Pace(1.0, share)
    done: list[int] = []

    async def main() -> list[bool]:
        task = loop.create_task(asyncio.to_thread(done.append, 1))
        await asyncio.sleep(0.25)
        seen = [bool(done)]
        await asyncio.sleep(0.5)
        seen.append(bool(done))
        assert not task.done()
        await task
        return seen

    assert loop.run(main()) == moved
    assert done == [1]


def test_error_of_a_thread_is_its_waiters(loop: SimLoop) -> None:
    """An error of work in a thread is raised at its await."""

    async def main() -> None:
        await asyncio.to_thread(int, "no number")

    with pytest.raises(ValueError, match="no number"):
        loop.run(main())


def test_nothing_of_an_ended_life_runs(loop: SimLoop) -> None:
    """Of an ended life no callback, timer or thread goes on, and its waiters never return."""
    reached: list[str] = []

    async def work() -> None:
        reached.append("began")
        try:
            await asyncio.to_thread(reached.append, "in a thread")
            await asyncio.sleep(1)
        finally:
            reached.append("unwound")

    async def main() -> None:
        life = loop.new_life()
        loop.pace = lambda _work: Pace(1.0, 1.0)
        task = loop.create_task(work(), context=loop.context_of(life))
        await asyncio.sleep(0.5)
        loop.end_life(life)
        loop.bury(life)
        reached.append("ended")
        await asyncio.sleep(10)
        assert not task.done()

    loop.run(main())
    assert reached == ["began", "unwound", "ended"]
    assert loop.unforeseen == []


async def turn_for_ever() -> None:
    while True:  # noqa: ASYNC110  # that is the fault
        await asyncio.sleep(0)


@pytest.mark.parametrize("wait", [asyncio.Event().wait, turn_for_ever], ids=["nothing", "livelock"])
def test_standstill_is_told(loop: SimLoop, wait: Callable[[], object]) -> None:
    """A wait for no event, and an endless run of turns, raise Stuck instead of hanging."""
    with pytest.raises(Stuck):
        loop.run(wait())  # type: ignore[arg-type]


def test_exceptions_that_nobody_takes_are_noted(loop: SimLoop) -> None:
    """A callback's error is recorded."""

    async def main() -> None:
        loop.call_soon(int, "no number")
        await asyncio.sleep(1)

    loop.run(main())
    assert len(loop.unforeseen) == 1


@pytest.mark.parametrize("dies", [True, False])
def test_what_nobody_could_take_is_not_noted(loop: SimLoop, dies: bool) -> None:
    """An error whose waiter's life ends is not recorded; in a life that goes on it is."""

    async def fail() -> None:
        raise ValueError

    async def work() -> None:
        failing = asyncio.ensure_future(fail())
        failing.add_done_callback(lambda _: loop.end_life(life) if dies else None)
        outer = asyncio.shield(failing)
        if dies:
            await asyncio.wait_for(outer, 1)
        else:
            await asyncio.wait([outer])

    async def main() -> None:
        loop.create_task(work(), context=loop.context_of(life))
        await asyncio.sleep(1)
        loop.end_life(life)
        loop.bury(life)

    life = loop.new_life()
    loop.run(main())
    gc.collect()
    assert len(loop.unforeseen) == (0 if dies else 1)
