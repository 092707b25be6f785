"""What the synchronous client promises, against a daemon whose faults are made to order."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.unit.client.conftest import BEARER, CLASS_BYTES, SPEC
from tierd.client import BlockStatus, Client, EventKind, Group, NamespaceSpec, PutGroup
from tierd.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Overloaded,
    StaleHandle,
    TierFailed,
    Unavailable,
    Unsupported,
    ViewsAlive,
)

TOKENS = list(range(40))  # two full blocks and a short one


@pytest.fixture
def blocks():
    return [np.random.default_rng(i).integers(0, 256, CLASS_BYTES, dtype=np.uint8) for i in range(2)] + [b"tail" * 8]


@pytest.fixture
def ns(client):
    return client.open_namespace(SPEC)


@pytest.fixture
def stored(client, ns, blocks):
    assert client.put(ns, TOKENS, blocks).stored == 3
    return ns


def test_put_then_get(client, stored, blocks):
    """What was put comes back as read-only views of the daemon's memory."""
    got = client.get(stored, TOKENS)
    assert (got.tokens, got.blocks, got.tier_tokens) == (40, 3, (40,))
    for view, block in zip(got.views, blocks, strict=True):
        assert bytes(view) == bytes(block)
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_calls_do_not_grow_with_blocks(client, daemon, ns):
    """A get and a put of any number of blocks is a constant number of calls."""
    tokens = list(range(16 * 32))
    assert client.put(ns, tokens, [bytes(100)] * 32)
    client.get(ns, tokens)
    client.get(ns, tokens, out=bytearray(3200))
    assert {m: daemon.calls[m] for m in ("OpenNamespace", "Reserve", "Commit", "Acquire", "map")} == {
        "OpenNamespace": 1,
        "Reserve": 1,
        "Commit": 1,
        "Acquire": 2,
        "map": 1,
    }


def test_put_again(client, stored, blocks):
    """Blocks that are held already are not written again."""
    assert client.put(stored, TOKENS, blocks).statuses.tolist() == [BlockStatus.EXISTS] * 3


def test_put_without_the_short_block(client, ns, blocks):
    """The rest of a sequence that fills no block may be left out."""
    assert client.put(ns, TOKENS, blocks[:2]).stored == 2
    assert client.get(ns, TOKENS).tokens == 32


def test_put_beyond_the_room(client, ns):
    """What does not fit is reported per block, and the prefix is stored."""
    result = client.put(ns, list(range(16 * 70)), [bytes(8)] * 70)
    assert (result.stored, bool(result)) == (64, False)
    assert set(result.statuses[64:]) == {BlockStatus.NO_ROOM}


def test_lookup(client, stored):
    """A lookup says how much could be served, and from which tier."""
    found = client.lookup(stored, stored.hash(list(range(64))))
    assert (found.tokens, found.tier_of[0].tolist()) == (32, [[0, 0, -1, -1]])
    assert client.tiers == ("host.0",)


def test_a_miss(client, daemon, ns):
    """A miss is an empty lease and an empty result, and holds nothing."""
    assert not client.acquire(ns, ns.hash(TOKENS))
    assert not client.get(ns, TOKENS)
    assert daemon.leases == set()


def test_hashes_instead_of_tokens(client, ns, blocks):
    """Hashes and groups serve as well as tokens."""
    hashes = ns.hash(TOKENS, with_tail=True)
    assert client.put(ns, hashes[:2], blocks[:2])
    assert client.get(ns, hashes[:2]).tokens == 32
    assert client.get(ns, Group(ns, hashes, 40)).tokens == 32
    assert client.acquire(Group(ns, hashes, 40)).tokens == 32


