"""The router view: events that routers have received, and those to send next.

The module is pure: changes go in, events come out. It keeps an engine's names for blocks while
routers know the blocks under them. It treats several tiers of one medium as one. A block counts as
held only if every rank holds its part. The format is in payloads.py, the timing in feed.py. A block
is removed under the name under which it was stored, before that name is dropped. The view has at
most `limit` blocks. Partial blocks are not reported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tierd.core.formats.model import HASH_BYTES
from tierd.events.payloads import Cleared, Event, Hash, Removed, Stored, short_hash

EVENT_TOKENS = 16_384
"""Approximate maximum of tokens and hashes in one event; more blocks make several events."""


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace as routers see it. id: of rank 0; size: tokens per block; adapter, group: vLLM's."""

    id: int
    size: int
    ranks: int = 1
    adapter: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """An engine's names of consecutive blocks.

    hashes: tierd's, 32 bytes each. names: the engine's, `per_block` of `width` bytes each.
    parent: of the block before the first; empty: none.
    tokens: u4 of all blocks, `covered` in number; empty: unknown. Empty names: use tierd's hashes.
    """

    space: Space
    hashes: bytes
    covered: int
    names: bytes = b""
    width: int = HASH_BYTES
    per_block: int = 1
    parent: bytes = b""
    tokens: bytes = b""


@dataclass(slots=True)
class Block:
    """names: the engine's; none: do not report it. held: a bit for each rank and tier, rank-major."""

    names: tuple[bytes, ...]
    parent: bytes = b""
    tokens: bytes = b""
    held: int = 0


Key = tuple[Space, bytes]


@dataclass
class RouterView:
    """The router view of one publisher. media: by tier. has_whole_hashes: else their last 8 bytes."""

    media: Sequence[str]
    limit: int
    has_whole_hashes: bool = False
    _blocks: OrderedDict[Key, Block] = field(default_factory=OrderedDict)
    _masks: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Computes the tiers of each medium, as bits."""
        self._masks = {m: sum(1 << tier for tier, of in enumerate(self.media) if of == m) for m in self.media}

    def __len__(self) -> int:
        return len(self._blocks)

    def name(self, names: Names) -> list[Event]:
        """Sets an engine's names for blocks, before or after they are stored. Empty: no change."""
        events: list[Event] = []
        is_said = bool(names.names or names.tokens)
        for key, fresh in _cut(names):
            known = self._blocks.get(key)
            if known is None or (
                is_said and (known.names, known.parent, known.tokens) != (fresh.names, fresh.parent, fresh.tokens)
            ):
                events += self._rename(key, known, fresh)
        return joined(events)

    def stored(self, space: Space, hashes: bytes, *, tier: int, rank: int = 0) -> list[Event]:
        """Blocks are now held in a tier."""
        return joined(self._set(space, hashes, bit=self._bit(tier, rank), is_held=True))

    def removed(self, space: Space, hashes: bytes, *, tier: int, rank: int = 0) -> list[Event]:
        """Blocks are no longer in a tier."""
        return joined(self._set(space, hashes, bit=self._bit(tier, rank), is_held=False))

    def clear(self) -> list[Event]:
        """Removes all blocks from routers at once; names are kept."""
        for block in self._blocks.values():
            block.held = 0
        return [Cleared()]

    def _set(self, space: Space, hashes: bytes, *, bit: int, is_held: bool) -> list[Event]:
        events: list[Event] = []
        for start in range(0, len(hashes), HASH_BYTES):
            key = space, hashes[start : start + HASH_BYTES]
            block = self._blocks.get(key)
            if block is None and is_held:
                block = self._blocks[key] = Block((key[1],))
                events += self._fit()
            if block is not None:
                held = block.held | bit if is_held else block.held & ~bit
                events += self._turn(key, block, held)
                self._blocks.move_to_end(key, last=bool(held))  # blocks that no tier holds are dropped first
        return events

    def _rename(self, key: Key, known: Block | None, fresh: Block) -> list[Event]:
        """Renames a block, or adds tokens: removes it and stores it again."""
        held = known.held if known else 0
        events = self._turn(key, known, 0) if known else []
        self._blocks[key] = fresh
        self._blocks.move_to_end(key)
        return [*events, *self._turn(key, fresh, held), *self._fit()]

    def _turn(self, key: Key, block: Block, held: int) -> list[Event]:
        """Updates where the block is held; the events for each medium that changes."""
        space, before = key[0], block.held
        block.held = held
        events: list[Event] = []
        for medium, mask in self._masks.items() if block.names else ():
            was, now = self._whole(before, mask, space), self._whole(held, mask, space)
            if now and not was:
                events.append(self._store(space, block, medium))
            elif was and not now:
                events.append(Removed(self._all_hashes(block), medium, space.group))
        return events

    def _whole(self, held: int, mask: int, space: Space) -> bool:
        """Whether every rank has its part in one of the mask's tiers."""
        return all(held >> rank * len(self.media) & mask for rank in range(space.ranks))

    def _store(self, space: Space, block: Block, medium: str) -> Stored:
        tokens = tuple(np.frombuffer(block.tokens, dtype="<u4").tolist())
        size = space.size // len(block.names) if tokens else 0
        parent = self._hash(block.parent) if block.parent else None
        return Stored(self._all_hashes(block), parent, tokens, size, medium, space.adapter, space.group)

    def _fit(self) -> list[Event]:
        events: list[Event] = []
        while len(self._blocks) > self.limit:
            key, block = next(iter(self._blocks.items()))
            events += self._turn(key, block, 0)
            del self._blocks[key]
        return events

    def _bit(self, tier: int, rank: int) -> int:
        return 1 << rank * len(self.media) + tier

    def _all_hashes(self, block: Block) -> tuple[Hash, ...]:
        return tuple(self._hash(name) for name in block.names)

    def _hash(self, name: bytes) -> Hash:
        return name if self.has_whole_hashes else short_hash(name)


