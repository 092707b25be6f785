"""The world of the core's machine: tiers, namespaces, chains of blocks.

Purpose: a world so small that blocks meet again, and so mixed that sizes, domains and sessions
trade memory. Non-purpose: rules and checks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from tierd.core.formats.model import PUT_BLOCK, ROOT, StructArray, TierKind, TierSpec
from tierd.core.plan import GroupQuery, PutQuery

KIB, MIB = 1 << 10, 1 << 20
TOKENS = 16
DOMAINS = (1, 2)
CHAINS = 4
DEPTH = 6
SHARED = 2
"""Number of first blocks that all chains of a namespace share."""


def tier(kind: TierKind, index: int, capacity: int, segment: int, **more: object) -> TierSpec:
    spec = TierSpec(kind, index, capacity, segment, high_watermark=0.7, low_watermark=0.4, quarantine_share=0.3)
    return replace(spec, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class World:
    """Tiers, and lengths of blocks in bytes that fit them."""

    tiers: list[TierSpec]
    lengths: tuple[int, ...]


SMALL = (4 * KIB, 100, 12 * KIB, 4 * KIB, 30_000, 8 * KIB, 64 * KIB)
LARGE = (4 * KIB, 64 * KIB, 300_000, 64 * KIB, 12 * KIB, 1 * MIB, 100, 30_000, 2 * MIB)
WORLDS = {
    "one host": World([tier(TierKind.HOST, 0, 16 * MIB, 2 * MIB, writer_owned=True)], LARGE),
    "one page size": World(
        [
            tier(TierKind.HOST, 0, 96 * KIB, 16 * KIB, writer_owned=True),
            tier(TierKind.NVME, 0, 256 * KIB, 32 * KIB, slot_overhead_bytes=4096),
        ],
        (4 * KIB,),
    ),
    "small pages": World(
        [
            tier(TierKind.HOST, 0, 512 * KIB, 64 * KIB, writer_owned=True),
            tier(TierKind.NVME, 0, 1 * MIB, 128 * KIB, slot_overhead_bytes=4096, eviction="lfu"),
        ],
        SMALL,
    ),
    "words and wear": World(
        [
            tier(TierKind.HOST, 0, 96 * KIB, 16 * KIB, writer_owned=True, eviction="priority"),
            tier(
                TierKind.NVME,
                0,
                256 * KIB,
                32 * KIB,
                slot_overhead_bytes=4096,
                eviction="priority",
                admission="second-touch",
                wear_bytes_per_s=400.0,
                wear_burst_s=60.0,
            ),
        ],
        (4 * KIB, 100),
    ),
    "sealed hosts": World(
        [
            tier(TierKind.HOST, 0, 512 * KIB, 64 * KIB, writer_owned=True, sealed_puts=True),
            tier(TierKind.HOST, 1, 512 * KIB, 64 * KIB, writer_owned=True),
            tier(TierKind.NVME, 0, 1 * MIB, 128 * KIB, slot_overhead_bytes=4096),
        ],
        SMALL,
    ),
    "one sealed host": World(
        [tier(TierKind.HOST, 0, 192 * KIB, 16 * KIB, writer_owned=True, sealed_puts=True)], (4 * KIB, 100)
    ),
    "two hosts": World(
        [
            tier(TierKind.HOST, 0, 8 * MIB, 2 * MIB, writer_owned=True),
            tier(TierKind.HOST, 1, 10 * MIB, 2 * MIB, writer_owned=True, eviction="lfu"),
            tier(TierKind.NVME, 0, 18 * MIB, 3 * MIB, slot_overhead_bytes=4096),
        ],
        LARGE,
    ),
    "all kinds": World(
        [
            tier(TierKind.DEVICE, 0, 384 * KIB, 64 * KIB, writer_owned=True),
            tier(TierKind.HOST, 0, 512 * KIB, 64 * KIB, writer_owned=True),
            tier(TierKind.NVME, 0, 768 * KIB, 96 * KIB, slot_overhead_bytes=4096),
            tier(TierKind.NVME, 1, 1 * MIB, 128 * KIB, slot_overhead_bytes=4096, eviction="lfu"),
        ],
        SMALL,
    ),
    "levels": World(
        [
            tier(TierKind.HOST, 0, 96 * KIB, 16 * KIB, writer_owned=True),
            tier(TierKind.NVME, 0, 128 * KIB, 32 * KIB, slot_overhead_bytes=4096, level=0),
            tier(TierKind.NVME, 1, 256 * KIB, 32 * KIB, slot_overhead_bytes=4096),
            tier(TierKind.NVME, 2, 256 * KIB, 32 * KIB, slot_overhead_bytes=4096, level=2, eviction="lfu"),
        ],
        (4 * KIB, 100),
    ),
    "device and levels": World(
        [
            tier(TierKind.DEVICE, 0, 64 * KIB, 16 * KIB, writer_owned=True),
            tier(TierKind.HOST, 0, 96 * KIB, 16 * KIB, writer_owned=True),
            tier(TierKind.NVME, 0, 128 * KIB, 32 * KIB, slot_overhead_bytes=4096, level=0),
            tier(TierKind.NVME, 1, 128 * KIB, 32 * KIB, slot_overhead_bytes=4096, level=0),
            tier(TierKind.NVME, 2, 256 * KIB, 32 * KIB, slot_overhead_bytes=4096),
        ],
        (4 * KIB, 100),
    ),
}


@dataclass(frozen=True)
class Chain:
    """Blocks of one sequence, with lengths in bytes; the last block of an odd chain is short."""

    namespace: int
    hashes: tuple[bytes, ...]
    lengths: tuple[int, ...]
    tokens: int

    def raw(self) -> np.ndarray:
        """uint8 [blocks, 32]."""
        return np.frombuffer(b"".join(self.hashes), np.uint8).reshape(-1, 32)

    def group(self) -> GroupQuery:
        return GroupQuery(namespaces=(self.namespace,), hashes=self.raw(), tokens_per_block=TOKENS, tokens=self.tokens)

    def block_tokens(self, number: int) -> int:
        return min(TOKENS, self.tokens - number * TOKENS)

    def parent(self, number: int) -> bytes:
        return self.hashes[number - 1] if number else ROOT

    def of_rank(self, namespace: int) -> Chain:
        """The same blocks in the namespace of another rank."""
        return replace(self, namespace=namespace)

    def put(self, first: int, stop: int, *, private: bool) -> PutQuery:
        blocks: StructArray = np.zeros(stop - first, PUT_BLOCK)
        for row, number in zip(blocks, range(first, stop), strict=True):
            row["tokens"], row["length"] = self.block_tokens(number), self.lengths[number]
            if not private:
                row["hash"] = np.frombuffer(self.hashes[number], np.uint8)
        return PutQuery(namespace=self.namespace, parent=self.parent(first), position=first, blocks=blocks)


def chain(world: World, namespace: int, number: int) -> Chain:
    """Chain 0 to CHAINS - 1 of a namespace; the same each time."""
    hashes, parent = [], ROOT
    for position in range(DEPTH):
        branch = 0 if position < SHARED else number
        parent = hashlib.sha256(parent + bytes([namespace % 256, namespace // 256, position, branch])).digest()
        hashes.append(parent)
    lengths = tuple(world.lengths[(3 * namespace + h[0] % 4) % len(world.lengths)] for h in hashes)
    tokens = DEPTH * TOKENS - (5 if number % 2 else 0)
    return Chain(namespace, tuple(hashes), lengths, tokens)
