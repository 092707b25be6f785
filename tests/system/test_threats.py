"""The threat table of `tierd/README.md`: `test_<row>__<column>` shows each cell, unguarded ones
too.

Rows: `always`, gets that copy, then the settings of `host.verify`, then containers that share a
uid. Columns: accident, buggy peer and hostile peer, each of the same and of another uid. A cell
with a dash adds nothing to the one above it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterator

import pytest

from tests.system import test_threats_to_copies
from tests.system.blocks import BlockClient, WrongBytes, connected
from tests.system.damaged import Place, flip, pages, slots
from tests.system.elsewhere import ROOT
from tests.system.peers import NAMES, cutter, is_mapped, opens, reader, scribbler, stranger
from tests.system.raw import BLOCK_BYTES, ask, connect, hello
from tests.system.test_restart import wipe_arena
from tests.system.threatened import FIRST_UID, SECOND_UID, TEAM, TRIES, as_root, made, put, running, scribble, user
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.cli.admin import connect as operator
from tierd.testing import Daemon, chain, content_of
from tierd.tiers.store.slots import HEADER_BYTES


def served(daemon: Daemon) -> int:
    """Blocks that a reader gets, every byte checked. Raises WrongBytes."""
    with connected(daemon) as reader:
        return reader.read(reader.open_namespace(), NAMES)


# -- in every setting


def test_always__accident() -> None:
    """Corruption in a slot, header, catalogue entry or page to be stored is a miss, not a wrong byte."""
    with running() as daemon:
        with connected(daemon) as client:
            put(client, durable=True)
        daemon.kill()
        for name, at in zip(NAMES, (0, 200, HEADER_BYTES + 9), strict=False):
            flip(slots(daemon)[name.tobytes()], at)
        catalogue = next(path for path in daemon.arena.rglob("*.cat") if NAMES[3].tobytes() in path.read_bytes())
        flip(Place(catalogue, catalogue.read_bytes().index(NAMES[3].tobytes())), 70)
        daemon.start()
        assert served(daemon) == len(NAMES)  # each block is in two places, and one of them is intact
        daemon.kill()
        wipe_arena(daemon)
        daemon.start()
        with connected(daemon) as client:
            namespace = client.open_namespace()
            assert [client.read(namespace, NAMES[i : i + 1]) for i in range(4)] == [0, 0, 0, 1]
    _page_that_rots_is_not_stored()


def _page_that_rots_is_not_stored() -> None:
    with running() as daemon:
        with connected(daemon) as client:
            put(client)
            flip(pages(daemon, NAMES)[NAMES[0].tobytes()], 77)
            client.call(client.admin.Flush, apb.FlushRequest())
        daemon.kill()
        wipe_arena(daemon)
        daemon.start()
        assert f"blocks={len(NAMES) - 1} " in daemon.log, "the store does not tell of it"
        with connected(daemon) as client:
            namespace = client.open_namespace()
            assert [client.read(namespace, NAMES[i : i + 1]) for i in range(len(NAMES))] == [0] + [1] * (len(NAMES) - 1)


def test_always__buggy_same() -> None:
    """A peer maps another's blocks read-only: it can write neither there nor through the descriptor."""
    with running() as daemon, connected(daemon) as writer, connected(daemon) as peer:
        leased = peer.acquire(put(writer), NAMES)
        handle = leased.handles[0]
        reply, fds = ask(peer.socket, {"op": "map", "tier": int(handle["tier"]), "segment": int(handle["segment"])})
        assert reply["writable"] is False
        for refused in (
            lambda: mmap.mmap(fds[0], reply["bytes"], prot=mmap.PROT_READ | mmap.PROT_WRITE),
            lambda: os.pwrite(fds[0], b"x", int(handle["offset"])),
            lambda: os.ftruncate(fds[0], 0),
        ):
            with pytest.raises(OSError, match=r"denied|descriptor|argument|permitted"):
                refused()
        for fd in fds:
            os.close(fd)
        with pytest.raises(TypeError):
            leased.pages[0][0] = 1
        assert served(daemon) == len(NAMES)


@as_root
def test_always__buggy_other() -> None:
    """A client of another uid gets no segment of ours, for any request, and hits none of our blocks."""
    with running() as daemon, connected(daemon) as owner:
        namespace = put(owner)
        with user(stranger, daemon, FIRST_UID, files=[], namespace=namespace) as other:
            found = other.hear()
        assert (found["mapped"], found["tokens"], found["errors"]) == (0, 0, ["NotPermitted"] * 3)
        assert served(daemon) == len(NAMES)


