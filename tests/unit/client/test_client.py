"""The synchronous client's promises for gets, puts, views and reservations, against a fake daemon."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

from tests.unit.client.conftest import CLASS_BYTES, SPEC, TOKENS
from tierd.client import BlockStatus, Client, EventKind, Group, NamespaceSpec, PutGroup
from tierd.client.blocks import copying
from tierd.errors import (
    InvalidArgument,
    StaleHandle,
    TierFailed,
    ViewsAlive,
)


def test_put_then_get(client, stored, blocks):
    """A get returns the bytes of a put as read-only views of the daemon's memory."""
    got = client.get(stored, TOKENS)
    assert (got.tokens, got.blocks, got.tier_tokens) == (40, 3, (40,))
    for view, block in zip(got.views, blocks, strict=True):
        assert bytes(view) == bytes(block)
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_calls_do_not_grow_with_blocks(client, daemon, ns):
    """A get or a put of any number of blocks makes a constant number of calls."""
    tokens = list(range(16 * 32))
    assert client.put(ns, PutGroup(ns, ns.hash(tokens), lengths=[100] * 32), [bytes(100)] * 32)
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
    """Blocks that exist already are not written again."""
    assert client.put(stored, TOKENS, blocks).statuses.tolist() == [BlockStatus.EXISTS] * 3


def test_put_without_the_short_block(client, ns, blocks):
    """A put may omit the rest of a sequence that fills no block."""
    assert client.put(ns, TOKENS, blocks[:2]).stored == 2
    assert client.get(ns, TOKENS).tokens == 32


def test_put_beyond_the_room(client, ns):
    """Blocks without room are reported one by one, and the prefix is stored."""
    result = client.put(ns, list(range(16 * 70)), [bytes(CLASS_BYTES)] * 70)
    assert (result.stored, bool(result)) == (64, False)
    assert set(result.statuses[64:]) == {BlockStatus.NO_ROOM}


def test_lookup(client, stored):
    """A lookup returns how much could be served, and from which tier."""
    found = client.lookup(stored, stored.hash(list(range(64))))
    assert (found.tokens, found.tier_of[0].tolist()) == (32, [[0, 0, -1, -1]])
    assert client.tiers == ("host.0",)


def test_a_miss(client, daemon, ns):
    """A miss is an empty lease and an empty result, and pins nothing."""
    assert not client.acquire(ns, ns.hash(TOKENS))
    assert not client.get(ns, TOKENS)
    assert daemon.leases == set()


def test_hashes_instead_of_tokens(client, ns, blocks):
    """Hashes and groups work as well as tokens."""
    hashes = ns.hash(TOKENS, with_tail=True)
    assert client.put(ns, hashes[:2], blocks[:2])
    assert client.get(ns, hashes[:2]).tokens == 32
    assert client.get(ns, Group(ns, hashes, 40)).tokens == 32
    assert client.acquire(Group(ns, hashes, 40)).tokens == 32


