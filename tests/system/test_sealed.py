"""Sealed puts on a real daemon: a writer's writes to memory that it has mapped change no block."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.system.blocks import BlockClient, await_true, connected
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.raw import BLOCK_BYTES, ask
from tests.system.sdk import NOTHING, await_nothing_held, held
from tests.system.tcp import free_port, remote_config
from tests.system.test_restart import wipe_arena
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.client import AsyncClient, Client, NamespaceSpec, PutGroup
from tierd.core.formats.model import HANDLE, BlockStatus
from tierd.errors import TierdError
from tierd.testing import chain, content_of, is_content

HOST = """\
[[host]]
capacity = "16 MiB"
segment = "1 MiB"
eviction = "lru"
sealed_puts = true
"""
CONFIG = f"""\
[server]
shutdown_deadline = "2 s"
{HOST}
[[nvme]]
capacity = "32 MiB"
segment = "2 MiB"
"""
NAMES = chain(51, 4)
SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=BLOCK_BYTES)
LONG = NamespaceSpec(model="long", tokens_per_block=16, block_bytes=256 << 10)
ROUNDS = 40


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(CONFIG) as running:
        yield running


def used_bytes(daemon: Daemon) -> int:
    """Bytes used in the host tier."""
    with connected(daemon) as client:
        return int(client.tiers()["host.0"].used_bytes)


def writable_files(pid: int) -> set[int]:
    """Inodes of all files that a process has mapped for writing."""
    rows = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(row.split()[4]) for row in rows if re.match(r"\S+ \S*w\S* ", row)}


def blocks_of(names: np.ndarray, spec: NamespaceSpec = SPEC) -> list[np.ndarray]:
    return [content_of(name, spec.block_bytes) for name in names]


def is_right(client: Client, names: np.ndarray, spec: NamespaceSpec = SPEC) -> bool:
    """Whether all blocks are served. Checks every byte."""
    views = client.get(client.open_namespace(spec), names).views
    assert all(is_content(np.ascontiguousarray(view), name) for view, name in zip(views, names, strict=False))
    return len(views) == len(names)


def test_a_writer_changes_nothing_after_its_commit(daemon: Daemon) -> None:
    """A writer that writes to its pages after Commit, through its old mapping, changes no block."""
    with connected(daemon) as writer, connected(daemon) as reader:
        namespace = writer.open_namespace()
        reservation, handles = writer.reserve(namespace, NAMES)
        writer.write(handles, NAMES)
        writer.call(writer.cache.Commit, pb.CommitRequest(reservation=reservation))
        for _ in range(2):
            for handle in handles:
                writer.page(handle, writable=True)[:] = b"\xee" * BLOCK_BYTES
            assert reader.read(reader.open_namespace(), NAMES) == len(NAMES)
        assert reader.counter("corrupt") == 0


def test_a_writer_that_scribbles_during_its_commits_gets_blocks_that_fit_their_checksums(daemon: Daemon) -> None:
    """From its commit on, a block has one content that matches its checksum, even if its writer scribbles."""
    with Client(daemon.target) as writer, Client(daemon.target) as reader, connected(daemon) as operator:
        space, stop = writer.open_namespace(LONG), threading.Event()
        for number in range(ROUNDS):
            names = chain(number, 4)
            reserved = writer.reserve(PutGroup(space, names))
            slices = [view[:] for view in reserved.buffers()]  # which the SDK does not make read-only
            stop.clear()
            thread = threading.Thread(target=scribble, args=(slices, stop))
            thread.start()
            try:
                assert (reserved.commit().statuses == BlockStatus.READY).all()
                first = contents(reader, names)
            finally:
                stop.set()
                thread.join()
            assert contents(reader, names) == first
            assert len(first) == 4
        found = operator.call(operator.admin.Scrub, apb.ScrubRequest())
        assert operator.counter("corrupt") == 0, found


def contents(client: Client, names: np.ndarray) -> list[bytes]:
    return [view.tobytes() for view in client.get(client.open_namespace(LONG), names).views]


def scribble(pages: list[np.ndarray], stop: threading.Event) -> None:
    """Overwrites the pages repeatedly with changing bytes."""
    byte = 0
    while not stop.is_set():
        byte = (byte + 1) % 256
        for page in pages:
            page[:] = byte


def test_no_client_can_write_where_blocks_lie(daemon: Daemon) -> None:
    """A writer, even with a lease, has no writable mapping of a block's file and no descriptor for one."""
    with connected(daemon) as writer:
        namespace = writer.open_namespace()
        reservation, handles = writer.reserve(namespace, chain(52, 4))
        writer.write(handles, chain(52, 4))
        assert {writer.memory_of(handle, writable=True)[0] for handle in handles} <= writable_files(os.getpid())
        reply = writer.call(writer.cache.Commit, pb.CommitRequest(reservation=reservation, lease=True))
        for handle in np.frombuffer(reply.handles, dtype=HANDLE):
            inode, _ = writer.memory_of(handle, writable=False)
            assert inode not in writable_files(os.getpid())
            _refuses_writers(writer, handle)