def test_always__hostile_same() -> None:
    """Not guarded: a process of our uid opens the arena and the store, and changes blocks that are served."""
    with running() as daemon, connected(daemon) as client:
        put(client, durable=True)
        assert served(daemon) == len(NAMES)
        flip(slots(daemon)[NAMES[0].tobytes()], 0)
        flip(pages(daemon, NAMES)[NAMES[0].tobytes()], 5)
        with pytest.raises(WrongBytes):
            served(daemon)


@as_root
def test_always__hostile_other() -> None:
    """Another uid opens no file of ours, nor /proc, and every number that it knows or guesses is refused."""
    with running() as daemon, connected(daemon) as owner:
        namespace = put(owner)
        lease = owner.acquire(namespace, NAMES).lease
        reservation, _ = owner.reserve(namespace, chain(32, 2))
        files = [str(path) for base in (daemon.arena, daemon.root / "state") for path in base.rglob("*")]
        files += [f"/proc/{daemon.pid}/mem", *(f"/proc/{daemon.pid}/fd/{fd}" for fd in range(64))]
        known = {"lease": lease, "reservation": reservation, "token": owner.hello["token"].partition(".")[0]}
        with user(stranger, daemon, FIRST_UID, files=files, namespace=namespace, **known) as other:
            found = other.hear()
        assert found["opened"] == [] and found["mapped"] == 0 and found["tokens"] == 0
        assert found["errors"] == ["NotPermitted"] * 3 and found["numbers"] == ["NotFound", "SessionLost"]
        assert (owner.status().leases, owner.status().reservations) == (1, 1)


# -- verify = "first_hit"


def test_first_hit__accident() -> None:
    """A bit that flips before the first hit is a miss; one that flips later is served until a scrub."""
    with running() as daemon:
        with connected(daemon) as client:
            put(client)
        flip(pages(daemon, NAMES)[NAMES[2].tobytes()], 9)
        assert served(daemon) == 2
        flip(pages(daemon, NAMES)[NAMES[1].tobytes()], 9)
        with pytest.raises(WrongBytes):
            served(daemon)
        with operator(daemon.target) as visitor:
            *_, passed = visitor.follow(apb.ScrubRequest())
        assert passed.finished and served(daemon) == 1


def test_first_hit__buggy_same() -> None:
    """A scribble after commit is a miss for the first other reader; after the first hit it is served."""
    with running() as daemon, connected(daemon) as writer:
        namespace = writer.open_namespace()
        reservation, handles = writer.reserve(namespace, NAMES)
        writer.write(handles, NAMES)
        writer.call(writer.cache.Commit, pb.CommitRequest(reservation=reservation))
        writer.page(handles[2], writable=True)[5] ^= 1
        assert served(daemon) == 2
        writer.page(handles[0], writable=True)[5] ^= 1
        with pytest.raises(WrongBytes):
            served(daemon)


@as_root
def test_first_hit__buggy_other() -> None:
    """The same for a writer of another uid in the same tenant."""
    with running(more=TEAM) as daemon, user(scribbler, daemon, FIRST_UID) as writer:
        assert writer.hear() == len(NAMES)
        with user(reader, daemon, SECOND_UID) as other:
            assert other.hear() == 2


def test_first_hit__hostile_same() -> None:
    """Not guarded: a process waits for the first hit and then changes the page through the file."""
    test_always__hostile_same()


# -- verify = "sampled"


def test_sampled__accident() -> None:
    """One of the later hits, one in 256, detects a bit that flips after the first hit."""
    with running("sampled") as daemon, connected(daemon) as client:
        namespace = put(client)
        assert client.read(namespace, NAMES) == len(NAMES)
        flip(pages(daemon, NAMES)[NAMES[0].tobytes()], 9)
        assert _found_after(client, namespace) < TRIES


def test_sampled__buggy_same() -> None:
    """Sampled verification detects a writer's scribble too."""
    with running("sampled") as daemon, connected(daemon) as writer, connected(daemon) as peer:
        namespace = put(writer)
        leased = writer.acquire(namespace, NAMES)
        assert served(daemon) == len(NAMES)
        scribble(writer, leased)
        assert _found_after(peer, namespace) < TRIES


