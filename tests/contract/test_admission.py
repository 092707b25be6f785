"""The contract of `tierd.core.admission.Admission`, for each policy, with and without a budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.admission import Admission, Verdict
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import TierKind, TierSpec
from tierd.core.index.blocks import Blocks
from tierd.core.plan import Ids
from tierd.policies.admission import ADMISSION

SIZE = 8192
TOKENS = 16
Make = Callable[..., Admission]


@pytest.fixture(params=sorted(ADMISSION), scope="module")
def make(request: pytest.FixtureRequest) -> Make:
    """Makes the policy over a table of blocks. rate: budget in bytes/s; burst_s: seconds of
    saving."""

    def made(blocks: Blocks, *, rate: float = 0.0, burst_s: float = 100.0) -> Admission:
        spec = TierSpec(
            TierKind.NVME, 0, 1 << 30, 1 << 20, admission=request.param, wear_bytes_per_s=rate, wear_burst_s=burst_s
        )
        return ADMISSION[request.param](spec, blocks, None)

    return made


def known(blocks: Blocks, numbers: list[int], *, tokens: int = TOKENS, parents: list[int] | None = None) -> Ids:
    """Blocks named by numbers (0: ROOT as a parent) in namespace 1, and linked."""
    metas = new_meta(len(numbers))
    metas["namespace"], metas["tokens"], metas["stored_length"] = 1, tokens, SIZE
    for row, number in enumerate(numbers):
        metas["hash"][row, :8] = np.array([number], "<u8").view(np.uint8)
        if parents:
            metas["parent"][row, :8] = np.array([parents[row]], "<u8").view(np.uint8)
            metas["position"][row] = row
    ids = blocks.add(metas, 0.0)
    blocks.link(ids, metas["parent"], 0.0)
    return ids


def chain(blocks: Blocks, first: int, count: int) -> Ids:
    """A chain of full blocks, last first, as the core passes it."""
    numbers = list(range(first, first + count))
    return known(blocks, numbers, parents=[0, *numbers[:-1]])[::-1]


def sizes(ids: Ids) -> np.ndarray:
    return np.full(len(ids), SIZE, np.int64)


def used(policy: Admission, blocks: Blocks, ids: Ids, now: float) -> None:
    """A use, as the core reports it."""
    blocks.touch(ids, now)
    policy.touch(ids, now)


def written(policy: Admission, ids: Ids, now: float) -> int:
    """Asks, and writes the admitted blocks; returns their bytes."""
    verdicts = policy.admit(ids, sizes(ids), now)
    size = int(np.count_nonzero(verdicts == Verdict.WRITE)) * SIZE
    policy.wrote(size, now)
    return size


steps = st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 40), st.booleans()), min_size=1, max_size=25)


@given(steps=steps, rate=st.floats(10.0, 10.0 * SIZE), burst_s=st.floats(1.0, 200.0))
def test_never_more_than_the_burst_and_the_refill(make, steps, rate, burst_s):
    """Over any time the admitted bytes are at most the burst (at least a block) plus rate x
    time."""
    blocks, now, log = Blocks(), 0.0, [(0.0, 0)]
    policy = make(blocks, rate=rate, burst_s=burst_s)
    policy.touch(np.zeros(0, np.int64), 0.0)
    for number, (gone_s, count, again) in enumerate(steps):
        now += gone_s
        ids = chain(blocks, 1 + 100 * number, count)
        used(policy, blocks, ids, now)
        if again:
            used(policy, blocks, ids, now)
        log.append((now, written(policy, ids, now)))
    burst = max(rate * burst_s, SIZE)
    for start in range(1, len(log)):
        for stop in range(start, len(log)):
            size = sum(size for _, size in log[start : stop + 1])
            assert size <= burst + rate * (log[stop][0] - log[start][0]) + 1e-6
    assert sum(size for _, size in log) <= rate * now + 1e-6, "it begins with nothing saved"


@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=12), seed=st.integers(1, 2**32))
def test_equal_calls_give_equal_answers(make, counts, seed):
    """Two policies with the same calls agree, also if the core's keys have another seed."""
    answers = []
    for key_seed in (0, seed):
        blocks = Blocks(seed=key_seed)
        policy = make(blocks, rate=3.0 * SIZE)
        given = []
        for number, count in enumerate(counts):
            ids = chain(blocks, 1 + 100 * (number // 2), count)
            used(policy, blocks, ids, 2.0 * number)
            given += policy.admit(ids, sizes(ids), 2.0 * number).tolist()
            policy.wrote(SIZE, 2.0 * number)
        answers.append(given)
    assert answers[0] == answers[1]


def test_short_last_blocks_are_never_written(make):
    """A block with fewer tokens than its parent or than another of its namespace is PARTIAL."""
    blocks = Blocks()
    policy = make(blocks)
    head = known(blocks, [1])
    tail = known(blocks, [2], tokens=5, parents=[1])
    assert make(blocks).admit(tail, sizes(tail), 0.0).tolist() == [Verdict.PARTIAL], "by its parent alone"
    lone = known(blocks, [3], tokens=7)
    for now in range(9):
        used(policy, blocks, np.concatenate((tail, lone, head)), float(now))
    both = np.concatenate((tail, lone, head))
    assert policy.admit(both, sizes(both), 9.0).tolist() == [Verdict.PARTIAL, Verdict.PARTIAL, Verdict.WRITE]


def test_what_is_used_over_and_over_is_written(make):
    """Without a budget every policy writes full blocks that were used ten times."""
    blocks = Blocks()
    policy = make(blocks)
    ids = chain(blocks, 1, 20)
    for now in range(10):
        used(policy, blocks, ids, float(now))
    assert policy.admit(ids, sizes(ids), 10.0).tolist() == [Verdict.WRITE] * 20


def test_a_chain_keeps_its_head(make):
    """If the budget covers half of a chain, the policy writes the first half."""
    blocks = Blocks()
    policy = make(blocks, rate=float(SIZE))
    policy.touch(np.zeros(0, np.int64), 0.0)
    ids = chain(blocks, 1, 20)
    for _ in range(3):
        used(policy, blocks, ids, 10.0)
    verdicts = policy.admit(ids, sizes(ids), 10.0)
    chosen = blocks.position[ids[verdicts == Verdict.WRITE]]
    assert sorted(chosen.tolist()) == list(range(10))
    assert set(verdicts[verdicts != Verdict.WRITE].tolist()) <= {Verdict.BUDGET, Verdict.UNLIKELY}


def test_durable_writes_are_paid_off(make):
    """Unasked writes lower the level below zero; nothing is admitted until it is above zero."""
    blocks = Blocks()
    policy = make(blocks, rate=float(SIZE))
    policy.touch(np.zeros(0, np.int64), 0.0)
    policy.wrote(20 * SIZE, 10.0)
    assert policy.balance(10.0).level_bytes == -10 * SIZE
    ids = chain(blocks, 1, 1)
    for _ in range(3):
        used(policy, blocks, ids, 10.0)
    assert policy.admit(ids, sizes(ids), 10.0)[0] != Verdict.WRITE
    assert policy.admit(ids, sizes(ids), 20.5)[0] != Verdict.WRITE
    assert policy.admit(ids, sizes(ids), 21.5)[0] == Verdict.WRITE


def test_the_balance_is_taken_up(make):
    """A former life's level carries over, up to the burst; reading the balance changes nothing."""
    policy = make(Blocks(), rate=100.0, burst_s=10.0)
    policy.resume(500.0, 7.0)
    assert policy.balance(7.0).level_bytes == 500.0
    assert policy.balance(9.0) == policy.balance(9.0) == (100.0, 1000.0, 700.0)
    assert policy.balance(1e6).level_bytes == 1000.0
    policy.resume(5000.0, 9.0)
    assert policy.balance(9.0).level_bytes == 1000.0
    plain = make(Blocks())
    plain.resume(500.0, 7.0)
    assert plain.balance(8.0) == (0.0, 0.0, 0.0)


def test_an_id_may_become_another_block(make):
    """An id's former block, however often used, does not affect the next block with that id."""
    blocks = Blocks()
    policy, fresh = make(blocks), make(blocks)
    ids = chain(blocks, 1, 4)
    for now in range(10):
        used(policy, blocks, ids, float(now))
    policy.admit(ids, sizes(ids), 10.0)
    blocks.fade(ids)
    others = chain(blocks, 50, 4)
    assert set(others.tolist()) == set(ids.tolist())
    for one in (policy, fresh):
        one.touch(others, 11.0)
    assert policy.admit(others, sizes(others), 12.0).tolist() == fresh.admit(others, sizes(others), 12.0).tolist()


def test_nothing_is_no_fault(make):
    """Empty arrays are valid."""
    policy = make(Blocks(), rate=5.0)
    none = np.zeros(0, np.int64)
    policy.touch(none, 0.0)
    assert policy.admit(none, none, 1.0).tolist() == []
    policy.wrote(0, 1.0)
