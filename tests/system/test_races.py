"""Races for pages and keys: reads against eviction, many writers of one key, and writers that die."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.depth import count, report
from tests.system.race_load import CHAIN_BLOCKS, KEYS, PATIENCE_S, die, is_stored, read, write
from tests.system.warm import Daemon
from tierd.core.formats.model import BlockStatus

GETS = count(test=5_000, nightly=1_000_000, weekly=10_000_000)
"""Block gets under eviction, of all readers together."""
ROUNDS = count(test=4, nightly=150, weekly=1_500)
READERS = 3
PROCESSES, THREADS = 4, 16
MORTALS = 2
HOST_BYTES = 2 << 20
CONFIG = f"""\
nvme = []

[server]
session_share = 0.9
call_timeout = "{PATIENCE_S} s"

[[host]]
capacity = "{HOST_BYTES >> 20} MiB"
segment = "256 KiB"
"""
CHAINS = round(1.1 * HOST_BYTES / 4096 / CHAIN_BLOCKS)
"""Together 110 % of the tier."""
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with host memory alone: evicted blocks are gone."""
    with Daemon(CONFIG) as running:
        yield running


def _run(processes: list[Any], told: Any, *, within_s: float) -> list[Any]:
    """Starts the processes and returns their answers; then kills any that still run."""
    try:
        for process in processes:
            process.start()
        return [told.get(timeout=within_s) for _ in processes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


@pytest.mark.timeout(3600)
def test_evict_against_read(daemon: Daemon) -> None:
    """While processes push 110 % of a tier through it, blocks got have right bytes, and views keep them."""
    begun, told = time.monotonic(), SPAWN.Queue()
    readers = [
        SPAWN.Process(
            target=read,
            args=(daemon.target, told),
            kwargs={"chains": CHAINS, "gets": GETS // READERS + 1, "seed": number},
            daemon=True,
        )
        for number in range(READERS)
    ]
    answers = _run(readers, told, within_s=3000)
    assert all(isinstance(answer, dict) for answer in answers), answers
    seen = sum((Counter(answer) for answer in answers), Counter())
    assert seen["wrong"] == 0
    assert min(seen["views"], seen["copies"], seen["again"]) > GETS // 100, seen
    assert min(seen["misses"], seen["stored"]) > READERS, seen  # some blocks were evicted and put again
    report("evict against read", mismatches=0, **seen, seconds=round(time.monotonic() - begun, 1))


# -- many writers


@pytest.mark.parametrize("mortals", [0, MORTALS], ids=["all live", "some die"])
@pytest.mark.timeout(3600)
def test_one_winner(daemon: Daemon, mortals: int) -> None:
    """Of 64 writers of the same keys one wins each key, and all read its bytes, even if writers die."""
    begun, told, barrier = time.monotonic(), SPAWN.Queue(), SPAWN.Barrier(PROCESSES * THREADS)
    dying = _dying(daemon.target, mortals)
    writers = [
        SPAWN.Process(
            target=write,
            args=(daemon.target, told),
            kwargs={"barrier": barrier, "rounds": ROUNDS, "first": 1 + THREADS * number, "threads": THREADS},
            daemon=True,
        )
        for number in range(PROCESSES)
    ]
    answers = _run(writers, told, within_s=3000)
    assert all(isinstance(answer, list) for answer in answers), answers
    rows = [row for answer in answers for row in answer]
    assert [row for row in rows if row[0] < 0] == []
    for process in dying:
        process.join(30)
        assert process.exitcode == -9
    won = _winners(rows, mortals=mortals)
    report(
        "writers of the same keys",
        rounds=ROUNDS,
        keys=len(won),
        writers=PROCESSES * THREADS,
        died=mortals,
        winners=len(set(won.values())),
        seconds=round(time.monotonic() - begun, 1),
    )


def _dying(target: str, count: int) -> list[Any]:
    """Writers that have reserved all keys and die later. Each has its own pipe, so no death holds a lock."""
    processes, pipes = [], []
    for number in range(count):
        ours, theirs = SPAWN.Pipe(duplex=False)
        plan = {"rounds": min(ROUNDS, 40), "writer": 200 + number}
        processes.append(SPAWN.Process(target=die, args=(target, theirs), kwargs=plan, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.poll(60)
        assert pipe.recv() == "ready"
    return processes


def _winners(rows: list[Any], *, mortals: int) -> dict[tuple[int, int], int]:
    """The writer that won each key. Raises AssertionError if two won, or if a reader got other bytes."""
    assert len(rows) == ROUNDS * PROCESSES * THREADS
    ready: dict[tuple[int, int], list[int]] = defaultdict(list)
    seen: dict[tuple[int, int], set[int]] = defaultdict(set)
    for turn, writer, statuses, views in rows:
        assert is_stored(statuses), (turn, writer, statuses)
        assert len(views) == KEYS, "a reader after its own put missed a key"
        for key in range(KEYS):
            seen[turn, key].add(views[key])
            if statuses[key] == BlockStatus.READY:
                ready[turn, key].append(writer)
    for place, readers in seen.items():
        assert len(readers) == 1, f"round and key {place}: readers saw the bytes of {readers}"
        winner = next(iter(readers))
        assert winner > 0, f"round and key {place}: mixed bytes"
        assert ready[place] == [winner] or (mortals and winner >= 200 and not ready[place]), (
            place,
            winner,
            ready[place],
        )
    return {place: next(iter(readers)) for place, readers in seen.items()}
