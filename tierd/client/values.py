"""Arguments and results of the client, apart from holds on memory (lease.py).

They are small values. Messages are in requests.py and replies.py. The caller owns returned arrays.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierd.advisor.pace import Pace
from tierd.core.formats.block import NamespaceSpec, block_spans, fold_hashes, hash_tokens, whole
from tierd.core.formats.model import COMMIT_BLOCK, HASH_BYTES, ROOT, BlockStatus, Need, StructArray
from tierd.errors import InvalidArgument

Hashes = NDArray[np.uint8]
"""uint8 [blocks, 32], first to last."""
Tokens = Sequence[int] | NDArray[np.integer]
NO_HASHES: Hashes = np.zeros((0, HASH_BYTES), dtype=np.uint8)


@dataclass(eq=False)
class OpenedNamespace:
    """A namespace as the client knows it.

    With `best_effort` it may be unopened (id 0). It hashes to nothing then, and calls with it miss.

    id: of rank 0, the other ranks follow. digest: 32 bytes that begin every chain of hashes.
    error_limit: of a value; gets with this namespace miss blocks with a greater error.
    """

    spec: NamespaceSpec
    id: int = 0
    digest: bytes = b""
    epoch: int = 0
    error_limit: float = 0.0
    link: int = field(default=0, repr=False)  # number of the connection over which it was last opened
    owner: object = field(default=None, repr=False)  # the client of that connection

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: the copy is opened again on first use."""
        return OpenedNamespace, (self.spec, self.id, self.digest, self.epoch, self.error_limit)

    @property
    def is_open(self) -> bool:
        """Whether a daemon has assigned an id."""
        return self.id != 0

    def hash(self, tokens: Tokens, *, with_tail: bool = False, parent: bytes = ROOT) -> Hashes:
        """The block hashes of a sequence, uint8 [blocks, 32]. with_tail: a short last block too."""
        if not self.is_open:
            return NO_HASHES
        size = self.spec.tokens_per_block
        return hash_tokens(tokens, digest=self.digest, tokens_per_block=size, parent=parent, with_tail=with_tail)

    def fold(self, hashes: Sequence[bytes]) -> Hashes:
        """Folds an engine's own block hashes into this namespace."""
        return fold_hashes(hashes, digest=self.digest) if self.is_open else NO_HASHES

    def spans(self, tokens: int) -> list[tuple[int, int]]:
        """(start, stop) in tokens of each block of a sequence, a short last one included."""
        return list(block_spans(tokens, self.spec.tokens_per_block, with_tail=True))

    def block_tokens(self, blocks: int, *, tokens: int | None = None) -> NDArray[np.uint32]:
        """Tokens of each of `blocks` consecutive blocks, u4. tokens: of all; None: all are full."""
        size, total = self.spec.tokens_per_block, self.tokens_in(blocks, tokens=tokens)
        covered = np.full(blocks, size, dtype=np.uint32)
        if blocks:
            covered[-1] = total - (blocks - 1) * size
        return covered

    def tokens_in(self, blocks: int, *, tokens: int | None = None) -> int:
        """Tokens of `blocks` blocks: `tokens`, or None: all are full. Raises InvalidArgument if
        `tokens` make another number of blocks."""
        size = self.spec.tokens_per_block
        total = (
            blocks * size
            if tokens is None
            else whole("tokens", tokens, 1 << 63, remedy="count the tokens of all blocks")
        )
        if -(-total // size) != blocks:
            raise InvalidArgument(
                f"tokens: {total} need {-(-total // size)} blocks of {size}, {blocks} were given; give one each"
            )
        return total

    def covered_in(self, first: int, stop: int, blocks: int, *, tokens: int | None) -> int | None:
        """Tokens that blocks first to stop - 1 of `blocks` cover."""
        size = self.spec.tokens_per_block
        return tokens and max(0, min(self.tokens_in(blocks, tokens=tokens), stop * size) - first * size)

    def block_lengths(self, covered: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Bytes of blocks, u4 [blocks], in proportion to the tokens that each covers."""
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
        """Names private pages of a reservation as consecutive blocks of a sequence.

        Args:
            hashes: One for each page.
            index: Positions of the pages in the reservation.
            parent, position: Hash of the block before the first; number of the first block.
            tokens: Tokens that all blocks cover. None: all blocks are full.

        Returns:
            COMMIT_BLOCK [n].
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
    """One attention group of a sequence to be found. tokens: of all blocks (None: all are full).
    error_limit: blocks with a greater error miss (None: the namespace's limit; 0.0: exact alone).
    request: your id of the request, by which `tierctl explain` finds it."""

    namespace: OpenedNamespace
    hashes: Hashes
    tokens: int | None = None
    ranks: tuple[int, ...] = (0,)
    need: Need = Need.PREFIX
    need_tokens: int = 0
    error_limit: float | None = None
    request: str = ""

    def part(self, first: int, stop: int) -> Group:
        """Its blocks first to stop - 1, as far as they exist."""
        covered = self.namespace.covered_in(first, stop, len(self.hashes), tokens=self.tokens)
        return replace(self, hashes=self.hashes[first:stop], tokens=covered)


@dataclass(frozen=True, slots=True)
class About:
    """An engine's own names of consecutive blocks, sent only if the daemon publishes KV events.

    Attributes:
        hashes: The engine's, of one length, `per_block` for each block. Empty: use tierd's.
        parent: The engine's hash of the block before the first.
        tokens: Tokens of all blocks. Empty: not reported.
    """

    hashes: Sequence[bytes] = ()
    parent: bytes = b""
    tokens: Tokens = ()
    per_block: int = 1

    def part(self, start: int, stop: int, *, size: int) -> About:
        """The part for blocks start to stop - 1 of `size` tokens each."""
        first, last = start * self.per_block, stop * self.per_block
        parent = self.hashes[first - 1] if first and self.hashes else self.parent
        return About(self.hashes[first:last], parent, self.tokens[start * size : stop * size], self.per_block)


@dataclass(frozen=True, slots=True)
class PutGroup:
    """Consecutive blocks of one rank to be stored.

    Attributes:
        tokens: Tokens that all blocks cover. None: all blocks are full.
        lengths: Bytes of each block. None: in proportion to its tokens.
        parent, position: Hash of the block before the first; number of the first block.
        about: Names for routers.
        priority: 0 to 100, for all blocks or one for each; the lowest is evicted first. None is the
            default, 35. Only tiers with the eviction policy `priority` use it. If two puts of a
            block differ, the higher priority holds, and between equal ones the later end.
        retention_s: How long the priority holds from now on. None: always.
    """

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
        """Its blocks first to stop - 1, as far as they exist."""

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
        """A group of `count` pages that are named at commit."""
        count = whole("count", count, PRIVATE_MOST)
        return cls(namespace, np.zeros((count, HASH_BYTES), dtype=np.uint8))


PRIVATE_MOST = 1 << 20
"""Above any number of pages that a daemon accepts in one call."""


class Prefetch(int):
    """How many blocks a prefetch began to bring. `Client.cancel` takes it.

    Attributes:
        numbers: Of the daemon's prefetches.
    """

    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, blocks: int, numbers: Iterable[int]) -> Prefetch:
        """A prefetch with these numbers; 0 is none."""
        made = cls(blocks)
        made.numbers = tuple(filter(None, numbers))
        return made


NO_PREFETCH = Prefetch()


@dataclass(frozen=True, slots=True)
class Target:
    """The tier of a prefetch, and the time until its use.

    Attributes:
        tier: Name of the tier.
        ttl_s: Blocks that no get uses within this time count as wasted. None: a minute.
    """

    tier: str = "host"
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a lookup.

    Attributes:
        tokens: Servable now.
        tier_of: Per group, int8 [ranks, blocks]: position of the nearest tier; -1 is a miss.
        tier_tokens: Per tier, tokens of the first group's servable part that would come from it.
        paces: Per tier, how long a read from it would take now; None for memory.
        prefetch: The prefetch that the lookup began, for `Client.cancel`. It counts no blocks.
    """

    tokens: int = 0
    tier_of: tuple[NDArray[np.int8], ...] = ()
    tier_tokens: tuple[int, ...] = ()
    paces: tuple[Pace | None, ...] = ()
    prefetch: Prefetch = NO_PREFETCH


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
    """The result of a put. statuses: u2 [n] of BlockStatus; PENDING comes from wait=False."""

    statuses: NDArray[np.uint16]

    @property
    def stored(self) -> int:
        """Number of blocks stored or PENDING, counted from the first one to the first gap."""
        held = np.isin(self.statuses, _STORED)
        return len(held) if np.count_nonzero(held) == len(held) else int(np.argmin(held))

    def __bool__(self) -> bool:
        return self.stored == len(self.statuses)

    def __repr__(self) -> str:
        return f"PutResult({_names_of(self.statuses)})"


class Lost(int):
    """How many blocks of puts with wait=False were not stored. Each entry of `reasons` has a kind of
    failure: the number of blocks, its name, and its last message."""

    reasons: tuple[str, ...]

    def __new__(cls, blocks: int = 0, reasons: Iterable[str] = ()) -> Self:
        """Makes the number, with its reasons."""
        lost = super().__new__(cls, blocks)
        lost.reasons = tuple(reasons)
        return lost


@dataclass(frozen=True, slots=True)
class GetResult:
    """The longest cached prefix: its length in tokens and blocks.

    Attributes:
        views: One read-only uint8 array a block, which pins its page. Empty if `out` was given.
        tier_tokens: Tokens found in each tier, by position of the tier.
    """

    tokens: int = 0
    blocks: int = 0
    views: tuple[NDArray[np.uint8], ...] = field(default=(), repr=False)
    tier_tokens: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.tokens > 0

    def followed_by(self, more: GetResult) -> GetResult:
        """Joins the results of two parts of one sequence."""
        tier_tokens = tuple(map(sum, zip_longest(self.tier_tokens, more.tier_tokens, fillvalue=0)))
        return GetResult(self.tokens + more.tokens, self.blocks + more.blocks, self.views + more.views, tier_tokens)


class EventKind(enum.IntEnum):
    """The kind of an event."""

    STORED = 0
    REMOVED = 1
    LOST = 2
    """The daemon dropped events because the watcher was slow. The sequence has a gap."""
    ENDED = 3
    """The namespace's epoch has ended: none of its blocks is served any more. No hashes."""


@dataclass(frozen=True, slots=True)
class Event:
    """Blocks stored in or removed from a tier. hashes: uint8 [n, 32]; reason: for people."""

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
    """The result of a commit. statuses: u2 [n]: READY, EXISTS or FAILED. handles: HANDLE [n]."""

    statuses: NDArray[np.uint16]
    handles: StructArray
    lease: Any = None  # Lease | None

    def __repr__(self) -> str:
        return f"Committed({_names_of(self.statuses)}, handles={len(self.handles)}, lease={self.lease!r})"
