"""One flipped bit of a block, then a get: a counted miss if the threat table says so.

`FLIP_SEED=` selects other blocks and bits.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.depth import count, report
from tests.system.blocks import BlockClient, WrongBytes, await_true, connected
from tests.system.damaged import PAGE_BYTES, Place, flip, pages, slots
from tests.system.raw import BLOCK_BYTES
from tests.system.test_restart import wipe_arena
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import Client, NamespaceSpec, PutGroup
from tierd.core.formats.meta import META_BYTES
from tierd.testing import chain, content_of, is_content

SEED = int(os.environ.get("FLIP_SEED", "1"))
ROUND = count(test=50, nightly=500, weekly=500)
"""Blocks that are stored, damaged and read at one time."""
CONFIG = """\
[server]
shutdown_deadline = "2 s"
[scrub]
period = "0 s"
[[host]]
capacity = "16 MiB"
segment = "2 MiB"
verify = "{verify}"
[[nvme]]
capacity = "32 MiB"
segment = "4 MiB"
fault_limit = 0
"""
DEVICE = """\
[[device]]
capacity = "16 MiB"
segment = "2 MiB"
"""
"""A device tier of kind "cpu"."""
SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=BLOCK_BYTES)
HEADER_BITS = (META_BYTES + 8) * 8
"""Bits of a slot's header that a checksum covers, with the one slice of such a block."""


