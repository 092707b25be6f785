"""Incidents from the field, one test per row of reliability-study 2.1: tierd must not repeat them.

R6 (order of GPU copies) needs the GPU tier: a commit will wait for the copy's event, then digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.system.blocks import BlockClient, await_true
from tests.system.puppet import Puppet
from tests.system.sdk import SMALL, churn, put, right
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.client import Client, Group, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.core.formats.block import KVGeometry, namespace_digest
from tierd.core.formats.model import BlockStatus
from tierd.errors import NotFound, TierdError
from tierd.testing import chain, content_of, is_content

CONFIG = """\
[server]
shutdown_deadline = "5 s"

[[host]]
capacity = "16 MiB"
segment = "4 MiB"

[[nvme]]
capacity = "32 MiB"
segment = "4 MiB"
"""
COUNT = 8


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with host memory above a store, whose fault points the test can arm."""
    with Daemon(CONFIG, faults=True) as running:
        yield running


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """A daemon for tests that break nothing."""
    with Daemon(CONFIG) as running:
        yield running


# -- R1

UNPUBLISHED = (
    "cache.reserve.before_hold",
    "cache.commit.before_hash",
    "cache.commit.before_publish",
)
"""An error here comes before lookups can hit the blocks."""
UNWRITTEN = (
    "cache.persist.before_write",
    "mover.store.before_hash",
    "nvme.slots.before_write",
    "nvme.write.before_note",
    "cache.persist.before_sync",
    "nvme.journal.before_append",
    "nvme.journal.before_sync",
)
"""An error here comes when blocks are in memory, not durable; the last two stop the store's writes."""


def test_r1_a_failed_put_stays_invisible(daemon: Daemon) -> None:
    """Elsewhere, blocks whose store had failed were offered, and answers were gibberish. Here an
    error at any step of a put publishes no partial key and reports no unwritten block as stored."""
    with Client(daemon.target) as client, daemon.faults() as faults:
        namespace = client.open_namespace(SMALL)
        for seed, point in enumerate((*UNPUBLISHED, *UNWRITTEN)):
            faults.arm(point, "error:EIO")
            assert _stored(client, namespace, seed) < COUNT, point
            assert sum(faults.hits().values()) > 0, point
            faults.disarm()
            got = client.get(namespace, chain(seed, COUNT))
            assert right(got.views, seed) == got.blocks, point
            assert point not in UNPUBLISHED or got.blocks == 0, point
            del got
            _mend(daemon)
            await_true(lambda: _stored(client, namespace, seed) == COUNT, f"stored after {point}")  # noqa: B023


def _mend(daemon: Daemon) -> None:
    """Puts a store that was taken out of service back into service at once."""
    with BlockClient(daemon.target) as raw, contextlib.suppress(grpc.RpcError):
        raw.call(raw.admin.Resume, apb.ResumeRequest(tier="nvme.0"))


def _stored(client: Client, namespace: OpenedNamespace, seed: int) -> int:
    """The number of blocks that a durable put reports as stored."""
    hashes = chain(seed, COUNT)
    try:
        return client.put(namespace, hashes, [content_of(name, 4096) for name in hashes], durable=True).stored
    except TierdError:
        return 0


# -- R2


@pytest.mark.parametrize("k", [0, 3, COUNT - 1])
def test_r2_a_batch_whose_kth_block_fails(daemon: Daemon, k: int) -> None:
    """Elsewhere, a failed transfer counted as loaded; HTTP 200 carried another request's KV. Here a
    bad k-th block ends views, copies and tokens before it; buffers from it on are unchanged."""
    with Client(daemon.target) as client, BlockClient(daemon.target) as raw:
        namespace = client.open_namespace(SMALL)
        hashes = chain(1, COUNT)
        assert client.put(namespace, hashes, [content_of(name, 4096) for name in hashes], durable=True)
        raw.call(raw.admin.Evict, apb.EvictRequest(tier="host.0"))
        _spoil(daemon, content_of(hashes[k], 4096).tobytes())
        out = np.full((COUNT, 4096), 0xA5, np.uint8)
        got = client.get(namespace, hashes, out=list(out))
        assert (got.blocks, got.tokens, right(list(out[:k]), 1)) == (k, 16 * k, k)
        assert (out[k:] == 0xA5).all()
        views = client.get(namespace, hashes).views
        assert (len(views), right(views, 1)) == (k, k)


def _spoil(daemon: Daemon, content: bytes) -> None:
    """Flips a bit of a block on the disk."""
    for path in Path(daemon.root).rglob("*.slots"):
        at = path.read_bytes().find(content)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(bytes([content[100] ^ 4]))
            return
    raise AssertionError("the block is on no disk")


