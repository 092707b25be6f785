"""A daemon without its process: the state that it saves for its next run, and the order of the writes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.unit.cache.world import SOON_S, World, directories, opened
from tierd._proto import cache_pb2 as pb
from tierd.cache.cache import Cache
from tierd.core.formats.model import BlockStatus
from tierd.errors import TierFailed
from tierd.mover import Hashed, Mover
from tierd.server.grpc.caller import CALLER, Caller
from tierd.server.grpc.service import CacheService
from tierd.testing import chain

REQUEST = pb.OpenNamespaceRequest(model="another", tokens_per_block=16, block_bytes=4096)


def service_of(world: World) -> CacheService:
    """The Cache service as a client of its one session calls it."""
    deadline = asyncio.get_running_loop().time() + SOON_S
    CALLER.set(Caller(world.session, "t", is_admin=False, request="r", deadline=deadline))
    return CacheService(world.cache, keep_namespaces=world.daemon.keep_namespaces, batch_limit=64)


async def test_a_namespace_is_kept_before_anybody_has_it() -> None:
    """Of two concurrent opens of a namespace, neither returns its id before the record is on disk."""
    with directories() as places:
        async with opened(places=places) as world:
            service = service_of(world)
            async with world.daemon.naming:
                calls = [asyncio.create_task(service.OpenNamespace(REQUEST, None)) for _ in range(2)]
                for _ in range(10):
                    await asyncio.sleep(0)
                assert not any(call.done() for call in calls)
            ids = {reply.namespace for reply in await asyncio.gather(*calls)}
            lines = (Path(places["root"]) / "state" / "namespaces.jsonl").read_text().splitlines()
            assert ids <= {json.loads(line)["id"] for line in lines}


async def test_a_namespace_that_cannot_be_kept_is_not_given() -> None:
    """While the state directory cannot be written, each open fails; afterwards an open works and is saved."""
    with directories() as places:
        async with opened(places=places) as world:
            service, path = service_of(world), Path(places["root"]) / "state" / "namespaces.jsonl"
            kept = path.read_text()
            path.unlink()
            (path / "in the way").mkdir(parents=True)
            for _ in range(2):
                with pytest.raises(TierFailed):
                    await service.OpenNamespace(REQUEST, None)
            (path / "in the way").rmdir()
            path.rmdir()
            path.write_text(kept)
            reply = await service.OpenNamespace(REQUEST, None)
            assert reply.namespace in [json.loads(line)["id"] for line in path.read_text().splitlines()]


async def test_two_namespaces_are_never_written_at_once() -> None:
    """An open waits while a cancelled open's namespace is still being written, and then saves its own."""
    with directories() as places:
        async with opened(places=places) as world:
            service, path = service_of(world), Path(places["root"]) / "state" / "namespaces.jsonl"
            os.mkfifo(path.with_name(path.name + ".tmp"))  # a writer hangs until the pipe has a reader
            first = asyncio.create_task(service.OpenNamespace(REQUEST, None))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            is_written_on = world.daemon.naming.locked()
            other = pb.OpenNamespaceRequest(model="a third", tokens_per_block=16, block_bytes=4096)
            second = asyncio.create_task(service.OpenNamespace(other, None))
            reader = os.open(path.with_name(path.name + ".tmp"), os.O_RDONLY | os.O_NONBLOCK)
            reply = await second
            os.close(reader)
            assert is_written_on
            assert reply.namespace in [json.loads(line)["id"] for line in path.read_text().splitlines()]


async def test_the_end_waits_for_what_is_written() -> None:
    """The daemon writes a cancelled open's namespace before it releases its directory."""
    with directories() as places:
        temporary = Path(places["root"]) / "state" / "namespaces.jsonl.tmp"
        async with opened(places=places) as world:
            os.mkfifo(temporary)
            call = asyncio.create_task(service_of(world).OpenNamespace(REQUEST, None))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            readers: list[int] = []
            flags = os.O_RDONLY | os.O_NONBLOCK
            asyncio.get_running_loop().call_later(0.5, lambda: readers.append(os.open(temporary, flags)))
        assert len(readers) == 1
        os.close(readers[0])
        assert not temporary.exists()


async def test_blocks_are_found_again() -> None:
    """Blocks committed in one run are served from memory in the next."""
    with directories() as places:
        async with opened(places=places) as world:
            await world.put(chain(1, 4))
        async with opened(places=places) as world:
            assert world.cache.core.stats().blocks == 4
            assert (await world.acquire(chain(1, 4))).served.tokens == 64


async def test_the_end_waits_for_what_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled commit that still hashes ends before the daemon closes; the next run has its blocks."""
    close, wait, had_ended, may_go_on = Mover.close, Cache.commits_ended, list[bool](), asyncio.Event()

    def closed(mover: Mover) -> None:
        had_ended.append(work.done())
        close(mover)

    async def waited(cache: Cache) -> None:
        asyncio.get_running_loop().call_later(0.05, may_go_on.set)
        await wait(cache)

    with directories() as places, monkeypatch.context() as patch:
        patch.setattr(Mover, "close", closed)
        patch.setattr(Cache, "commits_ended", waited)
        async with opened(places=places) as world:
            reserved = await world.reserve(chain(1, 4))
            mover = world.cache.parts.mover
            hash_pages = mover.hash_pages

            async def hash_late(*pages: np.ndarray) -> Hashed:
                await may_go_on.wait()
                return await hash_pages(*pages)

            patch.setattr(mover, "hash_pages", hash_late)
            call = asyncio.create_task(world.commit(reserved.reservation))
            await asyncio.sleep(0)
            (work,) = world.cache._commits
            call.cancel()
            await asyncio.wait([call])
        patch.undo()
        assert had_ended == [True]
        assert work.result().statuses.tolist() == [BlockStatus.READY] * 4
        async with opened(places=places) as world:
            assert world.cache.core.stats().blocks == 4


async def test_a_start_that_fails_lets_go_of_everything() -> None:
    """A start that fails releases all locks and files: the next start has every block."""
    with directories() as places:
        async with opened(places=places) as world:
            await world.put(chain(1, 4))
            table = world.daemon.tiers[0].tables / "sessions.tbl"  # type: ignore[attr-defined]
        whole = table.read_bytes()
        table.unlink()
        table.mkdir()
        with pytest.raises(TierFailed, match="session table"):
            async with opened(places=places):
                pass
        table.rmdir()
        table.write_bytes(whole)
        async with opened(places=places) as world:
            assert world.cache.core.stats().blocks == 4