def _rounds(total: int) -> range:
    return range(SEED * 1000, SEED * 1000 + -(-total // ROUND))


class Reader:
    """Reads blocks one by one, by a raw client or the SDK. read, missed and wrong are counts."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.read = self.missed = self.wrong = 0

    def all(self, names: np.ndarray) -> None:
        """Reads each of these blocks."""
        with connected(self._daemon) as raw, Client(self._daemon.target) as sdk:
            namespace, opened = raw.open_namespace(), sdk.open_namespace(SPEC)
            for i in range(len(names)):
                name = names[i : i + 1]
                served = self._raw(raw, namespace, name) if i % 4 else self._sdk(sdk, opened, name)
                self.read += 1
                self.missed += not served
            assert raw.status().state == "serving"

    def _raw(self, client: BlockClient, namespace: int, name: np.ndarray) -> int:
        try:
            return client.read(namespace, name)
        except WrongBytes:
            self.wrong += 1
            return 1

    def _sdk(self, client: Client, namespace: object, name: np.ndarray) -> int:
        views = client.get(namespace, name).views  # type: ignore[arg-type]
        self.wrong += sum(not is_content(np.ascontiguousarray(view), name[0]) for view in views)
        return len(views)


def _store(daemon: Daemon, seed: int, *, durable: bool) -> np.ndarray:
    """Stores a round of new blocks."""
    names = chain(seed, ROUND)
    with connected(daemon) as client:
        namespace = client.open_namespace()
        for part in np.array_split(names, -(-ROUND // 100)):
            await_true(lambda part=part: client.put(namespace, part, durable=durable) == len(part), "room for a round")
    return names


def _damage(found: dict[bytes, Place], names: np.ndarray, place_of: Callable[[random.Random], int]) -> None:
    chance = random.Random(names[0].tobytes())
    for name in names:
        bit = place_of(chance)
        flip(found[name.tobytes()], bit // 8, bit % 8)


def _corrupt(daemon: Daemon) -> int:
    with connected(daemon) as client:
        counters = client.status().counters
        return sum(value for name, value in counters.items() if name.startswith("tierd_corrupt_total"))


def _in_header(chance: random.Random) -> int:
    return chance.randrange(HEADER_BITS)


def _in_slot_payload(chance: random.Random) -> int:
    return PAGE_BYTES * 8 + chance.randrange(BLOCK_BYTES * 8)


def _in_page(chance: random.Random) -> int:
    return chance.randrange(BLOCK_BYTES * 8)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("where", [_in_header, _in_slot_payload], ids=["header", "payload"])
def test_store(where: Callable[[random.Random], int]) -> None:
    """A flipped bit in a slot's header or payload makes only that block a miss, counted."""
    total = count(test=50, nightly=6_000, weekly=12_000)
    with Daemon(CONFIG.replace("{verify}", "first_hit")) as daemon:
        reader = Reader(daemon)
        for seed in _rounds(total):
            before, names = _corrupt(daemon), _store(daemon, seed, durable=True)
            with connected(daemon) as client:
                client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
            _damage(slots(daemon), names[: ROUND // 2], where)
            reader.all(names)
            assert (reader.missed, reader.wrong) == (reader.read // ROUND * (ROUND // 2), 0)
            assert _corrupt(daemon) - before == ROUND // 2
            with connected(daemon) as client:
                client.call(client.admin.Evict, apb.EvictRequest())
    report("flips through get", where=f"slot {where.__name__}", flips=reader.missed, missed=reader.missed, wrong=0)


@pytest.mark.timeout(3600)
def test_page_between_two_lives() -> None:
    """A page bit flipped while the daemon is down makes the first hit a counted miss in every setting."""
    total, missed = count(test=50, nightly=6_000, weekly=12_000), 0
    with Daemon(CONFIG.replace("{verify}", "first_hit")) as daemon:
        for seed in _rounds(total):
            names = _store(daemon, seed, durable=False)
            daemon.kill()
            _damage(pages(daemon, names), names, _in_page)
            daemon.start()
            reader = Reader(daemon)
            reader.all(names)
            assert (reader.missed, reader.wrong, _corrupt(daemon)) == (ROUND, 0, ROUND)
            missed += reader.missed
            daemon.kill()
            wipe_arena(daemon)
            daemon.start()
    report("flips through get", where="page before its first hit", flips=missed, missed=missed, wrong=0)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "verify", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("first_hit", "sampled")), "always"]
)
def test_verified_page(verify: str) -> None:
    """Of pages flipped after their first hit, "always" misses all, "sampled" 1 in 256, "first_hit" none."""
    total = count(test=50, nightly=12_000 if verify == "always" else 3_000, weekly=24_000)
    with Daemon(CONFIG.replace("{verify}", verify)) as daemon:
        reader = Reader(daemon)
        for seed in _rounds(total):
            names = _store(daemon, seed, durable=False)
            with connected(daemon) as client:  # the pages' first hits
                assert client.read(client.open_namespace(), names) == ROUND
            _damage(pages(daemon, names), names, _in_page)
            reader.all(names)
            with connected(daemon) as client:
                client.call(client.admin.Evict, apb.EvictRequest())
        assert _corrupt(daemon) == reader.missed
        assert reader.missed + reader.wrong == reader.read
    expected = {"first_hit": 0.0, "sampled": reader.read / 256, "always": float(reader.read)}[verify]
    assert abs(reader.missed - expected) <= (6 * expected**0.5 + 1 if verify == "sampled" else 0)
    report(
        "flips through get",
        where=f"page after its first hit, {verify}",
        flips=reader.read,
        missed=reader.missed,
        wrong=reader.wrong,
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verify", ["first_hit", "always"])
def test_device_page(verify: str) -> None:
    """A flipped device page is a counted miss before its first hit, with "always" also later; others hit."""
    total, missed = count(test=50, nightly=2_000, weekly=6_000), 0
    config = DEVICE + CONFIG.replace("{verify}", verify)
    with Daemon(config) as daemon, Client(daemon.target) as writer, Client(daemon.target) as reader:
        for seed in _rounds(total):
            names, bad = chain(seed, ROUND), ROUND // 2
            space = writer.open_namespace(SPEC)
            with writer.reserve(PutGroup(space, names), tier="device") as pages_of:
                for name, page in zip(names, pages_of.buffers(), strict=True):
                    page[:] = content_of(name, BLOCK_BYTES)
                pages_of.commit()
            if verify == "always":
                assert _on_device(reader, names) == ROUND
            _damage(pages(daemon, names), names[:bad], _in_page)
            assert [_on_device(reader, names[i : i + 1]) for i in range(ROUND)] == [0] * bad + [1] * (ROUND - bad)
            missed += bad
            with connected(daemon) as client:
                client.call(client.admin.Evict, apb.EvictRequest())
        assert _corrupt(daemon) == missed
    report("flips through get", where=f"page of a device, {verify}", flips=missed, missed=missed, wrong=0)


def _on_device(client: Client, names: np.ndarray) -> int:
    """The number of blocks leased in the device tier, each checked."""
    with client.acquire(client.open_namespace(SPEC), names, tier="device") as lease:
        assert all(
            is_content(np.ascontiguousarray(view), name) for view, name in zip(lease.views(), names, strict=False)
        )
        return len(lease)
