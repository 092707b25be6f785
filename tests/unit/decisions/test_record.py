"""The record of decisions: bounds, order, and what a row keeps."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.core.formats.model import FREED, Reason, StructArray
from tierd.core.plan import Acquisition, GroupQuery, LookupResult, Plan, Served
from tierd.decisions.causes import LOSSES, MEANINGS, Cause
from tierd.decisions.record import Decisions, Kind, Miss
from tierd.settings import ServerConfig

SIZE, BLOCKS = 16, 8
HASHES = np.arange(BLOCKS * 32, dtype=np.uint8).reshape(BLOCKS, 32)
FOUND = 3 * SIZE


def record(limit: int) -> Decisions:
    """A record whose clock counts its questions."""
    ticks = iter(range(1 << 20))
    return Decisions(limit, tiers=2, now=lambda: float(next(ticks)))


def query(request: bytes = b"") -> list[GroupQuery]:
    """A question about all blocks."""
    return [GroupQuery((7,), HASHES, SIZE, BLOCKS * SIZE, request=request, error_limit=float("inf"))]


def freed(count: int, reason: Reason = Reason.EVICTED) -> StructArray:
    """FREED of numbered blocks."""
    out = np.zeros(count, FREED)
    out["reason"], out["was_ready"] = reason, True
    out["hash"][:, 0] = np.arange(count)
    return out


def note(decisions: Decisions, request: bytes) -> None:
    """Records a lookup that finds three blocks."""
    decisions.looked_up(5, query(request), LookupResult(FOUND, [], [FOUND, 0]))


def test_the_default_record_has_the_promised_size() -> None:
    """100,000 requests and as many losses take at most 64 MiB, even with 16 tiers."""
    limit = ServerConfig().decisions
    decisions = Decisions(limit, tiers=16, now=lambda: 0.0)
    assert limit == 100_000
    assert len(decisions.requests.rows) == len(decisions.losses.rows) == limit
    assert decisions.nbytes <= 64 << 20


def test_a_row_keeps_what_was_asked() -> None:
    """A request's row has its tokens, its first missing block, and its id up to 64 bytes."""
    decisions = record(4)
    note(decisions, b"r" * 100)
    (row,) = decisions.requests.held
    assert (row["kind"], row["miss"], row["session"], row["namespace"]) == (Kind.LOOKUP, Miss.ABSENT, 5, 7)
    assert (row["asked"], row["served"], row["tiers"].tolist()) == (BLOCKS * SIZE, FOUND, [FOUND, 0])
    assert row["missing"].tobytes() == HASHES[3].tobytes()
    assert row["request"] == b"r" * 64 and row["error_limit"] == np.inf


@pytest.mark.parametrize(
    ("tokens", "whole", "shut", "served", "miss"),
    [
        (BLOCKS * SIZE, True, False, BLOCKS * SIZE, Miss.NONE),
        (FOUND, True, False, FOUND, Miss.ABSENT),
        (FOUND, False, False, FOUND, Miss.NO_ROOM),
        (FOUND, False, True, FOUND, Miss.BUSY),
        (FOUND, True, False, 0, Miss.FAILED),
    ],
)
def test_a_get_has_one_reason(tokens: int, whole: bool, shut: bool, served: int, miss: Miss) -> None:
    """The reason of a get's miss follows from what the core promised and what was served."""
    decisions = record(4)
    got = Acquisition(1, tokens, [tokens, 0], Plan(), whole, shut)
    decisions.got(5, query(), got, Served(served, [], Plan()), waited_s=2.0)
    (row,) = decisions.requests.held
    assert (row["miss"], row["served"], row["waited_s"]) == (miss, served, 0.0), "no transfer was waited for"


def test_a_full_ring_replaces_the_oldest() -> None:
    """The newest rows stay, in order, and the record says how far it goes back."""
    decisions = record(3)
    for number in range(5):
        note(decisions, b"%d" % number)
    ring = decisions.requests
    rows = ring.newest_first(np.arange(3))
    assert ring.rows["request"][rows].tolist() == [b"4", b"3", b"2"]
    assert not ring.is_whole and decisions.count == 3
    assert decisions.age_s == 6.0 - 3.0, "row 2 was written at 3, after the start at 0"


@pytest.mark.parametrize("parts", [[2], [3], [2, 3], [5], [1, 1, 1, 1], [3, 7]])
def test_losses_wrap_around(parts: list[int]) -> None:
    """Of losses in any portions the last ones stay, whole."""
    decisions, written = record(4), list[int]()
    for count in parts:
        losses = decisions.losses_of(freed(count))
        losses["hash"][:, 0] += len(written)
        decisions.lost(losses, session=9, wanted=HASHES[0].tobytes(), need=Reason.DEMAND)
        written += range(len(written), len(written) + count)
    ring = decisions.losses
    rows = ring.rows[ring.newest_first(np.arange(len(ring.held)))]
    assert rows["freed"]["hash"][:, 0].tolist() == written[-4:][::-1]
    assert set(rows["session"]) == {9} and set(rows["need"]) == {Reason.DEMAND}
    assert (rows["wanted"] == HASHES[0]).all()


def test_only_losses_are_recorded() -> None:
    """Pages freed because a farther tier has the block, or because a put failed, are no losses."""
    decisions = record(64)
    for reason in Reason:
        assert (len(decisions.losses_of(freed(2, reason))) > 0) == (reason in LOSSES)


def test_nothing_is_recorded_when_off() -> None:
    """With a limit of 0 no call fails, and none leaves a row."""
    decisions = record(0)
    note(decisions, b"r")
    decisions.computed(5, b"r", tokens=1, times=(1.0, 2.0))
    assert not len(decisions.losses_of(freed(2)))
    assert decisions.count == decisions.nbytes == 0


def test_every_cause_has_a_meaning() -> None:
    """The table of meanings has each cause once."""
    assert set(MEANINGS) == set(Cause)
