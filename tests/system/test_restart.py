"""Restarts keep all blocks after SIGTERM or SIGKILL, and durable blocks even without the memory."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.system.blocks import BlockClient, Leased, WrongBytes, check_bytes, connected
from tests.system.raw import ask, connect, hello, put_blocks
from tests.system.warm import Daemon
from tierd._proto import cache_pb2 as pb
from tierd.checksum import record_checksum
from tierd.client import Client, NamespaceSpec
from tierd.client.transport.replies import error_of
from tierd.errors import Unavailable
from tierd.testing import chain, content_of

DEADLINE_S = 2.0
CONFIG = f"""\
[server]
shutdown_deadline = "{DEADLINE_S:g} s"

[[host]]
capacity = "32 MiB"
segment = "2 MiB"

[[nvme]]
capacity = "64 MiB"
segment = "4 MiB"
"""
COUNT = 24


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon for one test."""
    with Daemon(CONFIG) as running:
        yield running


def wipe_arena(daemon: Daemon) -> None:
    """Deletes the host memory, like a reboot."""
    for path in daemon.arena.iterdir():
        shutil.rmtree(path)


def _tier_tokens(client: BlockClient, namespace: int, hashes: np.ndarray) -> list[int]:
    """The tokens of a get by tier. Checks the bytes."""
    group = pb.Group(namespace=namespace, hashes=hashes.tobytes())
    reply = client.call(client.cache.Acquire, pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST))
    client.call(client.cache.Release, pb.ReleaseRequest(leases=[reply.lease]))
    assert client.read(namespace, hashes) * 16 == reply.tokens
    return list(reply.tier_tokens)


def test_host_is_warm_after_a_kill(daemon: Daemon) -> None:
    """After kill -9, host memory still serves blocks that exist only there."""
    with connected(daemon) as client:
        assert client.put(client.open_namespace(), chain(1, COUNT)) == COUNT
    daemon.restart()
    with connected(daemon) as client:
        assert _tier_tokens(client, client.open_namespace(), chain(1, COUNT)) == [COUNT * 16, 0]


def test_durable_outlives_daemon_and_memory(daemon: Daemon) -> None:
    """After kill -9 and loss of the arena, NVMe serves a durable put; a put to memory is a miss."""
    with connected(daemon) as client:
        namespace = client.open_namespace()
        assert client.put(namespace, chain(1, COUNT), durable=True) == COUNT
        assert client.put(namespace, chain(2, COUNT)) == COUNT
    daemon.kill()
    wipe_arena(daemon)
    daemon.start()
    with connected(daemon) as client:
        namespace = client.open_namespace()
        assert _tier_tokens(client, namespace, chain(1, COUNT)) == [0, COUNT * 16]
        assert client.read(namespace, chain(2, COUNT)) == 0


def test_durable_put_of_what_exists(daemon: Daemon) -> None:
    """A durable put of blocks that are already in memory makes them durable."""
    spec, names = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096), chain(1, COUNT)
    blocks = [content_of(name, 4096) for name in names]
    with Client(daemon.target) as client:
        namespace = client.open_namespace(spec)
        assert client.put(namespace, names[: COUNT // 2], blocks[: COUNT // 2])
        assert client.put(namespace, names, blocks, durable=True)
    daemon.kill()
    wipe_arena(daemon)
    daemon.start()
    with connected(daemon) as client:
        assert client.read(client.open_namespace(), names) == COUNT


@pytest.mark.parametrize("memory", ["kept", "gone"])
def test_durable_put_of_what_was_written_over(daemon: Daemon, memory: str) -> None:
    """If a crash left a journal entry for a reused slot, a durable put stores the block again or
    fails.

    The test simulates this: it overwrites the slot while no daemon runs.
    """
    spec, names = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096), chain(1, COUNT)
    blocks = [content_of(name, 4096) for name in names]
    with Client(daemon.target) as client:
        assert client.put(client.open_namespace(spec), names, blocks, durable=True)
    daemon.kill()
    for path in (daemon.root / "state").rglob("seg-*.slots"):
        path.write_bytes(bytes(path.stat().st_size))
    if memory == "gone":
        wipe_arena(daemon)
    daemon.start()
    with Client(daemon.target) as client:
        namespace = client.open_namespace(spec)
        if not client.put(namespace, names, blocks, durable=True):
            assert memory == "gone"
            assert client.put(namespace, names, blocks, durable=True)
    daemon.kill()
    wipe_arena(daemon)
    daemon.start()
    with connected(daemon) as client:
        assert client.read(client.open_namespace(), names) == COUNT


def test_restart_after_term(daemon: Daemon) -> None:
    """SIGTERM under load ends with status 0, and the next life serves all stored blocks from host memory."""
    stored, wrong, over = list[int](), list[BaseException](), threading.Event()

    def load(first: int) -> None:
        try:
            with connected(daemon) as client:
                namespace = client.open_namespace()
                for seed in range(first, first + 100):
                    if client.put(namespace, chain(seed, 4), durable=seed % 2 == 0) == 4:
                        stored.append(seed)
                    client.read(namespace, chain(seed, 4))
                    over.set() if len(stored) > 40 else None
        except grpc.RpcError:
            pass  # the daemon has ended as requested
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=load, args=(i * 1000,)) for i in range(1, 4)]
    for thread in threads:
        thread.start()
    assert over.wait(30)
    begun = time.monotonic()
    assert daemon.stop() == 0
    print(f"ended {time.monotonic() - begun:.2f} s after SIGTERM; its deadline is {DEADLINE_S:g} s")
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    daemon.start()
    with connected(daemon) as client:
        namespace = client.open_namespace()
        assert [seed for seed in stored if client.read(namespace, chain(seed, 4)) != 4] == []
        assert client.counter('tierd_tokens_hit_total{tier="host.0"}') == len(stored) * 64


