"""Stores that keep blocks encoded: bounds, demands, restarts, damage, through a real daemon."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tests.system.blocks import await_true
from tests.system.raw import RawClient
from tests.system.test_corruption import flip_bit
from tests.system.test_restart import wipe_arena
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.cli.admin import connect
from tierd.client import BlockStatus, Client, Group, NamespaceSpec, OpenedNamespace
from tierd.codecs.values import KVShape, floats_of, raw_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import TierdError
from tierd.testing import chain

CONFIG = """\
[[host]]
capacity = "8 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "16 MiB"
segment = "1 MiB"
codec = "{codec}"
"""
GEOMETRY = KVGeometry(layers=4, kv_heads=2, head_dim=128, dtype="bfloat16")
SHAPE = KVShape(GEOMETRY, 16)
SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=SHAPE.block_bytes, geometry=GEOMETRY)
NAMES = chain(1, 6)
ANY = float("inf")


def blocks(seed: int = 0, count: int = len(NAMES)) -> list[np.ndarray]:
    """Blocks of normal values, as bytes."""
    values = np.random.default_rng(seed).standard_normal((count, *SHAPE.sizes)).astype(np.float32)
    return [rounded(each, "bfloat16").reshape(-1).view(np.uint8) for each in values]


def off(views: list[np.ndarray], wanted: list[np.ndarray]) -> list[float]:
    """The largest error of each block."""
    pairs = zip(views, wanted, strict=True)
    return [float(np.abs(floats(a) - floats(b)).max()) for a, b in pairs]


def floats(block: np.ndarray) -> np.ndarray:
    return floats_of(raw_of(np.ascontiguousarray(block), SHAPE), "bfloat16")


def evict(daemon: Daemon, tier: str = "host.0") -> None:
    """Evicts all blocks of a tier."""
    with RawClient(daemon.target) as client:
        client.call(client.admin.Evict, apb.EvictRequest(tier=tier))


def got(
    client: Client, space: OpenedNamespace, names: np.ndarray = NAMES, limit: float | None = None
) -> list[np.ndarray]:
    """Copies of the blocks that an acquire serves."""
    with client.acquire(Group(space, names, error_limit=limit)) as lease:
        return [np.array(view) for view in lease.views()]


def stored_bytes(daemon: Daemon) -> int:
    """Bytes that the store's payloads have, as the catalogue of blocks says."""
    with RawClient(daemon.target) as client:
        return int(client.call(client.admin.Tiers, apb.TiersRequest()).tiers[1].used_bytes)


def bad_pages(daemon: Daemon) -> int:
    """Bad pages of the store that a scrub finds."""
    with connect(daemon.target) as operator:
        *_, last = operator.follow(apb.ScrubRequest(tier="nvme.0"))
    return sum(tier.bad for tier in last.tiers)


def stored(client: Client, space: OpenedNamespace, wanted: list[np.ndarray], names: np.ndarray = NAMES) -> None:
    """Puts durable blocks."""
    assert (client.put(space, names, wanted, durable=True).statuses == BlockStatus.READY).all()


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.03), ("rot-8-4", 1.0), ("rot-4-4", 1.0), ("int3", 2.0)])
def test_blocks_come_back_within_their_bound(codec: str, most: float) -> None:
    """Blocks from an encoded store are near the originals; the first and a short last one are exact."""
    kept = blocks()
    with Daemon(CONFIG.format(codec=codec)) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC, error_limit=ANY)
        client.put(space, NAMES, kept, durable=True)
        evict(daemon)
        errors = off(got(client, space), kept)
        assert errors[0] == 0.0
        assert all(0 < error < most for error in errors[1:])


def test_a_client_that_accepts_no_error_gets_none() -> None:
    """Blocks of a namespace whose clients accept no error are stored as they are."""
    kept = blocks()
    with Daemon(CONFIG.format(codec="rot-4-4")) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        stored(client, space, kept)
        evict(daemon)
        assert off(got(client, space), kept) == [0.0] * len(NAMES)


