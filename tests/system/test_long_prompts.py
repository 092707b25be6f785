"""Prompts of more blocks than a call may have: clients see no difference, for any limit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.depth import report
from tests.system.sdk import await_nothing_held
from tests.system.tcp import free_port
from tests.system.warm import Daemon
from tierd.client import About, AsyncClient, Client, Group, NamespaceSpec, Need, OpenedNamespace, PutGroup, splitting
from tierd.core.formats.model import BlockStatus
from tierd.testing import chain

LIMIT = 100
COUNT = 7 * LIMIT + 3
BYTES = 64
SPEC = NamespaceSpec(model="long", tokens_per_block=16, block_bytes=BYTES, rank_count=8)
TOKENS = np.arange(16 * COUNT + 5, dtype=np.uint32)
CONFIG = """\
{store}
[server]
max_batch_blocks = {limit}
tcp_listen = "127.0.0.1:{port}"
tcp_credential_file = "{secret}"

[[host]]
capacity = "64 MiB"
segment = "4 MiB"
"""


def bodies(count: int = COUNT, *, tail: int = 20) -> np.ndarray:
    """One row per block, all distinct. The last block covers 5 tokens, so it has 20 bytes."""
    rows = np.arange(count * BYTES // 4, dtype=np.uint32).view(np.uint8).reshape(count, BYTES)
    return [*rows, np.full(tail, 7, np.uint8)] if tail else list(rows)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, dict[str, Any]]]:
    """A daemon that takes 100 blocks a call, and its TCP address and credential file."""
    secret = tmp_path_factory.mktemp("long") / "secret"
    secret.write_text("hush" * 8 + "\n")
    secret.chmod(0o600)
    port = free_port()
    with Daemon(CONFIG.format(store="nvme = []", limit=LIMIT, port=port, secret=secret)) as daemon:
        yield daemon, {"target": f"127.0.0.1:{port}", "credential_file": str(secret)}


def open_client(place: tuple[Daemon, dict[str, Any]], way: str, **options: Any) -> Client:
    """A client over shared memory or TCP."""
    daemon, remote = place
    return Client(daemon.target, **options) if way == "local" else Client(**remote, **options)


@pytest.mark.parametrize("best_effort", [False, True])
@pytest.mark.parametrize("way", ["local", "tcp"])
def test_a_prompt_in_parts_comes_back_whole(place: Any, way: str, best_effort: bool) -> None:
    """A prompt of eight calls is put, then got as views, a list and a flat buffer; each byte is right."""
    blocks = bodies()
    with open_client(place, way, best_effort=best_effort) as client:
        ns = client.open_namespace(replace(SPEC, salt=f"{way}{best_effort}"))
        assert client.put(ns, TOKENS, blocks)
        assert set(client.put(ns, TOKENS, blocks).statuses) == {BlockStatus.EXISTS}
        got = client.get(ns, TOKENS)
        assert (got.tokens, got.blocks, len(got.views)) == (len(TOKENS), COUNT + 1, COUNT + 1)
        assert all(np.array_equal(view, block) for view, block in zip(got.views, blocks, strict=True))
        out, flat = [np.zeros(BYTES, np.uint8) for _ in blocks], np.zeros(COUNT * BYTES + 20, np.uint8)
        for target in (out, flat, out):  # the client may serve the third without the daemon
            assert client.get(ns, TOKENS, out=target).tokens == len(TOKENS)
        assert np.array_equal(np.concatenate(blocks), flat)
        assert all(np.array_equal(mine[: len(block)], block) for mine, block in zip(out, blocks, strict=True))
        shorter = client.get(ns, np.append(TOKENS[: 16 * 250], np.zeros(16 * 200, np.uint32)), out=out)
        assert (shorter.tokens, shorter.blocks) == (16 * 250, 250)
        del got


async def test_a_prompt_in_parts_on_asyncio(place: Any) -> None:
    """Concurrent prompts of the asynchronous client come back complete."""
    daemon, _ = place
    async with AsyncClient(daemon.target) as client:
        spaces = [await client.open_namespace(replace(SPEC, salt=f"async{i}")) for i in range(3)]
        assert all(await asyncio.gather(*(client.put(ns, TOKENS, bodies()) for ns in spaces)))
        for got in await asyncio.gather(*(client.get(ns, TOKENS) for ns in spaces)):
            assert np.array_equal(np.concatenate(got.views), np.concatenate(bodies()))
        hashes = spaces[0].hash(TOKENS)
        assert (await client.lookup(spaces[0], hashes)).tokens == 16 * COUNT
        assert await client.prefetch(spaces[0], hashes) == 0


def test_ranks_and_groups_count(place: Any) -> None:
    """A lookup over ranks and groups is complete; a lease covers the prefix that one call takes. A
    rank that lacks a block ends the prefix."""
    daemon, _ = place
    with Client(daemon.target) as client:
        first = client.open_namespace(replace(SPEC, salt="ranks"))
        second = client.open_namespace(replace(SPEC, salt="ranks", group="b", tokens_per_block=32))
        hashes, halves = chain(1, 40), chain(2, 20)
        for rank in range(8):
            assert client.put(first, PutGroup(first, hashes, rank=rank), bodies(40, tail=0))
            assert client.put(
                second, PutGroup(second, halves[: 20 - rank % 2], rank=rank), bodies(20 - rank % 2, tail=0)
            )
        ranks = tuple(range(8))
        whole, odd = Group(first, hashes, ranks=ranks), Group(second, halves, ranks=ranks)
        found = client.lookup(whole)
        assert (found.tokens, found.tier_of[0].shape, found.tier_tokens[0]) == (640, (8, 40), 640)
        both = client.lookup([whole, odd])
        assert (both.tokens, [tiers.shape for tiers in both.tier_of]) == (608, [(8, 40), (8, 20)])
        assert (both.tier_of[1] < 0).sum() == 4
        assert client.prefetch([whole, odd]) == 0
        with client.acquire([whole, odd]) as lease:
            assert lease.tokens == 4 * 32  # 24 blocks for each 32 tokens, over all ranks and groups
            assert [group.handles.shape for group in lease.groups] == [(8, 8), (8, 4)]
        last = Group(second, halves, ranks=ranks, need=Need.LAST_TOKENS, need_tokens=32)
        assert client.acquire([whole, last]).tokens == 4 * 32
        cut = client.lookup([whole, last])
        assert (cut.tokens, [tiers.shape for tiers in cut.tier_of]) == (4 * 32, [(8, 40), (8, 20)])
        await_nothing_held(daemon, "the leases")


def test_what_is_said_of_blocks_stays_with_them(place: Any) -> None:
    """In a put of several parts, each block keeps its priority, retention, length, parent and position."""
    daemon, _ = place
    with Client(daemon.target) as client:
        ns = client.open_namespace(replace(SPEC, salt="said"))
        hashes, lengths = chain(3, 250), [1 + i % BYTES for i in range(250)]
        group = PutGroup(
            ns, hashes, lengths=lengths, position=5, parent=bytes([9]) * 32, about=About(tokens=range(250 * 16)),
            priority=[i % 100 for i in range(250)], retention_s=[None] * 250,
        )  # fmt: skip
        part = group.part(100, 200)
        assert (part.parent, part.position, part.lengths) == (hashes[99].tobytes(), 105, lengths[100:200])
        assert (part.priority, part.about.tokens) == ([i % 100 for i in range(100, 200)], range(1600, 3200))
        assert client.put(ns, group, [bytes([i % 251]) * length for i, length in enumerate(lengths)])
        views = client.get(ns, hashes).views
        assert [bytes(view) for view in views] == [bytes([i % 251]) * length for i, length in enumerate(lengths)]


def test_a_put_that_finds_no_room_ends_there(tmp_path: Path) -> None:
    """After a part without room, later parts are not tried: their blocks are NO_ROOM, earlier ones served."""
    config = '[server]\nmax_batch_blocks = 100\nsession_share = 0.5\n[[host]]\ncapacity = "4 MiB"\nsegment = "1 MiB"\n'
    with Daemon(f"nvme = []\n{config}") as daemon, Client(daemon.target) as client:
        ns = client.open_namespace(SPEC)
        hashes = chain(4, 900)
        with (
            client.reserve([PutGroup(ns, chain(5, 100)), PutGroup(ns, chain(6, 0))]),
            client.reserve(PutGroup.private(ns, 100)),
        ):
            done = client.put(ns, hashes, bodies(900, tail=0))
        assert 0 < client.get(ns, hashes, out=np.zeros((900, BYTES), np.uint8)).blocks == done.stored < 900
        assert set(done.statuses[done.stored :]) == {BlockStatus.NO_ROOM}


def test_a_prompt_that_does_not_fit_is_served_as_far_as_it_does() -> None:
    """A get serves as many blocks as its put stored: at least 1,000 of the nearly 1,024 that fit."""
    config = '[server]\nmax_batch_blocks = 100\n[[host]]\ncapacity = "4 MiB"\nsegment = "1 MiB"\n'
    with Daemon(f"nvme = []\n{config}") as daemon, Client(daemon.target) as client:
        ns, hashes, rows = client.open_namespace(SPEC), chain(4, 1500), bodies(1500, tail=0)
        stored = client.put(ns, hashes, rows).stored
        got = client.get(ns, hashes, out=(out := np.zeros((1500, BYTES), np.uint8)))
        assert stored == got.blocks >= 1000
        assert np.array_equal(out[: got.blocks], rows[: got.blocks])


def test_a_durable_prompt_larger_than_memory_is_served_whole() -> None:
    """A client gets back all of a durable prompt four times as large as memory, every byte right."""
    config = '[server]\nmax_batch_blocks = 100\n[[host]]\ncapacity = "4 MiB"\nsegment = "1 MiB"\n'
    config += '[[nvme]]\ncapacity = "256 MiB"\nsegment = "16 MiB"\n'
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=120.0) as client:
        ns, hashes, rows = client.open_namespace(SPEC), chain(4, 4000), bodies(4000, tail=0)
        assert client.put(ns, hashes, rows, durable=True)
        got = client.get(ns, hashes, out=(out := np.zeros((4000, BYTES), np.uint8)))
        assert got.blocks == 4000
        assert np.array_equal(out, rows)


@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 20])
def test_a_prompt_larger_than_a_session_may_hold_is_put_and_got_whole(block_bytes: int) -> None:
    """A session may hold half of memory; a client still gets back a prompt of nearly all of it."""
    config = 'nvme = []\n[server]\nsession_share = 0.5\n[[host]]\ncapacity = "16 MiB"\nsegment = "2 MiB"\n'
    blocks = (15 << 20) // block_bytes
    rows = np.random.default_rng(0).integers(256, size=(blocks, block_bytes), dtype=np.uint8)
    with Daemon(config) as daemon, Client(daemon.target) as client:
        ns = client.open_namespace(replace(SPEC, rank_count=1, block_bytes=block_bytes))
        assert client.put(ns, hashes := chain(4, blocks), rows)
        assert client.get(ns, hashes, out=(out := np.zeros_like(rows))).blocks == blocks
        assert np.array_equal(out, rows)


def test_windows_are_looked_up_whole(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK asks for a group with a window in one call, because the window's end decides the hit."""
    monkeypatch.setattr(splitting, "PART_BLOCKS", 30)
    daemon, _ = place
    spec = replace(SPEC, salt="windows", rank_count=1)
    with Client(daemon.target) as client:
        ns, hashes = client.open_namespace(spec), chain(4, 90)
        assert client.put(ns, hashes[86:], bodies(4, tail=0))
        group = Group(ns, hashes, need=Need.LAST_TOKENS, need_tokens=40)
        with client.acquire([group]) as lease:
            assert client.lookup([group]).tokens == lease.tokens == 90 * 16