def _refuses_writers(client: BlockClient, handle: np.void) -> None:
    reply, fds = ask(client.socket, {"op": "map", "tier": int(handle["tier"]), "segment": int(handle["segment"])})
    assert reply["writable"] is False
    with pytest.raises(OSError, match=r"denied|permitted"):
        mmap.mmap(fds[0], reply["bytes"], prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="descriptor"):
        os.pwrite(fds[0], b"x", int(handle["offset"]))
    for fd in fds:
        os.close(fd)


def test_a_writer_that_cuts_its_file_short_harms_nobody_else(daemon: Daemon) -> None:
    """If a writer truncates its staging file, its commit is FAILED and other puts are unharmed."""
    pid = daemon.pid
    with connected(daemon) as writer, Client(daemon.target) as other:
        space = other.open_namespace(SPEC)
        assert other.put(space, NAMES, blocks_of(NAMES)).stored == len(NAMES)
        reservation, handles = writer.reserve(writer.open_namespace(), chain(57, 4))
        writer.write(handles, chain(57, 4))
        place = {"op": "map", "tier": int(handles[0]["tier"]), "segment": int(handles[0]["segment"])}
        reply, fds = ask(writer.socket, place)
        assert reply["writable"]
        os.ftruncate(fds[0], 0)
        answer = writer.call(writer.cache.Commit, pb.CommitRequest(reservation=reservation))
        statuses = np.frombuffer(answer.handles, dtype=HANDLE)["status"]
        assert statuses.tolist() == [BlockStatus.FAILED] * 4
        assert daemon.pid == pid
        for number in range(60, 90):
            names = chain(number, 16)
            assert other.put(other.open_namespace(LONG), names, blocks_of(names, LONG)).stored == 16
        assert other.put(space, chain(58, 4), blocks_of(chain(58, 4))).stored == 4
        assert is_right(other, chain(58, 4))
        for fd in fds:
            os.close(fd)