@pytest.mark.parametrize("limit", [0.0, 0.001])
def test_a_demand_makes_coarse_blocks_misses(limit: float) -> None:
    """Lookup, acquire and get miss blocks with a greater error than they accept, near and far."""
    with Daemon(CONFIG.format(codec="rot-4-4")) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC, error_limit=ANY)
        strict = client.open_namespace(SPEC, error_limit=limit)
        stored(client, space, blocks())
        assert client.lookup(strict, NAMES).tokens == 16 * len(NAMES)
        evict(daemon)
        assert client.lookup(space, NAMES).tokens == 16 * len(NAMES)
        assert client.lookup(strict, NAMES).tokens == 16  # the first block is stored as it is
        assert len(got(client, space, limit=limit)) == 1
        assert len(got(client, space)) == len(NAMES)  # near from now on
        assert client.lookup(strict, NAMES).tokens == 16
        assert client.get(strict, NAMES, out=[np.empty(SPEC.block_bytes, np.uint8) for _ in NAMES]).tokens == 16
        assert len(got(client, strict)) == 1


def test_a_block_beyond_its_namespaces_limit_stays_as_it_is() -> None:
    """A block whose error would exceed the limit is stored exactly, also by a durable put."""
    kept = blocks()
    with Daemon(CONFIG.format(codec="rot-4-4")) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC, error_limit=0.001)
        stored(client, space, kept)
        evict(daemon)
        assert off(got(client, space), kept) == [0.0] * len(NAMES)


def test_an_exact_put_replaces_coarse_blocks() -> None:
    """After a restart nobody accepts errors. Coarse blocks miss then, and exact puts replace them."""
    kept = blocks()
    with Daemon(CONFIG.format(codec="rot-4-4")) as daemon:
        with Client(daemon.target) as client:
            stored(client, client.open_namespace(SPEC, error_limit=ANY), kept)
            evict(daemon)
        daemon.restart()
        with Client(daemon.target) as client:
            space = client.open_namespace(SPEC)
            assert client.lookup(space, NAMES).tokens == 16
            statuses = client.put(space, NAMES, kept, durable=True).statuses
            assert statuses.tolist() == [BlockStatus.EXISTS] + [BlockStatus.READY] * (len(NAMES) - 1)
            assert client.lookup(space, NAMES).tokens == 16 * len(NAMES)
            evict(daemon)
            assert off(got(client, space), kept) == [0.0] * len(NAMES)


@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("codec", ["rot-4-4", "int8"])
def test_a_restart_finds_encoded_blocks(codec: str, kills: bool) -> None:
    """After a restart, also one by SIGKILL, encoded blocks and their bounds are as before."""
    kept = blocks()
    with Daemon(CONFIG.format(codec=codec)) as daemon:
        with Client(daemon.target) as client:
            space = client.open_namespace(SPEC, error_limit=ANY)
            stored(client, space, kept)
            evict(daemon)
            before = got(client, space)
            evict(daemon)
        if kills:
            daemon.kill()
            daemon.start()
        else:
            daemon.restart()
        with Client(daemon.target) as client:
            space = client.open_namespace(SPEC, error_limit=ANY)
            assert len(got(client, space, limit=0.0)) == 1
            after = got(client, space)
            assert [a.tobytes() for a in after] == [b.tobytes() for b in before]
            assert len(got(client, space, limit=0.0)) == 1


