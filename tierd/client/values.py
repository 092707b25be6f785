"""What one asks the client for, and what it answers, apart from holds on memory (lease.py).

Purpose: small immutable values. Non-purpose: messages (requests.py, replies.py). Invariant: arrays in answers are the caller's own.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.block import NamespaceSpec, block_spans, fold_hashes, hash_tokens, whole
from tierd.core.formats.model import COMMIT_BLOCK, HASH_BYTES, ROOT, BlockStatus, Need, StructArray
from tierd.errors import InvalidArgument

Hashes = NDArray[np.uint8]
"""uint8 [blocks, 32], first to last."""
Tokens = Sequence[int] | NDArray[np.integer]
NO_HASHES: Hashes = np.zeros((0, HASH_BYTES), dtype=np.uint8)


@dataclass(eq=False)
class OpenedNamespace:
    """A namespace as the client knows it. id: of rank 0, ranks follow; digest: 32 bytes, begins every chain of hashes.

    With `best_effort` it may be unopened (id 0): then it hashes to nothing, and every call with it is a miss.
    """

    spec: NamespaceSpec
    id: int = 0
    digest: bytes = b""
    epoch: int = 0
    link: int = field(default=0, repr=False)  # number of the connection that it was last opened over
    owner: object = field(default=None, repr=False)  # whose connection that was

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: it is opened again where it comes to be used."""
        return OpenedNamespace, (self.spec, self.id, self.digest, self.epoch)

    @property
    def is_open(self) -> bool:
        """Whether a daemon has given it an id."""
        return self.id != 0

    def hash(self, tokens: Tokens, *, with_tail: bool = False, parent: bytes = ROOT) -> Hashes:
        """The block hashes of a sequence, uint8 [blocks, 32]; a short last block only with_tail."""
        if not self.is_open:
            return NO_HASHES
        size = self.spec.tokens_per_block
        return hash_tokens(tokens, digest=self.digest, tokens_per_block=size, parent=parent, with_tail=with_tail)

    def fold(self, hashes: Sequence[bytes]) -> Hashes:
        """An engine's own block hashes, bound to this namespace."""
        return fold_hashes(hashes, digest=self.digest) if self.is_open else NO_HASHES

    def spans(self, tokens: int) -> list[tuple[int, int]]:
        """(start, stop) in tokens of each block of a sequence, a short last one included."""
        return list(block_spans(tokens, self.spec.tokens_per_block, with_tail=True))

    def block_tokens(self, blocks: int, *, tokens: int | None = None) -> NDArray[np.uint32]:
        """Tokens that each of so many consecutive blocks covers, of `tokens` in all (None: all are full). u4 [blocks]."""
        size, total = self.spec.tokens_per_block, self.tokens_in(blocks, tokens=tokens)
        covered = np.full(blocks, size, dtype=np.uint32)
        if blocks:
            covered[-1] = total - (blocks - 1) * size
        return covered

    def tokens_in(self, blocks: int, *, tokens: int | None = None) -> int:
        """Tokens that so many consecutive blocks cover: `tokens`, or if None as many as fill them. Raises InvalidArgument where they are another number of blocks."""
        size = self.spec.tokens_per_block
        total = (
            blocks * size if tokens is None else whole("tokens", tokens, 1 << 63, remedy="count those of all blocks")
        )
        if -(-total // size) != blocks:
            raise InvalidArgument(
                f"tokens: {total} are {-(-total // size)} blocks of {size}, {blocks} were given; give one each"
            )
        return total

    def covered_in(self, first: int, stop: int, blocks: int, *, tokens: int | None) -> int | None:
        """Tokens that blocks first to stop - 1 of so many cover."""
        size = self.spec.tokens_per_block
        return tokens and max(0, min(self.tokens_in(blocks, tokens=tokens), stop * size) - first * size)

    def block_lengths(self, covered: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Bytes of blocks that cover so many tokens, in proportion to a full one's. u4 [blocks]."""
        size = self.spec.tokens_per_block
        return ((covered.astype(np.int64) * self.spec.block_bytes + size - 1) // size).astype(np.uint32)

    def naming(
        self,
        hashes: Hashes,
        *,
        index: Sequence[int],
        parent: bytes = ROOT,
        position: int = 0,
        tokens: int | None = None,
    ) -> StructArray:
        """COMMIT_BLOCK [n] that names private pages, `index` of a reservation, as consecutive blocks of a sequence.

        parent, position: of the first. tokens: covered by all (None: all blocks are full).
        """
        blocks = np.zeros(len(hashes), dtype=COMMIT_BLOCK)
        whole("position", position, (1 << 32) - len(hashes), remedy="count blocks from the sequence's first")
        if len(index) != len(hashes) or len(parent) != HASH_BYTES:
            raise InvalidArgument(
                f"naming: {len(index)} indices and a parent of {len(parent)} bytes for {len(hashes)} hashes of {HASH_BYTES}; give one index each"
            )
        blocks["hash"], blocks["index"] = hashes, index
        blocks["parent"][:1], blocks["parent"][1:] = np.frombuffer(parent, dtype=np.uint8), hashes[:-1]
        blocks["position"] = position + np.arange(len(hashes))
        blocks["tokens"] = self.block_tokens(len(hashes), tokens=tokens)
        blocks["length"] = self.block_lengths(blocks["tokens"])
        return blocks


@dataclass(frozen=True, slots=True)
class Group:
    """One attention group of a sequence to be found. tokens: covered by all the blocks (None: all are full)."""

    namespace: OpenedNamespace
    hashes: Hashes
    tokens: int | None = None
    ranks: tuple[int, ...] = (0,)
    need: Need = Need.PREFIX
    need_tokens: int = 0

    def part(self, first: int, stop: int) -> Group:
        """Its blocks first to stop - 1, as far as there are any."""
        covered = self.namespace.covered_in(first, stop, len(self.hashes), tokens=self.tokens)
        return replace(self, hashes=self.hashes[first:stop], tokens=covered)


@dataclass(frozen=True, slots=True)
class About:
    """What an engine says of consecutive blocks, for routers (KV events); sent only where the daemon publishes them. hashes: its own, of equal length,
    `per_block` for each block (none: tierd's); parent: its hash of the block before the first; tokens: of all blocks (none: not told)."""

    hashes: Sequence[bytes] = ()
    parent: bytes = b""
    tokens: Tokens = ()
    per_block: int = 1

    def part(self, start: int, stop: int, *, size: int) -> About:
        """Of blocks start to stop, each of so many tokens."""
        first, last = start * self.per_block, stop * self.per_block
        parent = self.hashes[first - 1] if first and self.hashes else self.parent
        return About(self.hashes[first:last], parent, self.tokens[start * size : stop * size], self.per_block)


@dataclass(frozen=True, slots=True)
class PutGroup:
    """Consecutive blocks of one rank to be stored. tokens: covered by all (None: all are full); lengths: bytes of each (None: in
    proportion to their tokens); parent, position: hash of the block before the first, and the first one's number; about: for routers.

    priority: 0 to 100, the least leaves first, one for all or one for each (None: nothing is said, which counts as 35); retention_s: for how long from now on
    (None: for good). Tiers with the eviction policy `priority` go by it; of a block that exists already what is more holds."""

    namespace: OpenedNamespace
    hashes: Hashes
    tokens: int | None = None
    lengths: Sequence[int] | None = None
    rank: int = 0
    parent: bytes = ROOT
    position: int = 0
    about: About | None = None
    priority: int | Sequence[int] | None = None
    retention_s: float | Sequence[float | None] | None = None

    def part(self, first: int, stop: int) -> PutGroup:
        """Its blocks first to stop - 1, as far as there are any."""

        def cut(values: Any) -> Any:
            return values[first:stop] if isinstance(values, Sequence | np.ndarray) else values

        return replace(
            self,
            hashes=self.hashes[first:stop],
            tokens=self.namespace.covered_in(first, stop, len(self.hashes), tokens=self.tokens),
            lengths=cut(self.lengths),
            parent=self.hashes[first - 1].tobytes() if first else self.parent,
            position=self.position + first,
            about=self.about and self.about.part(first, stop, size=self.namespace.spec.tokens_per_block),
            priority=cut(self.priority),
            retention_s=cut(self.retention_s),
        )

    @classmethod
    def private(cls, namespace: OpenedNamespace, count: int) -> PutGroup:
        """So many pages that get their names at commit."""
        count = whole("count", count, PRIVATE_MOST)
        return cls(namespace, np.zeros((count, HASH_BYTES), dtype=np.uint8))


PRIVATE_MOST = 1 << 20
"""Of what no daemon takes in one call."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup says. tokens: servable now. tier_of: per group, int8 [ranks, blocks], position of the nearest tier, -1 a miss.

    tier_tokens: per tier, tokens of the first group's servable part that would come from it.
    """

    tokens: int = 0
    tier_of: tuple[NDArray[np.int8], ...] = ()
    tier_tokens: tuple[int, ...] = ()


SHOWN_RUNS = 8
"""Runs of equal statuses in the text of a result; more are counted."""


def _names_of(statuses: NDArray[np.uint16]) -> str:
    """`128 READY, 1 FAILED`: each run of equal statuses with its length and its name."""
    names = BlockStatus.names()
    runs = [(names.get(code, str(code)).upper(), len(list(run))) for code, run in groupby(statuses.tolist())]
    more = [f"{len(runs) - SHOWN_RUNS} more runs"] if len(runs) > SHOWN_RUNS else []
    return ", ".join([*(f"{count} {name}" for name, count in runs[:SHOWN_RUNS]), *more]) or "no blocks"


_STORED = (BlockStatus.READY, BlockStatus.EXISTS, BlockStatus.PENDING)


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of a put: statuses u2 [n] of BlockStatus. READY and EXISTS: stored. PENDING: put with wait=False."""

    statuses: NDArray[np.uint16]

    @property
    def stored(self) -> int:
        """Blocks that are stored or PENDING, from the first on without a gap."""
        held = np.isin(self.statuses, _STORED)
        return len(held) if np.count_nonzero(held) == len(held) else int(np.argmin(held))

    def __bool__(self) -> bool:
        return self.stored == len(self.statuses)

    def __repr__(self) -> str:
        return f"PutResult({_names_of(self.statuses)})"


class Lost(int):
    """How many blocks of puts with wait=False were not stored. reasons: of each kind of failure how
    many, its name, and what was said last."""

    reasons: tuple[str, ...]

    def __new__(cls, blocks: int = 0, reasons: Iterable[str] = ()) -> Self:
        """As it reads."""
        lost = super().__new__(cls, blocks)
        lost.reasons = tuple(reasons)
        return lost


@dataclass(frozen=True, slots=True)
class GetResult:
    """The servable prefix. tokens, blocks: how much it is. views: one read-only uint8 array a block, each holding its pin; empty where
    the blocks were copied into `out`. tier_tokens: tokens by the position of the tier where they were found."""

    tokens: int = 0
    blocks: int = 0
    views: tuple[NDArray[np.uint8], ...] = field(default=(), repr=False)
    tier_tokens: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.tokens > 0

    def followed_by(self, more: GetResult) -> GetResult:
        """Both as one, of a sequence that was asked for in parts."""
        tier_tokens = tuple(map(sum, zip_longest(self.tier_tokens, more.tier_tokens, fillvalue=0)))
        return GetResult(self.tokens + more.tokens, self.blocks + more.blocks, self.views + more.views, tier_tokens)


class EventKind(enum.IntEnum):
    """What happened to blocks."""

    STORED = 0
    REMOVED = 1
    LOST = 2
    """Events were dropped for a slow watcher: what follows is not gapless."""
    ENDED = 3
    """The namespace's epoch has ended: nothing of it is served any more, whatever is still held. No hashes."""


@dataclass(frozen=True, slots=True)
class Event:
    """Blocks stored in or removed from a tier. hashes: uint8 [n, 32]; reason: why, for people."""

    sequence: int
    kind: EventKind
    tier: int
    namespace: int
    hashes: Hashes
    reason: str

    def __repr__(self) -> str:
        where = f"sequence={self.sequence}, kind={self.kind.name}, tier={self.tier}, namespace={self.namespace}"
        return f"Event({where}, hashes={len(self.hashes)}, reason={self.reason!r})"


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of each committed block: statuses u2 [n] (READY, EXISTS, FAILED), handles HANDLE [n], the lease if one was asked for."""

    statuses: NDArray[np.uint16]
    handles: StructArray
    lease: Any = None  # Lease | None

    def __repr__(self) -> str:
        return f"Committed({_names_of(self.statuses)}, handles={len(self.handles)}, lease={self.lease!r})"