def _found_after(client: BlockClient, namespace: int) -> int:
    """Hits on the first block until one is a miss; each earlier hit returns the changed byte."""
    for hits in range(TRIES):
        with contextlib.suppress(WrongBytes):
            if not client.read(namespace, NAMES[:1]):
                return hits
            raise AssertionError("the block is whole again")
    return TRIES


def test_sampled__hostile_same() -> None:
    """Not guarded: 255 of 256 hits serve the bytes that a hostile process changed."""
    with running("sampled") as daemon, connected(daemon) as client:
        namespace, wrong = put(client), 0
        assert client.read(namespace, NAMES) == len(NAMES)
        for place in pages(daemon, NAMES).values():
            flip(place, 100)
        for i in range(len(NAMES)):
            try:
                client.read(namespace, NAMES[i : i + 1])
            except WrongBytes:
                wrong += 1
        assert wrong  # the chance that all four are detected is one in four thousand million


# -- verify = "always"


def test_verify_always__accident() -> None:
    """A bit that flips after any number of hits is a miss at the next one."""
    with running("always") as daemon:
        with connected(daemon) as client:
            put(client)
        assert [served(daemon), served(daemon)] == [4, 4]
        flip(pages(daemon, NAMES)[NAMES[1].tobytes()], 9)
        assert served(daemon) == 1


def test_verify_always__buggy_same() -> None:
    """Hits that begin after a writer's scribble miss; a lease that began before sees the scribble."""
    with running("always") as daemon, connected(daemon) as writer, connected(daemon) as peer:
        namespace = put(writer)
        mine, before = writer.acquire(namespace, NAMES), peer.acquire(namespace, NAMES)
        scribble(writer, mine)
        assert served(daemon) == 0
        assert bytes(before.pages[0]) != content_of(NAMES[0], BLOCK_BYTES).tobytes()


def test_verify_always__hostile_same() -> None:
    """Not guarded: a hostile process changes a page during a read."""
    with running("always") as daemon, connected(daemon) as client:
        leased = client.acquire(put(client), NAMES)
        flip(pages(daemon, NAMES)[NAMES[0].tobytes()], 9)
        assert bytes(leased.pages[0]) != content_of(NAMES[0], BLOCK_BYTES).tobytes()


# -- sealed_puts = true


def test_sealed__accident() -> None:
    """A bit that flips in a block's page after commit is served until a scrub; one offline is a miss."""
    with running(sealed=True) as daemon:
        with connected(daemon) as client:
            put(client)
        flip(
            pages(daemon, NAMES)[NAMES[2].tobytes()], 9
        )  # staging pages match too, in an older segment: the newer one counts
        with pytest.raises(WrongBytes):
            served(daemon)
        with operator(daemon.target) as visitor:
            *_, passed = visitor.follow(apb.ScrubRequest())
        assert passed.finished and served(daemon) == 2
        daemon.kill()
        flip(pages(daemon, NAMES)[NAMES[1].tobytes()], 9)
        daemon.start()
        assert served(daemon) == 1


def test_sealed__buggy_same() -> None:
    """A writer's scribble after its commit changes nothing, before and after the first hit."""
    with running(sealed=True) as daemon, connected(daemon) as writer:
        reservation, handles = writer.reserve(writer.open_namespace(), NAMES)
        writer.write(handles, NAMES)
        writer.call(writer.cache.Commit, pb.CommitRequest(reservation=reservation))
        for _ in range(2):
            for handle in handles:
                writer.page(handle, writable=True)[5] ^= 1
            assert served(daemon) == len(NAMES)


@as_root
def test_sealed__buggy_other() -> None:
    """The same for a writer of another uid in the same tenant."""
    with running(more=TEAM, sealed=True) as daemon, user(scribbler, daemon, FIRST_UID) as writer:
        assert writer.hear() == len(NAMES)
        with user(reader, daemon, SECOND_UID) as other:
            assert other.hear() == len(NAMES)


def test_sealed__hostile_same() -> None:
    """Not guarded: bytes changed through the file are served."""
    test_sealed__accident()


