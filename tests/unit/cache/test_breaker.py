"""The breaker of a stored tier: when it opens, what it takes out of service, when it comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierd.cache.breaker import Breaker, State, Tolerance
from tierd.tiers.tier import Health

TOLERANCE = Tolerance(faults=3, window_s=600.0, hang_s=5.0, pause_s=0.5, pause_limit_s=4.0)


def _opened(now: float = 100.0) -> Breaker:
    breaker = Breaker(TOLERANCE)
    breaker.look(Health(fault="no sync"), now)
    return breaker


def test_few_faults_are_tolerated() -> None:
    """Below the limit nothing happens; the limit within the window takes it out of service for writes alone, with a reason."""
    breaker = Breaker(TOLERANCE)
    breaker.look(Health(write_errors=1), 0.0)
    assert not breaker.look(Health(write_errors=1, read_errors=1), 1.0)
    assert breaker.look(Health(write_errors=1, read_errors=1), 2.0, corrupt=1)
    assert (breaker.state, breaker.reads, breaker.writes) == (State.OPEN, True, False)
    assert "3 reads or writes" in breaker.reason


def test_faults_far_apart_are_forgotten() -> None:
    """So many faults over more than the window do not open it."""
    breaker = Breaker(TOLERANCE)
    for count in range(1, 10):
        breaker.look(Health(write_errors=count), count * 301.0)
    assert breaker.state is State.CLOSED


def test_one_failed_sync_is_enough() -> None:
    """A fault that keeps everything from becoming durable opens it at once, and reads go on."""
    breaker = _opened()
    assert (breaker.writes, breaker.reads, breaker.reason) == (False, True, "no sync")


def test_hang() -> None:
    """A read that hangs takes reads out too, a write that hangs does not; both are said."""
    for health, reads in ((Health(read_age_s=5.1), False), (Health(write_age_s=5.1), True)):
        breaker = Breaker(TOLERANCE)
        assert not breaker.look(Health(read_age_s=4.9, write_age_s=4.9), 0.0)
        assert breaker.look(health, 1.0)
        assert (breaker.reads, breaker.writes) == (reads, False)
        assert "has taken more than" in breaker.reason


def test_reads_that_all_fail() -> None:
    """As many failed reads in a row as the limit, however far apart, take reads out of service; so does it while open for writes already."""
    breaker = Breaker(TOLERANCE)
    breaker.look(Health(read_errors=3, unread=3), 0.0)
    assert not breaker.reads
    breaker = _opened()
    assert breaker.look(Health(fault="no sync", read_errors=3, unread=3), 101.0)
    assert not breaker.reads


def test_comes_back() -> None:
    """After the pause it is probed, once; a probe that succeeds puts it back, and what went before is forgotten."""
    breaker = _opened(100.0)
    assert not breaker.is_due(100.4)
    assert breaker.is_due(100.5)
    breaker.probing()
    assert not breaker.is_due(200.0)
    breaker.probed("", 101.0)
    assert (breaker.state, breaker.reads, breaker.writes, breaker.reason) == (State.CLOSED, True, True, "")
    breaker.look(Health(write_errors=2), 102.0)
    assert breaker.state is State.CLOSED


def test_pause_doubles_to_its_bound() -> None:
    """Each probe that fails, and each new opening soon after, doubles the pause up to the bound; after a long calm it is short again."""
    breaker, now, pauses = _opened(0.0), 0.0, []
    for _ in range(6):
        begun = now
        while not breaker.is_due(now):
            now += 0.25
        pauses.append(now - begun)
        breaker.probing()
        breaker.probed("still bad", now)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    breaker.probing()
    breaker.probed("", now)
    breaker.look(Health(fault="again"), now + 1000.0)
    assert breaker.is_due(now + 1000.5)


def test_resume() -> None:
    """By command an open one is due at once; a closed one stays as it is."""
    breaker = _opened(100.0)
    breaker.resume()
    assert breaker.is_due(100.0)
    closed = Breaker(TOLERANCE)
    closed.resume()
    assert not closed.is_due(1e9)


def test_limit_of_zero() -> None:
    """With fault_limit 0 errors never open it; a failed sync still does."""
    breaker = Breaker(Tolerance(faults=0))
    breaker.look(Health(read_errors=1000, unread=1000), 0.0, corrupt=1000)
    assert breaker.state is State.CLOSED
    breaker.look(Health(fault="no sync"), 1.0)
    assert breaker.state is State.OPEN


STEPS = st.lists(
    st.tuples(st.sampled_from(["error", "unread", "fault", "hang", "good", "probe"]), st.floats(0.1, 20.0))
)


@given(STEPS)
def test_never_stays_open(steps: list[tuple[str, float]]) -> None:
    """Whatever happens, reads in service imply nothing about writes, writes imply reads, and an open one is probed after the longest pause."""
    breaker, now, errors = Breaker(TOLERANCE), 0.0, 0
    for what, wait_s in steps:
        now += wait_s
        errors += what in ("error", "unread")
        fault, age_s = "no sync" if what == "fault" else "", 9.0 if what == "hang" else 0.0
        breaker.look(Health(fault, errors, 0, 3 if what == "unread" else 0, age_s), now)
        assert breaker.reads or not breaker.writes
        assert (breaker.reason == "") == breaker.writes
        if breaker.state is State.OPEN:
            assert breaker.is_due(now + TOLERANCE.pause_limit_s)
            if breaker.is_due(now):
                breaker.probing()
                breaker.probed("" if what == "probe" else "bad", now)
