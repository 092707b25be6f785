"""The breaker of a stored tier: its opening, its effect on reads and writes, and its recovery."""

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
    """The fault limit within the window opens the breaker for writes alone, with a reason."""
    breaker = Breaker(TOLERANCE)
    breaker.look(Health(write_errors=1), 0.0)
    assert not breaker.look(Health(write_errors=1, read_errors=1), 1.0)
    assert breaker.look(Health(write_errors=1, read_errors=1), 2.0, corrupt=1)
    assert (breaker.state, breaker.reads, breaker.writes) == (State.OPEN, True, False)
    assert "3 reads or writes" in breaker.reason


def test_faults_far_apart_are_forgotten() -> None:
    """Faults spread over more than the window do not open it."""
    breaker = Breaker(TOLERANCE)
    for count in range(1, 10):
        breaker.look(Health(write_errors=count), count * 301.0)
    assert breaker.state is State.CLOSED


def test_another_tolerance_holds_at_once() -> None:
    """A lower limit counts earlier faults; a higher one lets them pass, and an open breaker stays open."""
    breaker = Breaker(TOLERANCE)
    breaker.look(Health(write_errors=2), 0.0)
    breaker.tolerate(Tolerance(faults=2, window_s=600.0, hang_s=5.0))
    assert breaker.look(Health(write_errors=2), 1.0) and breaker.state is State.OPEN
    breaker.tolerate(Tolerance(faults=9, window_s=600.0, hang_s=50.0))
    assert not breaker.look(Health(write_errors=3, read_age_s=40.0), 2.0)
    assert breaker.state is State.OPEN and breaker.reads


def test_one_failed_sync_is_enough() -> None:
    """A failed sync opens the breaker for writes at once, and reads go on."""
    breaker = _opened()
    assert (breaker.writes, breaker.reads, breaker.reason) == (False, True, "no sync")


def test_hang() -> None:
    """A hung read stops reads and writes, a hung write only writes; both set the reason."""
    for health, reads in ((Health(read_age_s=5.1), False), (Health(write_age_s=5.1), True)):
        breaker = Breaker(TOLERANCE)
        assert not breaker.look(Health(read_age_s=4.9, write_age_s=4.9), 0.0)
        assert breaker.look(health, 1.0)
        assert (breaker.reads, breaker.writes) == (reads, False)
        assert "has taken more than" in breaker.reason


def test_reads_that_all_fail() -> None:
    """As many failed reads in a row as the limit stop reads, also if the breaker is open for writes."""
    breaker = Breaker(TOLERANCE)
    breaker.look(Health(read_errors=3, unread=3), 0.0)
    assert not breaker.reads
    breaker = _opened()
    assert breaker.look(Health(fault="no sync", read_errors=3, unread=3), 101.0)
    assert not breaker.reads


def test_comes_back() -> None:
    """After the pause one probe is due. If it succeeds, the breaker closes and past faults do not count."""
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
    """Failed probes and early reopenings double the pause up to its bound. A long calm resets it."""
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
    """By command an open breaker is due for a probe at once; a closed one stays as it is."""
    breaker = _opened(100.0)
    breaker.resume()
    assert breaker.is_due(100.0)
    closed = Breaker(TOLERANCE)
    closed.resume()
    assert not closed.is_due(1e9)


def test_limit_of_zero() -> None:
    """With fault_limit 0 errors never open the breaker; a failed sync still does."""
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
    """After any faults, writes imply reads, and an open breaker is due for a probe after the longest
    pause."""
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