@pytest.mark.parametrize("form", ["one", "list", "memoryviews", "longer"])
def test_copies(client, daemon, stored, blocks, form):
    """Blocks are copied into one buffer or into one each, and the lease is over."""
    total = 2 * CLASS_BYTES + 32
    outs = {
        "one": np.zeros(total, dtype=np.uint8),
        "list": [np.zeros(CLASS_BYTES // 4, dtype=np.float32), bytearray(CLASS_BYTES), bytearray(32)],
        "memoryviews": [memoryview(bytearray(len(block))) for block in blocks],
        "longer": [np.zeros((4, CLASS_BYTES), dtype=np.uint8) for _ in range(4)],
    }
    out = outs[form]
    got = client.get(stored, TOKENS, out=out)
    assert (got.tokens, got.blocks, got.views) == (40, 3, ())
    parts = [out] if form == "one" else [memoryview(o).cast("B")[: len(b)] for o, b in zip(out, blocks, strict=False)]
    assert b"".join(bytes(part) for part in parts) == b"".join(bytes(block) for block in blocks)
    daemon.until(lambda: not daemon.leases)


@pytest.mark.parametrize(
    ("out", "fault"),
    [
        (bytearray(10), "10 bytes"),
        ([bytearray(CLASS_BYTES)], "1 for 3 blocks"),
        ([bytearray(9)] * 3, "buffer 0: 9 bytes"),
        (bytes(3 * CLASS_BYTES), "read-only"),
        (np.zeros((2, 3 * CLASS_BYTES), dtype=np.uint8)[:, ::2], "contiguous"),
        ([object()] * 3, "object gives no contiguous bytes"),
    ],
)
def test_buffers_that_do_not_fit(client, daemon, stored, out, fault):
    """A buffer that does not fit is refused with its size, and nothing stays pinned."""
    with pytest.raises(InvalidArgument, match=fault):
        client.get(stored, TOKENS, out=out)
    daemon.until(lambda: not daemon.leases)


def test_a_page_taken_away_is_a_miss(client, daemon, stored, monkeypatch):
    """After copying out, a changed generation makes that block and all after it a miss."""
    slot = daemon.memory.slots[stored.hash(TOKENS)[1].tobytes()][0]
    copy = np.copyto
    monkeypatch.setattr(np, "copyto", lambda *a: (copy(*a), daemon.retract(slot)))
    got = client.get(stored, TOKENS, out=bytearray(3 * CLASS_BYTES))
    assert (got.tokens, got.blocks) == (16, 1)


def test_check_sees_a_page_taken_away(client, daemon, stored):
    """A lease says how many of its blocks still are what was leased."""
    with client.acquire(stored, stored.hash(TOKENS)) as lease:
        assert lease.check() == 2
        daemon.retract(int(lease.handles["slot"][0]))
        assert lease.check() == 0


# -- views


def test_views_own_their_pin(client, daemon, stored):
    """The lease of a get ends when the last array made from any of its views is collected, and not before."""
    got = client.get(stored, TOKENS)
    assert daemon.leases
    part = got.views[1][100:200].reshape(10, 10)[3:].view(np.uint16)
    other = memoryview(got.views[0])[5:]
    expected = part.tobytes()
    del got
    gc.collect()
    assert daemon.leases
    assert part.tobytes() == expected
    del part
    gc.collect()
    assert daemon.leases
    del other
    daemon.until(lambda: not daemon.leases)


def test_views_live_longer_than_the_client(daemon, blocks):
    """Views stay readable after their client and their lease are gone."""
    client = Client(daemon.target)
    ns = client.open_namespace(SPEC)
    client.put(ns, TOKENS, blocks)
    view = client.get(ns, TOKENS).views[0]
    client.close()
    del client, ns
    gc.collect()
    assert bytes(view) == bytes(blocks[0])


def test_closing_under_live_views(client, daemon, stored):
    """A lease does not close while arrays made from it are alive; detached, it ends with the last."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    view = lease.view(-1)
    with pytest.raises(ViewsAlive, match="detach"):
        lease.close()
    with pytest.raises(ViewsAlive), client.acquire(stored, stored.hash(TOKENS)) as other:
        kept = other.views()
    lease.detach()
    assert len(daemon.leases) == 2
    del view
    daemon.until(lambda: len(daemon.leases) == 1)
    del kept, other
    daemon.until(lambda: not daemon.leases)


def test_an_explicit_release_is_acknowledged(client, daemon, stored):
    """When release returns, the daemon has unpinned; views cannot be made any more; twice is no fault."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    lease.release()
    assert daemon.leases == set()
    lease.release()
    with pytest.raises(StaleHandle, match="ended"):
        lease.views()


def test_a_lease_without_views_ends_with_its_handle(client, daemon, stored):
    """A lease that is dropped without a word is released."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    view = lease.view(0)
    del view
    assert daemon.leases
    del lease
    daemon.until(lambda: not daemon.leases)


def test_views_made_apart_hold_the_lease_together(client, daemon, stored):
    """Of views that were made one by one, the last one ends the lease."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    first, second = lease.view(0), lease.view(1)
    lease.detach()
    del first
    client.lookup(stored, stored.hash(TOKENS))  # what the daemon was told before has arrived by then
    assert daemon.leases
    del second
    daemon.until(lambda: not daemon.leases)


def test_an_error_inside_with_is_not_masked(client, stored):
    """An error that leaves a with block with views alive is the error that is seen."""
    with pytest.raises(ZeroDivisionError), client.acquire(stored, stored.hash(TOKENS)) as lease:
        views = lease.views()
        assert views[5 // 0]


def test_view_indices(client, stored):
    """Blocks are counted from 0; what is outside is refused."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    assert bytes(lease.view(-1)) == bytes(lease.view(1))
    with pytest.raises(InvalidArgument, match="block 2"):
        lease.view(2)


# -- reservations


def test_private_pages(client, daemon, ns):
    """Private pages are written in place and get their names at commit; a lease may come with it."""
    reservation = client.reserve(PutGroup.private(ns, 2))
    for i, page in enumerate(reservation.buffers()):
        page[:] = i + 1
    committed = reservation.commit(ns.naming(ns.hash(TOKENS), index=[0, 1]), lease=True)
    assert committed.statuses.tolist() == [BlockStatus.READY] * 2
    assert [set(view.tolist()) for view in committed.lease.views()] == [{1}, {2}]
    assert client.get(ns, TOKENS).tokens == 32
    committed.lease.release()


def test_pages_are_sealed_by_commit(client, ns):
    """After commit the arrays that were given out are read-only, and no others are to be had."""
    reservation = client.reserve(PutGroup(ns, ns.hash(TOKENS)))
    pages = reservation.buffers()
    reservation.commit()
    assert not any(page.flags.writeable for page in pages)
    assert not reservation
    with pytest.raises(StaleHandle):
        reservation.buffer(0)


def test_committing_in_parts(client, daemon, ns):
    """With keep_open, what was not named stays reserved and writable."""
    reservation = client.reserve(PutGroup.private(ns, 2))
    pages = reservation.buffers()
    hashes = ns.hash(TOKENS)
    reservation.commit(ns.naming(hashes[:1], index=[0]), keep_open=True)
    assert [page.flags.writeable for page in pages] == [False, True]
    reservation.commit(ns.naming(hashes[1:], index=[1], parent=hashes[0].tobytes(), position=1))
    assert client.get(ns, TOKENS).tokens == 32


def test_left_without_commit(client, daemon, ns):
    """A reservation that is left without commit is aborted; one that is dropped too, after its last array."""
    with client.reserve(PutGroup.private(ns, 1)):
        pass
    assert (daemon.calls["Abort"], daemon.reservations) == (1, {})
    page = client.reserve(PutGroup.private(ns, 1)).buffer(0)
    gc.collect()
    assert daemon.reservations
    del page
    daemon.until(lambda: not daemon.reservations)


def test_a_put_that_fails_gives_its_pages_back(client, daemon, ns, monkeypatch):
    """When copying or committing fails, the reservation is given back."""
    daemon.faults["Commit"] = TierFailed("host.0: no")
    with pytest.raises(TierFailed) as caught:  # kept: its traceback must not keep the pages
        client.put(ns, TOKENS, [bytes(8)] * 2)
    daemon.until(lambda: not daemon.reservations)
    assert caught.value.args == ("host.0: no",)


def test_unreserved_blocks_have_no_buffer(client, stored):
    """What exists already, or found no room, has no page to write."""
    reservation = client.reserve(PutGroup(stored, stored.hash(list(range(48)))))
    assert [page is None for page in reservation.buffers()] == [True, True, False]
    with pytest.raises(InvalidArgument, match="statuses"):
        reservation.buffer(0)
    reservation.abort()


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda c, ns: c.put(ns, TOKENS, [b""] * 5), "5 for 40 tokens"),
        (lambda c, ns: c.put(ns, ns.hash(TOKENS), [bytes(8)] * 3), "3 were given|3 for 2|lengths"),
        (lambda c, ns: c.acquire(ns), "none for the namespace"),
        (lambda c, ns: c.acquire(ns, np.zeros((2, 31), dtype=np.uint8)), r"uint8 \[blocks, 32\]"),
        (lambda c, ns: c.acquire(ns, ns.hash(TOKENS), tier="nvme"), "'nvme' cannot be mapped"),
        (lambda c, ns: c.acquire(Group(ns, ns.hash(TOKENS)), ns.hash(TOKENS)), "beside groups"),
        (lambda c, ns: c.lookup([]), "groups: none"),
        (lambda c, ns: c.acquire(ns, ns.hash(TOKENS), tokens=50), "4 blocks of 16, 2 were given"),
        (lambda c, ns: c.open_namespace(NamespaceSpec("", 16, 4096)), "name the model"),
        (lambda c, ns: c.reserve(PutGroup(ns, ns.hash(TOKENS), lengths=[1])), "1 for 2 blocks"),
        (lambda c, ns: Client("nonsense"), "neither a directory nor host:port"),
    ],
)
def test_calls_that_are_wrong(client, ns, call, fault):
    """A wrong call is refused here, with thing, value and remedy."""
    with pytest.raises(InvalidArgument, match=fault):
        call(client, ns)


# -- errors, deadlines, restarts


@pytest.mark.parametrize("error", [NotFound, Overloaded, TierFailed, InvalidArgument, Unavailable])
def test_errors_come_back_as_they_were_raised(client, daemon, ns, error):
    """The daemon's error is raised here, by its class and with its words."""
    daemon.faults["Lookup"] = error("thing: fault; remedy")
    with pytest.raises(error, match="^thing: fault; remedy$"):
        client.lookup(ns, ns.hash(TOKENS))
    assert daemon.calls["Lookup"] == 1


def test_deadlines(client, daemon, ns):
    """A call that takes too long is DeadlineExceeded, and the client goes on."""
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
    """A session that the daemon has ended is replaced, and the call is made again."""
    for session in daemon.sessions.list():
        daemon._loop.call_soon_threadsafe(daemon.sessions.stop, session)
    daemon.until(lambda: daemon.calls["stop"] == 1)
    assert client.get(stored, TOKENS).tokens == 40


def test_a_channel_that_breaks_is_replaced(client, stored):
    """A call whose connection breaks under it is made again over a new one."""
    client._connector.link.transport.close()
    assert client.get(stored, TOKENS).tokens == 40


def test_a_patient_client_tries_every_time(place):
    """Without best effort, a call succeeds as soon as there is a daemon, however lately the last one failed."""
    place.daemon.stop()
    with Client(place.daemon.target) as client:
        with pytest.raises(Unavailable):
            client.open_namespace(SPEC)
        place.restart()
        assert client.open_namespace(SPEC).is_open


def test_old_handles_are_stale_after_a_restart(place, client, stored, blocks):
    """Leases and reservations of a daemon that has gone are stale; views of it stay readable."""
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
    """What an old daemon's segments took is unmapped with the last view, and the next daemon is told."""
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
    """If the epoch has moved while the daemon was away, the old namespace is stale instead of silently another."""
    place.restart()
    place.daemon.epoch = 2
    with pytest.raises(StaleHandle, match="epoch 1 has become 2"):
        client.get(stored, TOKENS)
    assert client.open_namespace(SPEC).epoch == 2


def test_descriptors_do_not_pile_up(client, daemon, stored):
    """Mapping keeps no descriptor, and gets and puts leave none."""
    import os

    client.get(stored, TOKENS)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(5):
        client.put(stored, [i] * 16, [bytes(8)])
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
        result = client.put(ns, TOKENS, [bytes(8)] * 2)
        assert (result.stored, result.statuses.tolist()) == (0, [BlockStatus.FAILED] * 2)
        reservation = client.reserve(PutGroup.private(ns, 2))
        assert not reservation
        assert reservation.buffers() == [None, None]
        assert reservation.commit().statuses.tolist() == []
    assert len(caplog.records) == 1
    assert "no daemon at" in caplog.text


def test_best_effort_does_not_try_every_time(tmp_path, monkeypatch):
    """Between two attempts to connect, calls give up without trying."""
    from tierd.client import connection

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
    """When the daemon comes, the next attempt serves, with the namespace opened by itself."""
    place.daemon.stop()
    with Client(place.daemon.target, best_effort=True) as client:
        ns = client.open_namespace(SPEC)
        assert not client.get(ns, TOKENS)
        place.restart()
        client._connector._next_try = 0.0
        assert client.put(ns, TOKENS, [bytes(8)] * 2)
        assert client.get(ns, TOKENS).tokens == 32


def test_best_effort_with_a_stuck_daemon(silent_target):
    """A daemon that answers nothing is a miss too, long before the call's deadline."""
    with Client(silent_target, best_effort=True, timeout_s=60) as client:
        begun = time.monotonic()
        assert not client.get(client.open_namespace(SPEC), TOKENS)
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize("method", ["OpenNamespace", "Acquire", "Reserve", "Commit"])
def test_best_effort_with_a_failing_daemon(daemon, method):
    """Whatever the daemon fails at is a smaller hit."""
    daemon.faults[method] = TierFailed("host.0: no")
    with Client(daemon.target, best_effort=True) as client:
        ns = client.open_namespace(SPEC)
        client.put(ns, TOKENS, [bytes(8)] * 2)
        assert not client.get(ns, TOKENS)


# -- remote


def remote(daemon, tmp_path, **options):
    path = tmp_path / "bearer"
    path.write_text(BEARER + "\n")
    return Client(f"127.0.0.1:{daemon.port}", credential_file=str(path), **options)


def test_remote_put(daemon, tmp_path):
    """Over TCP blocks travel as checksummed chunks, of blocks larger than a chunk too."""
    spec = NamespaceSpec(model="big", tokens_per_block=16, block_bytes=3 << 20)
    with remote(daemon, tmp_path) as client:
        result = client.put(client.open_namespace(spec), TOKENS, [bytes(3 << 20), b"x" * (1 << 20), b"y"])
    assert result.stored == 3


@pytest.mark.parametrize("form", ["views", "one", "list"])
def test_remote_get_ends_at_a_wrong_byte(daemon, tmp_path, form):
    """Blocks arrive whole and in order; the first one whose checksum does not hold ends the prefix."""
    out = {"views": None, "one": bytearray(8 * CLASS_BYTES), "list": [bytearray(CLASS_BYTES) for _ in range(8)]}[form]
    with remote(daemon, tmp_path) as client:
        ns = client.open_namespace(SPEC)
        got = client.get(ns, list(range(16 * 6)), out=out)
    assert (got.tokens, got.blocks) == (48, 3)
    parts = (
        got.views
        if form == "views"
        else out
        if form == "list"
        else [out[i * CLASS_BYTES :][:CLASS_BYTES] for i in range(3)]
    )
    assert [bytes(part) for part in parts[:3]] == [bytes([i + 1]) * CLASS_BYTES for i in range(3)]


def test_remote_has_no_handles(daemon, tmp_path):
    """Verbs that need shared memory are refused with the remedy."""
    with remote(daemon, tmp_path) as client, pytest.raises(Unsupported, match="put and get"):
        ns = client.open_namespace(SPEC)
        client.acquire(ns, ns.hash(TOKENS))


def test_no_remote_daemon(daemon, tmp_path):
    """A port where nobody listens is Unavailable at once."""
    daemon.stop()
    with pytest.raises(Unavailable, match="tcp_listen"), remote(daemon, tmp_path) as client:
        client.open_namespace(SPEC)


# -- the rest


def test_watch(client, daemon):
    """Events arrive as they happen, from after the one last seen."""
    events = client.watch(after=5)
    event = next(events)
    assert (event.sequence, event.kind, event.hashes.shape) == (6, EventKind.STORED, (2, 32))
    events.close()


def test_import_is_light():
    """Importing the SDK loads neither grpc nor asyncio, and needs no daemon."""
    program = "import sys, tierd.client; print({'grpc', 'asyncio', 'pydantic'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_many_threads(client, stored, blocks):
    """Threads share a client."""
    from concurrent.futures import ThreadPoolExecutor

    def work(i):
        tokens = [i] * 16
        client.put(stored, tokens, [bytes([i]) * 50])
        return bytes(client.get(stored, tokens).views[0])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(24))) == [bytes([i]) * 50 for i in range(24)]
