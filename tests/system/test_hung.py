"""Slow or hung disks and a stuck event loop: misses at the deadline, memory hits, and a timely end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.depth import count, percentile, report
from tests.still import stand_still
from tests.system.blocks import SOON_S, BlockClient, await_true, connected
from tests.system.raw import put_blocks
from tests.system.shim.iofault import EVERYTHING, READS, SYNCS, WRITES
from tests.system.silenced import SILENT, Silenced
from tests.system.trouble import STORE, Troubled, config, troubled
from tests.system.warm import Daemon
from tierd._proto import cache_pb2 as pb
from tierd.client import Client, NamespaceSpec
from tierd.core.formats.model import HANDLE
from tierd.testing import chain, content_of

FAR, NEAR = chain(1, 16), chain(2, 16)
SLACK_S = 1.0
"""Ten times the time that a call may take beyond its deadline."""


def _stored(world: Troubled) -> None:
    """Stores FAR on the store alone, and NEAR in memory."""
    client, namespace = world.client, world.namespace
    assert client.put(namespace, FAR, durable=True) == len(FAR)
    world.forget_memory()
    assert client.put(namespace, NEAR) == len(NEAR)


def _status_p99_ms(client: BlockClient) -> float:
    """The event loop's response time to a call that moves no block."""
    took = []
    for _ in range(100):
        begun = time.perf_counter()
        client.status()
        took.append(time.perf_counter() - begun)
    return round(percentile(took, 0.99) * 1e3, 1)


def _hits(client: BlockClient, number: int) -> list[float]:
    """Seconds of each of `number` gets from memory."""
    namespace, took = client.open_namespace(), []
    for _ in range(number):
        begun = time.perf_counter()
        assert client.read(namespace, NEAR) == len(NEAR)
        took.append(time.perf_counter() - begun)
    return took