def test_errors_near_survive_a_restart() -> None:
    """Coarse blocks in host memory stay coarse over a restart. No get without a call serves them."""
    with Daemon(CONFIG.format(codec="rot-4-4")) as daemon:
        with Client(daemon.target) as client:
            space = client.open_namespace(SPEC, error_limit=ANY)
            stored(client, space, blocks())
            evict(daemon)
            assert len(got(client, space)) == len(NAMES)
            evict(daemon, "nvme.0")
        daemon.restart()
        with Client(daemon.target) as client:
            space, strict = client.open_namespace(SPEC, error_limit=ANY), client.open_namespace(SPEC)
            assert client.lookup(strict, NAMES).tokens == 16
            assert client.get(strict, NAMES, out=[np.empty(SPEC.block_bytes, np.uint8) for _ in NAMES]).tokens == 16
            assert len(got(client, space)) == len(NAMES)


def test_bounds_add_up() -> None:
    """A coarse block that is encoded again declares the sum of both bounds."""
    with Daemon(CONFIG.format(codec="rot-4-4")) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC, error_limit=ANY)
        kept = blocks()
        stored(client, space, kept)
        evict(daemon)
        once = max(off(got(client, space), kept))
        evict(daemon, "nvme.0")
        stored_again(client, space, kept)
        evict(daemon)
        assert len(got(client, space, limit=once)) == 1
        assert len(got(client, space)) == len(NAMES)


def stored_again(client: Client, space: OpenedNamespace, kept: list[np.ndarray]) -> None:
    """Brings blocks that are in host memory to the store."""
    assert (client.put(space, NAMES, kept, durable=True).statuses == BlockStatus.EXISTS).all()


def test_encoded_blocks_take_less_of_the_store() -> None:
    """A store with rot-4-4 holds at least 3.3 times the blocks of one without."""
    names, used = chain(7, 60), []
    for codec in ("", "rot-4-4"):
        with Daemon(CONFIG.format(codec=codec)) as daemon, Client(daemon.target) as client:
            space = client.open_namespace(SPEC, error_limit=ANY)
            stored(client, space, blocks(count=60), names)
            used.append(stored_bytes(daemon))
    assert used[0] / used[1] > 2.5


@pytest.mark.parametrize("shift", [10, 64, 3000])
def test_damage_is_a_miss(shift: int) -> None:
    """A flipped bit in an encoded block on the disk makes it a miss; scrub finds it too."""
    with Daemon(CONFIG.format(codec="rot-4-4")) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC, error_limit=ANY)
        stored(client, space, blocks())
        evict(daemon)
        files = [path for path in daemon.root.rglob("state/**/*") if path.is_file()]
        found = [(path, at) for path in files if (at := path.read_bytes().find(b"TDKV")) >= 0]
        flip_bit(found[0][0], found[0][1] + shift)
        assert 1 <= len(got(client, space)) < len(NAMES)
        assert bad_pages(daemon) == 0  # the read has found and quarantined it
        evict(daemon)
        (file, at), *_ = [(path, at) for path in files if (at := path.read_bytes().rfind(b"TDKV")) >= 0]
        flip_bit(file, at + shift)
        assert bad_pages(daemon) == 1


def test_namespaces_tell_what_encoding_does() -> None:
    """The daemon tells of each namespace: blocks encoded, bytes before and after, error, seconds."""
    with Daemon(CONFIG.format(codec="rot-4-4")) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC, error_limit=ANY)
        stored(client, space, blocks())
        evict(daemon)
        got(client, space)
        with connect(daemon.target) as operator:
            (found,) = [one.encoding for one in operator.ask(apb.NamespacesRequest()).namespaces if one.model == "m"]
    assert (found.blocks, found.decoded_blocks, found.not_fitting) == (len(NAMES) - 1, len(NAMES) - 1, 0)
    assert found.plain_bytes == (len(NAMES) - 1) * SPEC.block_bytes == found.decoded_bytes
    assert 3.5 < found.plain_bytes / found.stored_bytes < 4
    assert 0 < found.error < 4 and found.encode_s > 0 and found.decode_s > 0