def test_a_later_part_that_fails_is_a_smaller_hit(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With best effort, a failed part ends the hit after the earlier parts; otherwise the error is raised."""
    from tierd.client import verbs
    from tierd.errors import TierFailed

    daemon, _ = place
    with Client(daemon.target) as writer:
        assert writer.put(writer.open_namespace(replace(SPEC, salt="fails")), TOKENS, bodies())
    inner, calls = verbs.Verbs.leased, []

    def leased(self: Any, groups: Any, tier: str, deadline: float, **options: Any) -> Any:
        calls.append(1)
        if len(calls) % 4 == 3:
            raise TierFailed("host.0: no")
        return inner(self, groups, tier, deadline, **options)

    monkeypatch.setattr(verbs.Verbs, "leased", leased)
    with Client(daemon.target, best_effort=True) as careless, Client(daemon.target) as client:
        got = careless.get(careless.open_namespace(replace(SPEC, salt="fails")), TOKENS)
        assert got.tokens == 2 * LIMIT * 16
        calls.clear()
        with pytest.raises(TierFailed):
            client.get(client.open_namespace(replace(SPEC, salt="fails")), TOKENS)


def test_the_limit_that_daemons_have() -> None:
    """With default settings every verb that takes ranks accepts 8 ranks of 8,193 blocks."""
    with Daemon() as daemon, Client(daemon.target) as client:
        ranked = client.open_namespace(SPEC)
        group = Group(ranked, chain(7, 8193), ranks=tuple(range(8)))
        assert client.lookup(group).tier_of[0].shape == (8, 8193)
        assert not client.acquire(group)
        assert client.prefetch(group) == 0


@pytest.mark.slow
def test_tokens_of_one_a_block() -> None:
    """With default settings a client puts 70,000 tokens, one per block, and gets them back."""
    config = 'nvme = []\n[[host]]\ncapacity = "512 MiB"\nsegment = "16 MiB"\n'
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=60.0) as client:
        ones = client.open_namespace(NamespaceSpec(model="ones", tokens_per_block=1, block_bytes=8))
        tokens = np.arange(70_000, dtype=np.uint32)
        rows = tokens.astype(np.uint64).view(np.uint8).reshape(-1, 8)
        assert client.put(ones, tokens, rows)
        assert client.get(ones, tokens, out=(out := np.zeros_like(rows))).tokens == 70_000
        assert np.array_equal(out, rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["local", "tcp"])
def test_ten_million_tokens(tmp_path: Path, way: str) -> None:
    """A client gets back ten million tokens, 625,000 blocks, every byte right.

    Over TCP memory serves them. Locally they are durable, and a sixth of them is on NVMe alone.
    """
    secret, port = tmp_path / "secret", free_port()
    secret.write_text("hush" * 8 + "\n")
    secret.chmod(0o600)
    config = (
        CONFIG.format(store="", limit=65536, port=port, secret=secret)
        .replace('"64 MiB"', '"3 GiB"' if way == "tcp" else '"2 GiB"')
        .replace("4 MiB", "64 MiB")
    )
    config += '[[nvme]]\ncapacity = "6 GiB"\nadmission = "all"\n'
    count = 625_000
    tokens = np.arange(16 * count, dtype=np.uint32)
    rows = tokens.reshape(count, 16).view(np.uint8)
    with Daemon(config) as daemon:
        remote = {"target": f"127.0.0.1:{port}", "credential_file": str(secret)}
        with Client(**remote, timeout_s=300.0) if way == "tcp" else Client(daemon.target, timeout_s=300.0) as client:  # type: ignore[arg-type]
            ns: OpenedNamespace = client.open_namespace(SPEC)
            done = client.put(ns, tokens, rows, durable=way == "local")
            got = client.get(ns, tokens, out=(out := np.zeros_like(rows)))
            report("ten million tokens", way=way, stored=done.stored, got=got.blocks)
            assert done
            assert np.array_equal(out[: got.blocks], rows[: got.blocks])
            assert got.blocks == count