@pytest.mark.timeout(120)
@pytest.mark.parametrize("direct", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_hung_reads(tmp_path: Path, direct: str) -> None:
    """With hung reads a get of a far block misses at its deadline, later at once; memory hits go on."""
    gets = count(test=50, nightly=500, weekly=2000)
    with troubled(tmp_path, config(direct=direct)) as world:
        _stored(world)
        calm = _hits(world.client, gets)
        with world.io.armed(READS + ",open", "hang", STORE):
            found, took_s = world.get_within(FAR, 0.5)
            assert found == 0
            assert took_s < 0.5 + SLACK_S
            hung, loop_ms = _hits(world.client, gets), _status_p99_ms(world.client)
            await_true(lambda: not world.client.tiers()["nvme.0"].serving, "the hung store out of service")
            assert "has taken more than" in world.client.tiers()["nvme.0"].trouble
            found, miss_s = world.get_within(FAR, 10.0)
            assert found == 0
            assert miss_s < SLACK_S, "a store that is out of service costs no waiting"
            assert world.put(durable=False) == 1
            hung += _hits(world.client, gets)
        begun = time.monotonic()
        await_true(lambda: world.client.tiers()["nvme.0"].serving, "the store back in service")
        back_s = time.monotonic() - begun
        assert world.client.read(world.namespace, FAR) == len(FAR)
        assert world.put() == 1
    report(
        "hung reads",
        direct=direct,
        miss_beyond_deadline_ms=round((took_s - 0.5) * 1e3, 1),
        miss_when_out_ms=round(miss_s * 1e3, 1),
        hit_p99_ratio=round(percentile(hung, 0.99) / percentile(calm, 0.99), 2),
        status_p99_ms=loop_ms,
        back_s=round(back_s, 2),
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("calls", [pytest.param(WRITES, marks=pytest.mark.slow), SYNCS], ids=["writes", "syncs"])
def test_hung_writes(tmp_path: Path, calls: str) -> None:
    """With hung writes or syncs a durable put fails at its deadline, later at once; reads and
    memory go on."""
    with troubled(tmp_path, config()) as world:
        _stored(world)
        with world.io.armed(calls, "hang", STORE):
            putting = threading.Thread(target=_put_quietly, args=(world.daemon,))
            putting.start()
            await_true(lambda: bool(world.client.tiers()["nvme.0"].trouble), "the hung store out of service for writes")
            begun = time.monotonic()
            assert world.put() == 0
            assert set(_reserve_durable(world.client, world.namespace)) == {pb.BLOCK_STATUS_FAILED}
            assert time.monotonic() - begun < SLACK_S
            assert world.client.tiers()["nvme.0"].serving
            assert world.client.read(world.namespace, FAR) == len(FAR)
            for _ in range(4):  # more than memory holds: demotion has no target
                assert world.put(400, durable=False) == 400
        putting.join()
        world.await_writes()
        world.forget_memory()
        assert world.lost() == []


def _reserve_durable(client: BlockClient, namespace: int) -> list[int]:
    """Statuses of a durable reserve of blocks that the store holds already."""
    group = pb.PutGroup(namespace=namespace, blocks=put_blocks(FAR).tobytes())
    wanted = pb.ReserveRequest(groups=[group], tier=pb.TIER_KIND_HOST, durability=pb.DURABILITY_DURABLE)
    return list(np.frombuffer(client.call(client.cache.Reserve, wanted).handles[0], dtype=HANDLE)["status"])


def _put_quietly(daemon: Daemon) -> None:
    with connected(daemon) as client:
        client.put(client.open_namespace(), chain(77, 4), durable=True)


@pytest.mark.timeout(60)
def test_slow_disk(tmp_path: Path) -> None:
    """A disk that takes 50 ms for each call serves everything and stays in service."""
    with troubled(tmp_path, config()) as world:
        _stored(world)
        with world.io.armed(f"{READS},{WRITES},{SYNCS}", "delay:0.05", STORE):
            assert world.client.read(world.namespace, FAR) == len(FAR)
            assert world.put(4) == 4
            assert not world.client.tiers()["nvme.0"].trouble
        assert world.lost() == []


ENDS = [READS, *(pytest.param(calls, marks=pytest.mark.slow) for calls in (WRITES, SYNCS, "close"))]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("calls", ENDS, ids=["reads", "writes", "syncs", "close"])
def test_end_with_a_hung_disk(tmp_path: Path, calls: str) -> None:
    """SIGTERM ends a daemon with a hung disk within its deadline, and durable blocks survive."""
    with troubled(tmp_path, config()) as world:
        _stored(world)
        putting = threading.Thread(target=_put_until_gone, args=(world.client, world.namespace))
        with world.io.armed(calls, "hang", STORE):
            world.get_within(FAR, 0.2)
            if calls in (WRITES, SYNCS):
                putting.start()
            if calls != "close":  # a file is closed at the end
                await_true(lambda: world.io.hanging() > 0, "a call that hangs")
            begun = time.monotonic()
            world.daemon.stop()
            ended_s = time.monotonic() - begun
        if putting.ident:
            putting.join()
        assert ended_s < 3.0 + SOON_S
        assert "ended at once" in world.daemon.log
        world.daemon.start()
        with connected(world.daemon) as client:
            assert client.read(client.open_namespace(), FAR) == len(FAR)
    report("end with a hung disk", calls=calls, seconds=round(ended_s, 2))


def _put_until_gone(client: BlockClient, namespace: int) -> None:
    try:
        client.put(namespace, chain(77, 4), durable=True)
    except grpc.RpcError as error:
        print("put ended with", error.code())


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_start_on_a_hung_disk(tmp_path: Path) -> None:
    """A start that waits for a hung disk logs that, and SIGTERM ends it. The next start serves."""
    with troubled(tmp_path, config()) as world:
        assert world.put() == 1
        world.daemon.stop()
        world.io.arm(EVERYTHING, "hang", STORE)
        world.daemon.start(wait=False)
        await_true(lambda: "still opening" in world.daemon.log, "a word about the wait")
        begun = time.monotonic()
        assert world.daemon.stop() == 0
        assert time.monotonic() - begun < SOON_S
        assert "stopped before it served" in world.daemon.log
        world.io.disarm()
        world.daemon.start()
        with connected(world.daemon) as client:
            assert client.read(client.open_namespace(), chain(world.next_seed, 1)) == 1


# -- the event loop

WATCHED = 'loop_warning = "0.5 s"\nloop_limit = "2 s"'


@pytest.mark.timeout(60)
def test_wedged_loop() -> None:
    """A stuck loop is logged with all stacks; beyond the limit the daemon aborts, and its successor
    is warm."""
    with Daemon(config(server=WATCHED), faults=True) as daemon:
        with connected(daemon) as client, daemon.faults() as faults:
            namespace = client.open_namespace()
            assert client.put(namespace, NEAR) == len(NEAR)
            faults.arm("cache.release.before_unpin", "delay:60")
            lease = client.acquire(namespace, NEAR).lease
            threading.Thread(target=_release, args=(client, lease), daemon=True).start()
            begun = time.monotonic()
            status = daemon.await_end()
            ended_s = time.monotonic() - begun
        assert status == -signal.SIGABRT
        assert "event loop not turning" in daemon.log
        assert "most recent call first" in daemon.log
        assert daemon.log.rstrip().splitlines()[-1].startswith("tierd: the event loop has not turned for 2 s")
        daemon.start()
        with connected(daemon) as client:
            assert client.read(client.open_namespace(), NEAR) == len(NEAR)
    report("wedged loop", limit_s=2, ended_s=round(ended_s, 2))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", SILENT)
def test_wedged_loop_that_nobody_hears_of(how: str) -> None:
    """Without a writable log a stuck daemon aborts beyond the limit, too."""
    silenced = Silenced(how, config(server=WATCHED), faults=True)
    with silenced as daemon, connected(daemon) as client, daemon.faults() as faults:
        namespace = client.open_namespace()
        assert client.put(namespace, NEAR) == len(NEAR)
        faults.arm("cache.release.before_unpin", "delay:60")
        lease = client.acquire(namespace, NEAR).lease
        threading.Thread(target=_release, args=(client, lease), daemon=True).start()
        assert daemon.await_end() == -signal.SIGABRT


def _release(client: BlockClient, lease: int) -> None:
    try:
        client.call(client.cache.Release, pb.ReleaseRequest(leases=[lease]))
    except grpc.RpcError as error:
        print("release ended with", error.code())


@pytest.mark.timeout(60)
def test_stopped_daemon_is_not_wedged() -> None:
    """A daemon stopped for longer than the limit continues after SIGCONT; meanwhile calls time out."""
    with Daemon(config(server=WATCHED)) as daemon, connected(daemon) as client:
        namespace = client.open_namespace()
        assert client.put(namespace, NEAR) == len(NEAR)
        stand_still(daemon.pid)
        try:
            begun = time.monotonic()
            while time.monotonic() - begun < 3.0:
                assert _timed_get(client, namespace, 0.5) < 0.5 + SLACK_S
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert client.read(namespace, NEAR) == len(NEAR)
        assert client.status().state == "serving"


@pytest.mark.timeout(60)
def test_hung_daemon_costs_its_deadline_once() -> None:
    """A hung daemon costs a best-effort client one deadline at most. Later calls miss at once, and
    hit when it continues.

    Views need the daemon even for blocks in memory.
    """
    with Daemon(config()) as daemon, Client(daemon.target, best_effort=True, timeout_s=1.0) as client:
        namespace = client.open_namespace(NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096))
        blocks = [content_of(name, 4096) for name in NEAR]
        assert client.put(namespace, NEAR, blocks).stored == len(NEAR)
        stand_still(daemon.pid)
        try:
            begun = time.monotonic()
            assert client.get(namespace, NEAR).tokens == 0
            first_s = time.monotonic() - begun
            begun = time.monotonic()
            assert [client.get(namespace, NEAR).tokens for _ in range(100)] == [0] * 100
            others_s = time.monotonic() - begun
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert first_s < 1.0 + SLACK_S
        assert others_s < 10 * 0.1 + SLACK_S
        await_true(lambda: client.get(namespace, NEAR).tokens == 16 * len(NEAR), "hits again")
    report("best_effort on a hung daemon", first_s=round(first_s, 2), next_100_s=round(others_s, 2))


def _timed_get(client: BlockClient, namespace: int, timeout_s: float) -> float:
    begun = time.monotonic()
    group = pb.Group(namespace=namespace, hashes=NEAR.tobytes())
    with pytest.raises(grpc.RpcError):
        client.cache.Acquire(
            pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST), metadata=client.metadata, timeout=timeout_s
        )
    return time.monotonic() - begun