def test_term_refuses_new_work(daemon: Daemon) -> None:
    """After SIGTERM the daemon refuses new work while a call runs, and ends with status 0 at its deadline."""
    with connected(daemon) as client, connected(daemon) as other:
        namespace, hung = client.open_namespace(), threading.Event()
        group = pb.PutGroup(namespace=namespace, blocks=put_blocks(chain(1, 1)).tobytes())

        def chunks() -> Iterator[pb.PutChunk]:
            yield pb.PutChunk(group=group, checksum=record_checksum(b""))
            hung.wait()

        put = client.cache.Put.future(chunks(), metadata=client.metadata, timeout=60)
        while not client.status().reservations:
            pass
        begun = time.monotonic()
        ended = threading.Thread(target=lambda: codes.append(daemon.stop()))
        codes: list[int] = []
        ended.start()
        while "stopping" not in daemon.log:
            pass
        with connect(daemon.target) as late:
            refusal, _ = ask(late, hello())
        assert (refusal["ok"], refusal["error"]) == (False, "Unavailable")
        refused = other.error_of(other.cache.Lookup, pb.LookupRequest())
        status = refused.removeprefix("unnamed StatusCode.").partition(":")[0]  # gRPC's own if it closes
        assert isinstance(error_of("", refused, status=status), Unavailable)
        ended.join()
        hung.set()
        assert codes == [0]
        assert put.exception() is not None
        assert DEADLINE_S * 0.9 < time.monotonic() - begun < DEADLINE_S * 10


def test_term_does_not_wait_for_watchers(daemon: Daemon) -> None:
    """A client that watches events does not delay the shutdown."""
    with connected(daemon) as client:
        events = client.cache.Watch(pb.WatchRequest(), metadata=client.metadata)
        client.put(client.open_namespace(), chain(1, 1))
        next(events)
        begun = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - begun < DEADLINE_S
        assert list(events) == []


def test_views_outlive_their_daemon(daemon: Daemon) -> None:
    """Views keep their bytes through kill -9, restart and pressure; new gets serve right bytes too."""
    spec = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=128 << 10)
    names = chain(1, 8)
    with Client(daemon.target) as client:
        namespace = client.open_namespace(spec)
        assert client.put(namespace, names, [content_of(name, spec.block_bytes) for name in names])
        views = client.get(namespace, names).views
        assert len(views) == 8
        daemon.restart()
        for seed in range(2, 60):
            others = chain(seed, 8)
            client.put(namespace, others, [content_of(name, spec.block_bytes) for name in others])
        check_bytes(Leased(0, np.zeros(8), [memoryview(view) for view in views]), names)
        with pytest.raises(WrongBytes):
            check_bytes(Leased(0, np.zeros(8), [memoryview(view) for view in views]), chain(2, 8))
        held = client.get(namespace, names)
        assert held.blocks == 8, "what the first life's views pin must still be there"


def test_snapshot_after_term(daemon: Daemon) -> None:
    """After SIGTERM the store has a snapshot, and it serves every block without the arena."""
    with connected(daemon) as client:
        namespace = client.open_namespace()
        for seed in range(40):
            client.put(namespace, chain(seed, 8), durable=True)
    assert daemon.stop() == 0
    assert [path.name for path in Path(daemon.root / "state" / "nvme-0").glob("snapshot-*.bin")]
    wipe_arena(daemon)
    daemon.start()
    with connected(daemon) as client:
        namespace = client.open_namespace()
        assert [client.read(namespace, chain(seed, 8)) for seed in range(40)] == [8] * 40


@pytest.mark.parametrize("point", ["assembly.before_parts", "lifecycle.before_ready"])
def test_a_start_that_fails_gives_back_the_memory_that_it_made(point: str) -> None:
    """A start that fails frees the memory that it made, and keeps the memory of a former life."""
    daemon, spec = Daemon(CONFIG), NamespaceSpec("kept", 16, 4096)

    def held() -> int:
        return sum(path.stat().st_blocks * 512 for path in daemon.arena.rglob("*.data"))

    def held_after_a_failure() -> int:
        """Bytes of the arena after a start that fails 0.5 s later; in this time memory is made."""
        daemon.start(wait=False, failpoints=f"nvme.open.before_index=delay:0.5;{point}=error:EIO")
        assert daemon.await_end() == 1
        return held()

    assert held_after_a_failure() == 0
    with daemon:
        with Client(daemon.target) as client:
            assert client.put(client.open_namespace(spec), list(range(16)), [bytes(4096)])
        daemon.stop()
        found = held()
        assert held_after_a_failure() == found > 0
        daemon.start()
        with Client(daemon.target) as client:
            assert client.get(client.open_namespace(spec), list(range(16))).tokens == 16
