"""The synchronous client's reaction to errors, deadlines, restarts and a missing daemon."""

from __future__ import annotations

import itertools
import logging
import threading
import time

import pytest

from tests.unit.client.conftest import CLASS_BYTES, SPEC, TOKENS
from tierd.client import BlockStatus, Client, PutGroup
from tierd.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Overloaded,
    StaleHandle,
    TierFailed,
    Unavailable,
)

# -- errors, deadlines, restarts


@pytest.mark.parametrize("error", [NotFound, Overloaded, TierFailed, InvalidArgument, Unavailable])
def test_errors_come_back_as_they_were_raised(client, daemon, ns, error):
    """The client raises the daemon's error with its class and message."""
    daemon.faults["Lookup"] = error("thing: fault; remedy")
    with pytest.raises(error, match="^thing: fault; remedy$"):
        client.lookup(ns, ns.hash(TOKENS))
    assert daemon.calls["Lookup"] == 1


@pytest.mark.parametrize("method", ["Lookup", "Acquire", "Reserve", "Commit"])
def test_a_refused_call_is_made_again_when_it_was_told_to(client, daemon, ns, blocks, method):
    """A call that is refused with a hint is retried after that time, not before, and succeeds."""
    hint_s, made = 0.05, []

    def note():
        made.append(time.monotonic())
        if len(made) == 3:
            daemon.faults.clear()

    daemon.faults[method] = Overloaded("thing: full; later", retry_after_s=hint_s)
    daemon.before[method] = note
    assert client.put(ns, TOKENS, blocks).stored == 3
    assert client.lookup(ns, ns.hash(TOKENS)).tokens == 32
    assert client.get(ns, TOKENS).tokens == 40
    assert min(later - earlier for earlier, later in itertools.pairwise(made[:3])) >= hint_s


def test_a_hint_beyond_the_deadline_is_not_waited_for(client, daemon, ns):
    """A hint of a minute raises at once in a call with one second, with the hint in the error."""
    daemon.faults["Reserve"] = Overloaded("thing: full; later", retry_after_s=60.0)
    with pytest.raises(Overloaded, match="full") as told:
        client.reserve(PutGroup.private(ns, 1), timeout_s=1.0)
    assert (told.value.retry_after_s, daemon.calls["Reserve"]) == (60.0, 1)


def test_deadlines(client, daemon, ns):
    """A call that takes too long raises DeadlineExceeded, and the client stays usable."""
    release = threading.Event()
    daemon.before["Lookup"] = lambda: release.wait(10)
    with pytest.raises(DeadlineExceeded):
        client.lookup(ns, ns.hash(TOKENS), timeout_s=0.05)
    release.set()
    assert client.lookup(ns, ns.hash(TOKENS)).tokens == 0


def test_a_daemon_that_says_nothing(silent_target):
    """A daemon that accepts and never answers costs the deadline, no more."""
    with pytest.raises(DeadlineExceeded), Client(silent_target) as client:
        client.open_namespace(SPEC, timeout_s=0.05)


def test_no_daemon(tmp_path):
    """Without a daemon every verb is Unavailable, with the place and the remedy."""
    with pytest.raises(Unavailable, match="tierd serve"), Client(str(tmp_path)) as client:
        client.open_namespace(SPEC)


def test_a_restart_goes_unnoticed(place, client, stored, blocks):
    """After a restart the next call opens a session and the namespaces again, and succeeds."""
    place.restart()
    assert client.get(stored, TOKENS).tokens == 40
    assert place.daemon.calls["OpenNamespace"] == 1


def test_a_lost_session_is_opened_again(client, daemon, stored):
    """A session that the daemon has ended is replaced, and the call is retried."""
    for session in daemon.sessions.list():
        daemon._loop.call_soon_threadsafe(daemon.sessions.stop, session)
    daemon.until(lambda: daemon.calls["stop"] == 1)
    assert client.get(stored, TOKENS).tokens == 40


def test_a_channel_that_breaks_is_replaced(client, stored):
    """A call whose connection breaks is retried over a new connection."""
    client._connector.link.transport.close()
    assert client.get(stored, TOKENS).tokens == 40


def test_a_patient_client_tries_every_time(place):
    """Without best effort, a call succeeds as soon as a daemon runs, however recent the last failure."""
    place.daemon.stop()
    with Client(place.daemon.target) as client:
        with pytest.raises(Unavailable):
            client.open_namespace(SPEC)
        place.restart()
        assert client.open_namespace(SPEC).is_open