@as_root
def test_sealed__hostile_other() -> None:
    """A hostile writer can change no leased block; if it truncates its file, only its commit fails."""
    with running(more=TEAM, sealed=True) as daemon, user(cutter, daemon, FIRST_UID) as hostile:
        assert hostile.hear() == [len(NAMES), False, [int(pb.BLOCK_STATUS_FAILED)] * 4]
        with user(reader, daemon, SECOND_UID) as other:
            assert other.hear() == len(NAMES)


# -- containers with one uid, credentials file


@contextlib.contextmanager
def containers() -> Iterator[tuple[Daemon, BlockClient, BlockClient]]:
    """A daemon with two credentials, and a client of each; the first has put NAMES."""
    daemon = made(more='[identity]\ncredential_file = "{root}/credentials"\n')
    secrets = daemon.root / "credentials"
    secrets.write_text("one one-secret-of-some-length\ntwo two-secret-of-some-length\n")
    secrets.chmod(0o600)
    with daemon, _contained(daemon, "one") as first, _contained(daemon, "two") as second:
        put(first)
        yield daemon, first, second


def _contained(daemon: Daemon, name: str) -> BlockClient:
    client = BlockClient(daemon.target)
    client.socket.close()
    client.socket = connect(daemon.target)
    client.hello = ask(client.socket, hello(credential=f"{name}-secret-of-some-length"))[0]
    client.metadata = (("tierd-session", client.hello["token"]),)
    return client


def test_containers__accident() -> None:
    """As by uid: a bit that flips before the first hit is a miss."""
    with containers() as (daemon, first, _):
        flip(pages(daemon, NAMES)[NAMES[2].tobytes()], 9)
        assert first.read(first.open_namespace(), NAMES) == 2


def test_containers__buggy_same() -> None:
    """Two credentials of one uid are two tenants: the second maps and hits nothing, and is no operator."""
    with containers() as (_, first, second):
        assert second.lookup(second.open_namespace(), NAMES) == 0
        assert not any(is_mapped(second, 0, segment) for segment in range(64))
        assert second.error_of(second.admin.Status, apb.StatusRequest()) == "NotPermitted"
        assert first.lookup(first.open_namespace(), NAMES) == len(NAMES)


@as_root
def test_containers__buggy_other() -> None:
    """Another uid without a credential is its own tenant, as without a credential file."""
    with containers() as (daemon, first, _), user(stranger, daemon, FIRST_UID, files=[], namespace=1) as other:
        found = other.hear()
        assert (found["mapped"], found["tokens"]) == (0, 0)
        assert first.lookup(first.open_namespace(), NAMES) == len(NAMES)


def test_containers__hostile_same() -> None:
    """Not guarded: if the container exposes the files, a process with the same uid opens them."""
    with containers() as (daemon, _, _second):
        assert all(opens(str(path)) for path in daemon.arena.rglob("*.data"))


# -- beside the table


def test_names_are_believed_within_a_domain() -> None:
    """A writer that commits other bytes under a hash is believed: a hash names tokens, not bytes."""
    with running() as daemon, connected(daemon) as writer:
        namespace = writer.open_namespace()
        reservation, handles = writer.reserve(namespace, NAMES)
        writer.write(handles, NAMES[::-1])
        writer.call(writer.cache.Commit, pb.CommitRequest(reservation=reservation))
        with pytest.raises(WrongBytes):
            served(daemon)


ROWS = {
    "always": "always",
    "first_hit": "first_hit",
    "sampled": "sampled",
    "sealed_puts": "sealed",
    '"always"': "verify_always",
    "containers": "containers",
    "copies": "copies",
}
COLUMNS = ["accident", "buggy_same", "buggy_other", "hostile_same", "hostile_other"]


def test_every_cell_has_its_test() -> None:
    """Each cell with content in tierd/README.md's table has a test of its name here."""
    text = (ROOT / "tierd" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \|$", text[text.index("| | accident") :].split("\n\n")[0], flags=re.MULTILINE)
    missing = []
    for cells in (row.split(" | ") for row in rows[1:]):
        if not set(cells[0]) <= {"-", "|", " "}:
            row = next(slug for word, slug in reversed(ROWS.items()) if word in cells[0])
            said = zip(COLUMNS, cells[1:], strict=True)
            missing += [f"test_{row}__{column}" for column, cell in said if cell.strip() != "\N{EN DASH}"]
    assert len(missing) > 15
    assert [name for name in missing if name not in globals() | vars(test_threats_to_copies)] == []
