"""InstantDriver: a whole request against a real core."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tierd.core.core import Core
from tierd.core.formats.model import TierKind, TierSpec
from tierd.core.instant_driver import InstantDriver, Sequence
from tierd.policies.eviction import EVICTION
from tierd.policies.named import NamedPolicies

PAGE_BYTES = 4096
SLOT_BYTES = 2 * PAGE_BYTES


def sequence(name: str, blocks: int, *, tail: int = 0) -> Sequence:
    """Blocks of 16 tokens, then one of `tail` tokens."""
    total = blocks + bool(tail)
    raw = b"".join(hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(total))
    hashes = np.frombuffer(raw, np.uint8).reshape(-1, 32)
    return Sequence(1, hashes, tokens=16 * blocks + tail, tokens_per_block=16, block_bytes=PAGE_BYTES)


def driver(*pages: int, eviction: str = "lru") -> InstantDriver:
    """A host tier of the first number of pages, and an NVMe tier for each further number."""
    tiers = [TierSpec(TierKind.HOST, 0, pages[0] * PAGE_BYTES, pages[0] * PAGE_BYTES, high_watermark=1.0)]
    tiers += [
        TierSpec(TierKind.NVME, 0, count * SLOT_BYTES, count * SLOT_BYTES, slot_overhead_bytes=4096)
        for count in pages[1:]
    ]
    core = Core(tiers, policies=NamedPolicies(), session_share=1.0)
    return InstantDriver(core, tier_count=len(tiers))


@pytest.fixture
def settled():
    """Checks at the end of a test that the driver holds no lease, reservation or transfer."""
    drivers: list[InstantDriver] = []
    yield drivers.append
    for one in drivers:
        one.core.check()
        stats = one.core.stats()
        assert (stats.leases, stats.reservations, stats.transfers) == (0, 0, 0)


def test_the_second_request_finds_what_the_first_one_stored(settled):
    """The first request for a sequence misses; the second hits the whole of it in the host tier."""
    one = driver(8)
    settled(one)
    assert one.request(sequence("a", 4), now=1.0) == [0]
    assert one.request(sequence("a", 4), now=2.0) == [64]


def test_a_short_tail_is_stored_and_found(settled):
    """The last block of a sequence may be short, and counts with its own tokens."""
    one = driver(8)
    settled(one)
    one.request(sequence("a", 2, tail=5), now=1.0)
    assert one.request(sequence("a", 2, tail=5), now=2.0) == [37]


def test_a_longer_sequence_finds_its_prefix(settled):
    """A longer sequence hits its held prefix, and the driver stores the rest."""
    one = driver(16)
    settled(one)
    one.request(sequence("a", 3), now=1.0)
    assert one.request(sequence("a", 5), now=2.0) == [48]
    assert one.request(sequence("a", 5), now=3.0) == [80]


def test_what_is_too_long_keeps_its_head(settled):
    """The core keeps the first blocks of a sequence that has more blocks than the tier has pages."""
    one = driver(4)
    settled(one)
    one.request(sequence("a", 9), now=1.0)
    assert one.request(sequence("a", 9), now=2.0) == [64]


def test_the_least_recently_used_sequence_loses_its_tail(settled):
    """The core makes room for one more block at the end of the oldest chain."""
    one = driver(8)
    settled(one)
    for now, name in enumerate("abab"):
        one.request(sequence(name, 4), now=float(now))
    one.request(sequence("c", 1), now=5.0)
    assert one.core.lookup([sequence("a", 4).group()], 6.0).tokens == 48
    assert one.core.lookup([sequence("b", 4).group()], 6.0).tokens == 64


def test_demoted_blocks_come_back_from_below(settled):
    """Blocks that the host tier evicts for room are NVMe hits, and the driver counts their copies."""
    tiers = [
        TierSpec(TierKind.HOST, 0, 8 * PAGE_BYTES, 8 * PAGE_BYTES, high_watermark=0.6, low_watermark=0.5),
        TierSpec(TierKind.NVME, 0, 64 * SLOT_BYTES, 64 * SLOT_BYTES, slot_overhead_bytes=4096),
    ]
    one = InstantDriver(
        Core(tiers, policies=NamedPolicies(), session_share=1.0),
        tier_count=len(tiers),
    )
    settled(one)
    one.request(sequence("a", 4), now=1.0)
    one.request(sequence("b", 4), now=2.0)
    assert one.copied_bytes == [0, 4 * PAGE_BYTES]
    one.request(sequence("c", 4), now=2.0)
    assert one.request(sequence("a", 4), now=3.0) == [0, 64]
    assert one.copied_bytes[0] == 4 * PAGE_BYTES


@pytest.mark.parametrize("eviction", sorted(EVICTION))
def test_equal_requests_give_equal_answers(eviction, settled):
    """Two drivers that serve the same requests agree on every answer and on every copy."""
    pair = [driver(24, 60, eviction=eviction) for _ in range(2)]
    answers = []
    for one in pair:
        settled(one)
        numbers = [(7 * i * i + 3 * i) % 11 for i in range(60)]
        answers.append([one.request(sequence(str(n), 2 + n % 5), now=float(i)) for i, n in enumerate(numbers)])
    assert answers[0] == answers[1]
    assert pair[0].copied_bytes == pair[1].copied_bytes