def test_r2_a_batch_that_finds_no_room(shared_daemon: Daemon) -> None:
    """Elsewhere, a partly allocated batch was used in full. Here a block without room has no page."""
    with Client(shared_daemon.target) as client:
        spec = NamespaceSpec(model="roomy", tokens_per_block=16, block_bytes=1 << 20)
        with client.reserve(PutGroup(client.open_namespace(spec), chain(2, 12))) as pages:
            given = [status == BlockStatus.RESERVED for status in pages.statuses]
            assert 0 < sum(given) < 12
            assert [page is not None for page in pages.buffers()] == given


# -- R3


def test_r3_a_stopped_writer_keeps_its_pages(shared_daemon: Daemon) -> None:
    """Elsewhere, a sleeping writer's reservation expired and half its data was read. Here a stopped
    writer keeps its pages, unseen, without a time limit, while ten times the tier passes
    through."""
    with Client(shared_daemon.target) as client, Puppet(shared_daemon.target) as writer:
        taken = writer.reserve(7, COUNT)
        writer.stop()
        assert churn(client, seed=3, total=160 << 20) > 0
        with BlockClient(shared_daemon.target) as raw:
            assert raw.lookup(raw.open_namespace(), chain(7, COUNT)) == 0
        writer.go_on()
        assert (writer.wrong(), len(taken)) == (0, COUNT)


def test_r3_a_stopped_reader_keeps_its_pages(shared_daemon: Daemon) -> None:
    """Elsewhere, a load's buffer was freed during the load, because its lease had expired. Here a
    stopped reader's pages stay unchanged while ten times the tier passes through."""
    with Client(shared_daemon.target) as client, Puppet(shared_daemon.target) as reader:
        assert reader.put(8, COUNT) == COUNT
        assert len(reader.lease(8, COUNT)) == COUNT
        reader.stop()
        assert churn(client, seed=4, total=160 << 20) > 0
        reader.go_on()
        assert reader.wrong() == 0


# -- R4


def test_r4_a_late_commit_completes_nothing(shared_daemon: Daemon) -> None:
    """Elsewhere, the end of an old put completed a newer object. Here a late commit of an aborted
    put publishes no reused page, and gets serve the new put's bytes."""
    with BlockClient(shared_daemon.target) as old, BlockClient(shared_daemon.target) as new:
        namespace = old.open_namespace(model="late")
        first, handles = old.reserve(namespace, chain(9, COUNT))
        places = {old.memory_of(handle, writable=True) for handle in handles}
        old.write(handles, chain(9, COUNT))
        old.abort(first)
        second, again = old.reserve(namespace, chain(10, COUNT))
        assert {old.memory_of(handle, writable=True) for handle in again} & places
        for client in (old, new):
            assert client.error_of(client.cache.Commit, pb.CommitRequest(reservation=first)) == NotFound.__name__
        assert old.lookup(namespace, chain(9, COUNT)) == 0
        old.write(again, chain(10, COUNT))
        old.call(old.cache.Commit, pb.CommitRequest(reservation=second))
        assert old.error_of(old.cache.Commit, pb.CommitRequest(reservation=second)) == NotFound.__name__
        assert (new.read(namespace, chain(10, COUNT)), new.lookup(namespace, chain(9, COUNT))) == (COUNT, 0)


# -- R5


def test_r5_no_conversation_gets_another_ones_blocks(shared_daemon: Daemon) -> None:
    """Elsewhere, a disk tier that reused evicted places served other conversations. Here each block
    is right while three times both tiers passes through; test_races.py does a million gets."""
    with Client(shared_daemon.target) as client:
        namespace = client.open_namespace(replace(SMALL, block_bytes=1 << 17, model="conversations"))
        served = wrong = 0
        for turn in range(110):
            assert put(client, namespace, turn, COUNT).stored > 0
            for seed in (turn, turn - 9, turn - 20):
                got = client.get(namespace, chain(seed, COUNT))
                served += got.blocks
                wrong += got.blocks - right(got.views, seed)
                del got
        assert (wrong, served > 500) == (0, True)


# -- R7