def joined(events: Iterable[Event]) -> list[Event]:
    """Merges adjacent events that continue a sequence, or a removal, into events of bounded size."""
    runs: list[list[Event]] = []
    weight = 0
    for event in events:
        added = 0 if isinstance(event, Cleared) else len(event.hashes) + len(getattr(event, "tokens", ()))
        if runs and weight + added <= EVENT_TOKENS and _follows(runs[-1][-1], event):
            runs[-1].append(event)
            weight += added
        else:
            runs.append([event])
            weight = added
    return [_merged(run) for run in runs]


def _follows(last: Event, event: Event) -> bool:
    """Whether an event continues the last one."""
    if isinstance(last, Removed) and isinstance(event, Removed):
        return (last.medium, last.group) == (event.medium, event.group)
    if not isinstance(last, Stored) or not isinstance(event, Stored):
        return False
    is_next = event.parent == last.hashes[-1] or (event.parent is None and not event.tokens)
    return is_next and _kind(last) == _kind(event)


def _kind(event: Stored) -> tuple[object, ...]:
    return bool(event.tokens), event.block_size, event.medium, event.adapter, event.group


def _merged(run: Sequence[Event]) -> Event:
    first = run[0]
    if len(run) == 1 or isinstance(first, Cleared):
        return first
    hashes = tuple(one for event in run if not isinstance(event, Cleared) for one in event.hashes)
    if isinstance(first, Removed):
        return replace(first, hashes=hashes)
    return replace(
        first, hashes=hashes, tokens=tuple(t for event in run if isinstance(event, Stored) for t in event.tokens)
    )


def _cut(names: Names) -> Iterator[tuple[Key, Block]]:
    """Yields each block with its key. Partial blocks get no name: routers count whole blocks."""
    space, step, parent = names.space, names.width * names.per_block, names.parent
    for i in range(len(names.hashes) // HASH_BYTES):
        own = names.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
        said = names.names[i * step : (i + 1) * step]
        called = tuple(said[k : k + names.width] for k in range(0, step, names.width)) if said else (own,)
        is_whole = (i + 1) * space.size <= names.covered
        tokens = names.tokens[4 * i * space.size : 4 * (i + 1) * space.size]
        yield (space, own), Block(called, parent, tokens) if is_whole else Block(())
        parent = called[-1]