def test_old_handles_are_stale_after_a_restart(place, client, stored, blocks):
    """Leases and reservations of a dead daemon are stale; views of its memory stay readable."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    view = lease.view(0)
    reservation = client.reserve(PutGroup.private(stored, 1))
    place.restart()
    for use in (lease.views, lease.check, reservation.buffers, reservation.commit):
        with pytest.raises(StaleHandle, match="gone"):
            use()
    assert client.get(stored, TOKENS).tokens == 40
    assert bytes(view) == bytes(blocks[0])
    lease.detach()


def test_mappings_of_a_lost_daemon_go_with_their_views(place, client, stored):
    """An old daemon's segments are unmapped with the last view, and the client informs the next daemon."""
    view = client.get(stored, TOKENS).views[0]
    old = client._connector.link
    place.restart()
    client.lookup(stored, stored.hash(TOKENS))
    assert (mapped(place), list(client._connector.forgettable)) == (1, [])
    del view
    assert (mapped(place), list(client._connector.forgettable)) == (0, [old.session.id])
    client.lookup(stored, stored.hash(TOKENS))
    assert not client._connector.forgettable


def mapped(place):
    with open("/proc/self/maps") as maps:
        # This process maps the data only as a client; the fake daemon reads it through no mapping.
        return sum(str(place.memory.data) in line for line in maps)


def test_a_moved_epoch_is_not_taken_silently(place, client, stored):
    """If the epoch moved while the daemon was away, the old namespace is stale, not silently renewed."""
    place.restart()
    place.daemon.epoch = 2
    with pytest.raises(StaleHandle, match="epoch 1 has become 2"):
        client.get(stored, TOKENS)
    assert client.open_namespace(SPEC).epoch == 2


def test_descriptors_do_not_pile_up(client, daemon, stored):
    """Mapping keeps no descriptor, and gets and puts leak none."""
    import gc
    import os

    client.get(stored, TOKENS)
    gc.collect()  # clients of other tests that were never closed
    before = len(os.listdir("/proc/self/fd"))
    for i in range(5):
        client.put(stored, [i] * 16, [bytes(CLASS_BYTES)])
        client.get(stored, TOKENS)
    assert len(os.listdir("/proc/self/fd")) == before


# -- best effort


def test_best_effort_without_a_daemon(tmp_path, caplog):
    """Every verb is a miss or a dropped put, and one line is logged."""
    with Client(str(tmp_path), best_effort=True) as client, caplog.at_level(logging.WARNING):
        ns = client.open_namespace(SPEC)
        assert not ns.is_open
        assert not client.get(ns, TOKENS)
        assert client.lookup(ns, ns.hash(TOKENS)).tokens == 0
        assert not client.acquire(ns, ns.hash(TOKENS))
        assert client.prefetch(ns, ns.hash(TOKENS)) == 0
        result = client.put(ns, TOKENS, [bytes(CLASS_BYTES)] * 2)
        assert (result.stored, result.statuses.tolist()) == (0, [BlockStatus.FAILED] * 2)
        reservation = client.reserve(PutGroup.private(ns, 2))
        assert not reservation
        assert reservation.buffers() == [None, None]
        assert reservation.commit().statuses.tolist() == []
    assert len(caplog.records) == 1
    assert "no daemon at" in caplog.text


def test_best_effort_does_not_try_every_time(tmp_path, monkeypatch):
    """Between two attempts to connect, calls fail without a new attempt."""
    from tierd.client.connect import connection

    tries = []
    connect = connection.connect_session
    monkeypatch.setattr(connection, "connect_session", lambda *a, **k: tries.append(1) or connect(*a, **k))
    now = [1000.0]
    monkeypatch.setattr(connection.time, "monotonic", lambda: now[0])
    client = Client(str(tmp_path), best_effort=True)
    ns = client.open_namespace(SPEC)
    for _ in range(50):
        client.get(ns, TOKENS)
    assert len(tries) == 1
    now[0] += connection.FIRST_PAUSE_S
    client.get(ns, TOKENS)
    client.get(ns, TOKENS)
    assert len(tries) == 2


def test_best_effort_recovers(place, caplog):
    """When the daemon starts, the next attempt succeeds and opens the namespace itself."""
    place.daemon.stop()
    with Client(place.daemon.target, best_effort=True) as client:
        ns = client.open_namespace(SPEC)
        assert not client.get(ns, TOKENS)
        place.restart()
        client._connector._next_try = 0.0
        assert client.put(ns, TOKENS, [bytes(CLASS_BYTES)] * 2)
        assert client.get(ns, TOKENS).tokens == 32


def test_best_effort_with_a_stuck_daemon(silent_target):
    """A daemon that never answers is a miss too, long before the call's deadline."""
    with Client(silent_target, best_effort=True, timeout_s=60) as client:
        begun = time.monotonic()
        assert not client.get(client.open_namespace(SPEC), TOKENS)
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize("method", ["OpenNamespace", "Acquire", "Reserve", "Commit"])
def test_best_effort_with_a_failing_daemon(daemon, method):
    """Any failure of the daemon is a smaller hit."""
    daemon.faults[method] = TierFailed("host.0: no")
    with Client(daemon.target, best_effort=True) as client:
        ns = client.open_namespace(SPEC)
        client.put(ns, TOKENS, [bytes(CLASS_BYTES)] * 2)
        assert not client.get(ns, TOKENS)