BASE = NamespaceSpec(
    model="m",
    tokens_per_block=16,
    block_bytes=4096,
    weights_digest="a" * 64,
    adapter="",
    group="full",
    salt="",
    rank_count=2,
    geometry=KVGeometry(2, 4, 8, "bfloat16", "NHD"),
)
OTHERS = {
    "model": replace(BASE, model="n"),
    "weights digest": replace(BASE, weights_digest="b" * 64),
    "adapter": replace(BASE, adapter="lora-1"),
    "attention group": replace(BASE, group="window"),
    "salt": replace(BASE, salt="another"),
    "tokens per block": replace(BASE, tokens_per_block=32),
    "ranks": replace(BASE, rank_count=4),
    "dtype": replace(BASE, geometry=replace(BASE.geometry, dtype="float16")),
    "layout": replace(BASE, geometry=replace(BASE.geometry, layout="HND")),
    "heads": replace(BASE, geometry=replace(BASE.geometry, kv_heads=8)),
    "head dim": replace(BASE, geometry=replace(BASE.geometry, head_dim=16)),
    "layers": replace(BASE, geometry=replace(BASE.geometry, layers=4)),
    "block bytes": replace(BASE, block_bytes=8192),
    "codec": replace(BASE, codec="rot-4-4"),
}
TOKENS = list(range(128))


def test_r7_identity_is_everything_that_the_bytes_depend_on(shared_daemon: Daemon) -> None:
    """Elsewhere, only model names were compared, and KV of other weights, layouts or ranks was
    served. Here any single difference is a miss, for the same tokens and for the stored hashes."""
    with Client(shared_daemon.target) as client:
        base = client.open_namespace(BASE)
        hashes = base.hash(TOKENS)
        assert client.put(base, hashes, [content_of(name, 4096) for name in hashes])
        assert client.lookup(base, hashes).tokens == 128
        for what, spec in OTHERS.items():
            other = client.open_namespace(spec)
            assert other.digest != base.digest, what
            assert client.lookup(other, other.hash(TOKENS)).tokens == 0, what
            assert client.lookup(other, hashes[: len(TOKENS) // spec.tokens_per_block]).tokens == 0, what
            assert client.get(other, hashes[: len(TOKENS) // spec.tokens_per_block]).blocks == 0, what
        assert client.lookup([Group(base, hashes, ranks=(1,))]).tokens == 0, "another rank"
        assert client.lookup([Group(base, hashes, ranks=(0, 1))]).tokens == 0, "one rank of two"
    digests = {namespace_digest(BASE, tenant=tenant, epoch=epoch) for tenant in ("a", "b") for epoch in (1, 2)}
    assert len(digests) == 4, "tenant and epoch"


# -- R8

PARTS = (replace(SMALL, model="parts", group="kv"), replace(SMALL, model="parts", group="state"))


def test_r8_a_short_sidecar_shortens_the_answer(shared_daemon: Daemon) -> None:
    """Elsewhere, a second part shorter than its KV was padded. Here the shortest part limits the hit."""
    with Client(shared_daemon.target) as client:
        kv, state = (client.open_namespace(spec) for spec in PARTS)
        assert put(client, kv, 20, COUNT).stored == COUNT
        assert put(client, state, 20, 3).stored == 3
        with client.acquire([Group(kv, chain(20, COUNT)), Group(state, chain(20, COUNT))]) as lease:
            assert (lease.tokens, [group.count for group in lease.groups]) == (48, [3, 3])
            assert all(is_content(page, name) for page, name in zip(lease.views(), [*chain(20, 3)] * 2, strict=True))


@pytest.mark.parametrize(
    "point", ["cache.commit.before_publish", "arena.publish.before_seal", "cache.commit.before_hold"]
)
def test_r8_a_commit_of_parts_is_one(daemon: Daemon, point: str) -> None:
    """Elsewhere, a block's parts were stored one by one and one was missing. Here the daemon dies
    in the commit of both: later both hit to the same length or not at all, with right bytes."""
    with Client(daemon.target) as client, daemon.faults() as faults:
        groups = [PutGroup(client.open_namespace(spec), chain(21, COUNT)) for spec in PARTS]
        pages = client.reserve(groups)
        for page, name in zip(pages.buffers(), [*chain(21, COUNT)] * 2, strict=True):
            assert page is not None
            page[:] = content_of(name, 4096)
        faults.arm(point, "kill")
        with pytest.raises(TierdError):
            pages.commit(lease=True)  # without a lease, the daemon answers before the last of these points
    daemon.await_end()
    daemon.start()
    with Client(daemon.target) as client:
        both = [Group(client.open_namespace(spec), chain(21, COUNT)) for spec in PARTS]
        with client.acquire(both) as lease:
            assert len({group.count for group in lease.groups}) <= 1
            assert all(
                is_content(page, name)
                for page, name in zip(lease.views(), [*chain(21, lease.tokens // 16)] * 2, strict=True)
            )
        await_true(lambda: client.lookup(both).tokens in (0, 16 * COUNT), "all or none")