def test_staging_pages_come_back(daemon: Daemon) -> None:
    """After a commit, an abort and a client's death, nothing is held and only stored blocks use memory."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        assert client.put(space, NAMES, blocks_of(NAMES)).stored == len(NAMES)
        stored = used_bytes(daemon)
        assert stored == len(NAMES) * BLOCK_BYTES
        client.reserve(PutGroup(space, chain(53, 4))).abort()
        assert (held(daemon), used_bytes(daemon)) == (NOTHING, stored)
    with Elsewhere(holding, daemon.target) as other:
        assert other.hear() == 4
        assert held(daemon) == (0, 1, 0, 8)
    await_nothing_held(daemon, "the client was killed")
    assert used_bytes(daemon) == stored


def holding(talk: Talk, target: str) -> None:
    """Reserves, writes, and waits to be killed."""
    with BlockClient(target) as client:
        _, handles = client.reserve(client.open_namespace(), chain(54, 4))
        client.write(handles, chain(54, 4))
        talk.say(len(handles))
        talk.hear()


def test_without_twice_the_room_a_put_is_told_so(daemon: Daemon) -> None:
    """A put may use a quarter of the tier: later blocks are NO_ROOM, and the next put stores them."""
    count = (16 << 20) // LONG.block_bytes // 4
    names = chain(55, count + 2)
    with Client(daemon.target) as client:
        space = client.open_namespace(LONG)
        stored = client.put(space, names, blocks_of(names, LONG))
        assert stored.statuses.tolist() == [BlockStatus.READY] * count + [BlockStatus.NO_ROOM] * 2
        assert client.put(space, names, blocks_of(names, LONG)).statuses.tolist()[-2:] == [BlockStatus.READY] * 2
        assert is_right(client, names, LONG)


def test_a_daemon_that_dies_between_reserve_and_commit_leaves_nothing(daemon: Daemon) -> None:
    """After a daemon's death before commit, the commit raises, no block of it hits and old blocks hit."""
    with Client(daemon.target) as client:
        space, new = client.open_namespace(SPEC), chain(56, 4)
        assert client.put(space, NAMES, blocks_of(NAMES)).stored == len(NAMES)
        reserved = client.reserve(PutGroup(space, new))
        views = reserved.buffers()
        daemon.kill()
        for view in views:
            view[:] = 0xEE
        daemon.start()
        with pytest.raises(TierdError):
            reserved.commit()
        space = client.open_namespace(SPEC)
        assert client.lookup(space, new).tokens == 0
        assert is_right(client, NAMES)
        assert client.put(space, new, blocks_of(new)).stored == len(new)
        for view in views:  # this process still has them mapped
            view[:] = 0xEE
        assert is_right(client, new)
        del view, views, reserved
        assert is_right(client, NAMES)  # the next call reports the dropped views
    await_nothing_held(daemon, "a daemon's death between reserve and commit")


def test_what_was_sealed_comes_back_after_a_crash(daemon: Daemon) -> None:
    """Sealed blocks survive SIGKILL in memory; durable ones also survive the loss of all memory."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        assert client.put(space, NAMES, blocks_of(NAMES), durable=True).stored == len(NAMES)
        daemon.kill()
        daemon.start()
        assert is_right(client, NAMES)
    daemon.kill()
    wipe_arena(daemon)
    daemon.start()
    with Client(daemon.target) as client:
        assert is_right(client, NAMES)


def test_puts_in_a_row_take_pages_that_were_reserved_ahead(daemon: Daemon) -> None:
    """Pages that the SDK reserves ahead are staging pages too: all puts are right in a full tier."""
    with Client(daemon.target) as client:
        space = client.open_namespace(LONG)
        for number in range(100, 140):
            names = chain(number, 4)
            assert client.put(space, names, blocks_of(names, LONG)).stored == 4
            assert is_right(client, names, LONG)
        await_true(lambda: held(daemon)[1] == 0 or held(daemon)[3] % 8 == 0, "spare puts have all their pages")
    await_nothing_held(daemon, "the client was closed")


def test_other_faces_put_as_well(tmp_path: Path) -> None:
    """AsyncClient and TCP clients put into a tier with sealed puts and read the right bytes back."""
    port = free_port()
    with Daemon(remote_config(tmp_path, port, host=HOST)) as daemon:

        async def both() -> None:
            async with AsyncClient(daemon.target) as client:
                space = await client.open_namespace(LONG)
                assert (await client.put(space, NAMES, blocks_of(NAMES, LONG))).stored == len(NAMES)

        asyncio.run(both())
        with Client(daemon.target) as client:
            assert is_right(client, NAMES, LONG)
        with Client(f"127.0.0.1:{port}", credential_file=str(tmp_path / "secret")) as remote:
            assert remote.put(remote.open_namespace(LONG), NAMES, blocks_of(NAMES, LONG)).stored == len(NAMES)
            assert is_right(remote, NAMES, LONG)
        await_nothing_held(daemon, "puts over TCP")