def test_a_store_without_its_calibration_says_so() -> None:
    """Without any calibration, a store's codec that needs one is a notice, and blocks stay exact."""
    with Daemon(CONFIG.format(codec="kvquant-4")) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC, error_limit=ANY)
        stored(client, space, wanted := blocks())
        evict(daemon)
        assert off(got(client, space), wanted) == [0] * len(NAMES)
        with connect(daemon.target) as operator:
            notices = operator.ask(apb.StatusRequest()).notices
            codecs = [tier.codec for tier in operator.ask(apb.TiersRequest()).tiers]
    assert codecs == ["", "kvquant-4"]
    assert any(each.startswith("nvme.0: codec kvquant-4 needs a calibration") for each in notices)


@pytest.mark.parametrize("kills", [False, True])
def test_a_lossless_store_serves_all_after_a_restart(kills: bool) -> None:
    """Blocks that were encoded without loss come back bit by bit, to clients that accept no error."""
    kept = blocks()
    with Daemon(CONFIG.format(codec="lossless")) as daemon:
        with Client(daemon.target) as client:
            stored(client, client.open_namespace(SPEC), kept)
            evict(daemon)
        if kills:
            daemon.kill()
            wipe_arena(daemon)
            daemon.start()
        else:
            daemon.restart()
        with Client(daemon.target) as client:
            space = client.open_namespace(SPEC)
            assert off(got(client, space), kept) == [0.0] * len(NAMES)
            assert client.lookup(space, NAMES).tokens == 16 * len(NAMES)
        assert bad_pages(daemon) == 0


def test_a_device_gets_decoded_blocks_through_memory() -> None:
    """Blocks go from an encoded store over host memory to a device, and no page counts as bad."""
    device = '[[device]]\nkind = "cpu"\ncapacity = "8 MiB"\nsegment = "1 MiB"\n'
    with Daemon(device + CONFIG.format(codec="rot-4-4")) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC, error_limit=ANY)
        stored(client, space, blocks())
        evict(daemon)
        with client.acquire(Group(space, NAMES), tier="device") as lease:
            assert lease.tokens == 16 * len(NAMES)
        with RawClient(daemon.target) as raw:
            tiers = raw.call(raw.admin.Tiers, apb.TiersRequest()).tiers
        assert [tier.pages_quarantined for tier in tiers] == [0, 0, 0]


def test_demotion_goes_on_with_blocks_that_do_not_fit() -> None:
    """If no encoding is within the limit, the background writes the blocks as they are."""
    names, eager = chain(9, 60), "high_watermark = 0.3\nlow_watermark = 0.1\n\n[[nvme]]"
    with (
        Daemon(CONFIG.replace("\n[[nvme]]", eager, 1).format(codec="rot-4-4")) as daemon,
        Client(daemon.target) as client,
    ):
        space = client.open_namespace(SPEC, error_limit=0.001)
        client.put(space, names, blocks(count=60))
        await_true(lambda: stored_bytes(daemon) >= 40 * SPEC.block_bytes, "blocks in the store")


@pytest.mark.parametrize("point", ["mover.store.before_encode", "mover.load.before_decode"])
def test_a_death_while_coding_spoils_nothing(point: str) -> None:
    """After a death before a block is encoded or decoded, the next daemon serves it or misses it."""
    kept = blocks()
    with Daemon(CONFIG.format(codec="rot-8-8"), faults=True) as daemon:
        with Client(daemon.target) as client, daemon.faults() as faults:
            space = client.open_namespace(SPEC, error_limit=ANY)
            if point == "mover.load.before_decode":
                stored(client, space, kept)
                evict(daemon)
            faults.arm(point, "kill")
            with contextlib.suppress(TierdError):
                client.put(space, NAMES, kept, durable=True)
                client.get(space, NAMES)
        assert daemon.await_end() == -9
        daemon.start()
        with Client(daemon.target) as client:
            errors = off(got(client, client.open_namespace(SPEC, error_limit=ANY)), kept)
            assert len(errors) == len(NAMES) and all(error < 1.0 for error in errors)