@pytest.mark.parametrize("form", ["one", "list", "memoryviews", "longer"])
def test_copies(client, daemon, stored, blocks, form):
    """Blocks are copied into one buffer or into one each, and the lease ends."""
    total = 2 * CLASS_BYTES + CLASS_BYTES // 2
    outs = {
        "one": np.zeros(total, dtype=np.uint8),
        "list": [np.zeros(CLASS_BYTES // 4, dtype=np.float32), bytearray(CLASS_BYTES), bytearray(CLASS_BYTES // 2)],
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
    """If a generation changes during the copy, that block and all after it are misses."""
    slot = daemon.memory.slots[stored.hash(TOKENS)[1].tobytes()][0]
    copy = copying.sum_and_copy
    monkeypatch.setattr(copying, "sum_and_copy", lambda *a: (copy(*a), daemon.retract(slot))[0])
    got = client.get(stored, TOKENS, out=bytearray(3 * CLASS_BYTES))
    assert (got.tokens, got.blocks) == (16, 1)


def test_check_sees_a_page_taken_away(client, daemon, stored):
    """A lease reports how many leading blocks are still valid."""
    with client.acquire(stored, stored.hash(TOKENS)) as lease:
        assert lease.check() == 2
        daemon.retract(int(lease.handles["slot"][0]))
        assert lease.check() == 0


# -- views


def test_views_own_their_pin(client, daemon, stored):
    """A get's lease ends exactly when the last array made from any of its views is collected."""
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
    """A lease refuses to close while arrays made from it are alive; detached, it ends with the last."""
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
    """When release returns, the daemon has unpinned; new views are refused; a second release is harmless."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    lease.release()
    assert daemon.leases == set()
    lease.release()
    with pytest.raises(StaleHandle, match="ended"):
        lease.views()


def test_a_view_never_outlives_a_release_in_another_thread(client, stored, monkeypatch):
    """A release between a view's check and its pin makes the view fail with StaleHandle."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    monkeypatch.setattr(lease.hold, "check", lease.release)
    with pytest.raises(StaleHandle, match="released during the call"):
        lease.view(0)


def test_a_lease_without_views_ends_with_its_handle(client, daemon, stored):
    """A lease that is dropped without release is released."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    view = lease.view(0)
    del view
    assert daemon.leases
    del lease
    daemon.until(lambda: not daemon.leases)


def test_views_made_apart_hold_the_lease_together(client, daemon, stored):
    """Of views that were made separately, the last one ends the lease."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    first, second = lease.view(0), lease.view(1)
    lease.detach()
    del first
    client.lookup(stored, stored.hash(TOKENS))  # earlier messages have reached the daemon by then
    assert daemon.leases
    del second
    daemon.until(lambda: not daemon.leases)


def test_an_error_inside_with_is_not_masked(client, stored):
    """An error inside a with block with live views is not replaced by ViewsAlive."""
    with pytest.raises(ZeroDivisionError), client.acquire(stored, stored.hash(TOKENS)) as lease:
        views = lease.views()
        assert views[5 // 0]


def test_view_indices(client, stored):
    """Blocks are counted from 0; an index outside is refused."""
    lease = client.acquire(stored, stored.hash(TOKENS))
    assert bytes(lease.view(-1)) == bytes(lease.view(1))
    with pytest.raises(InvalidArgument, match="block 2"):
        lease.view(2)


# -- reservations


def test_private_pages(client, daemon, ns):
    """Private pages are written in place and named at commit, which can also lease them."""
    reservation = client.reserve(PutGroup.private(ns, 2))
    for i, page in enumerate(reservation.buffers()):
        page[:] = i + 1
    committed = reservation.commit(ns.naming(ns.hash(TOKENS), index=[0, 1]), lease=True)
    assert committed.statuses.tolist() == [BlockStatus.READY] * 2
    assert [set(view.tolist()) for view in committed.lease.views()] == [{1}, {2}]
    assert client.get(ns, TOKENS).tokens == 32
    committed.lease.release()


def test_pages_are_sealed_by_commit(client, ns):
    """After commit the reservation's arrays are read-only, and it gives no others."""
    reservation = client.reserve(PutGroup(ns, ns.hash(TOKENS)))
    pages = reservation.buffers()
    reservation.commit()
    assert not any(page.flags.writeable for page in pages)
    assert not reservation
    with pytest.raises(StaleHandle):
        reservation.buffer(0)


def test_committing_in_parts(client, daemon, ns):
    """With keep_open, unnamed pages stay reserved and writable."""
    reservation = client.reserve(PutGroup.private(ns, 2))
    pages = reservation.buffers()
    hashes = ns.hash(TOKENS)
    reservation.commit(ns.naming(hashes[:1], index=[0]), keep_open=True)
    assert [page.flags.writeable for page in pages] == [False, True]
    reservation.commit(ns.naming(hashes[1:], index=[1], parent=hashes[0].tobytes(), position=1))
    assert client.get(ns, TOKENS).tokens == 32


def test_left_without_commit(client, daemon, ns):
    """A reservation is aborted at the end of its block, or when its last array is collected."""
    with client.reserve(PutGroup.private(ns, 1)):
        pass
    assert (daemon.calls["Abort"], daemon.reservations) == (1, {})
    page = client.reserve(PutGroup.private(ns, 1)).buffer(0)
    gc.collect()
    assert daemon.reservations
    del page
    daemon.until(lambda: not daemon.reservations)


def test_a_put_that_fails_gives_its_pages_back(client, daemon, ns, monkeypatch):
    """When copying or committing fails, the reservation is aborted."""
    daemon.faults["Commit"] = TierFailed("host.0: no")
    with pytest.raises(TierFailed) as caught:  # kept: its traceback must not keep the pages
        client.put(ns, TOKENS, [bytes(CLASS_BYTES)] * 2)
    daemon.until(lambda: not daemon.reservations)
    assert caught.value.args == ("host.0: no",)


def test_unreserved_blocks_have_no_buffer(client, stored):
    """A block that exists already, or has no room, has no page to write."""
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
    """The client refuses a wrong call with thing, value and remedy."""
    with pytest.raises(InvalidArgument, match=fault):
        call(client, ns)


# -- the rest


def test_watch(client, daemon):
    """Events arrive as they happen, after the given sequence number."""
    events = client.watch(after=5)
    event = next(events)
    assert (event.sequence, event.kind, event.hashes.shape) == (6, EventKind.STORED, (2, 32))
    events.close()


def test_import_is_light():
    """Importing the SDK loads neither grpc nor asyncio nor pydantic, and needs no daemon."""
    program = "import sys, tierd.client; print({'grpc', 'asyncio', 'pydantic'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_many_threads(client, stored, blocks):
    """Threads share a client."""
    from concurrent.futures import ThreadPoolExecutor

    def work(i):
        tokens = [i] * 16
        client.put(stored, tokens, [bytes([i]) * CLASS_BYTES])
        return bytes(client.get(stored, tokens).views[0])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(24))) == [bytes([i]) * CLASS_BYTES for i in range(24)]
