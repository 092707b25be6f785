"""tierd as an engine sees it: how much is there, load it into my memory, save it from there.

Purpose: one sequence a call, groups and ranks included, straight between an engine's pieces and the daemon's pages: one copy, checked after it was made.
Non-purpose: threads (courier.py), what an engine does with an answer. Invariants: nothing raises and nothing outlasts its timeout, a failure is a smaller
number; after `load` the blocks that are said to be good hold what was committed under their hashes, of others nothing is known.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierd.client import (
    About,
    BlockStatus,
    Client,
    Found,
    Group,
    Lease,
    NamespaceSpec,
    OpenedNamespace,
    PutGroup,
    Reservation,
)
from tierd.client.values import Hashes
from tierd.errors import TierdError
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.pieces import Pieces, copy_all_in, copy_out

PRESENCE_S = 1.0
"""How often an engine looks whether it is connected; nothing is sent while it is."""
SAVE_BLOCKS = 64
"""Pages reserved at one time: a long sequence must not hold half a tier while it is copied."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """tokens: served and copied, of all groups; good: per group, how many of its blocks, counted from the first one asked for; first: per group, how many
    of these its need passes over, which were not copied; tier_tokens: by the position of the tier where they were found."""

    tokens: int = 0
    good: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    tier_tokens: tuple[int, ...] = ()


class EngineStore:
    """One engine process's store. Threads may share it. Raises ConfigError for an impossible target, else nothing."""

    def __init__(self, options: Options, facts: EngineFacts) -> None:
        name = f"{facts.engine} {facts.role}".strip()
        self._options = options
        self._client = Client(options.target or None, name=name, best_effort=True, timeout_s=options.timeout_s)
        self._client.introduce(facts.words())
        self._turn, self._closing = threading.Lock(), threading.Event()
        self.counts: Counter[str] = Counter()
        """Blocks and bytes loaded and saved, misses, drops: by name, for the engine's metrics."""
        self._presence = threading.Thread(target=self._stay, name="tierd-presence", daemon=True)
        self._presence.start()

    @property
    def client(self) -> Client:
        """For what has no verb here: pages that are written and read in place."""
        return self._client

    @property
    def tiers(self) -> tuple[str, ...]:
        """The daemon's tiers, near to far, as tier_tokens counts them."""
        return self._client.tiers

    @property
    def tells_events(self) -> bool:
        """Whether routers hear of blocks: then even one that is stored already is worth a save, which tells what the engine calls it and copies nothing."""
        return self._client.tells_events

    def introduce(self, facts: EngineFacts) -> None:
        """Says anew whom it serves, where not all was known at the beginning: the next connection, made at once, tells it."""
        self._client.introduce(facts.words())

    def open(self, spec: NamespaceSpec) -> OpenedNamespace:
        """The namespace; without a daemon one that opens itself later. Raises InvalidArgument for an impossible spec."""
        return self._client.open_namespace(spec)

    def lookup(self, groups: Sequence[Group]) -> Found:
        """What could be served now."""
        found = self._client.lookup(groups, timeout_s=self._options.lookup_timeout_s)
        self._count(lookups=1, found_tokens=found.tokens)
        return found

    def prefetch(self, groups: Sequence[Group]) -> int:
        """Begins to bring blocks near; how many are on their way because of this."""
        return self._client.prefetch(groups, timeout_s=self._options.lookup_timeout_s)

    def load(self, groups: Sequence[Group], targets: Sequence[Sequence[Pieces | None]]) -> Loaded:
        """Copies what is servable of each group's blocks. targets: per group and block of it the engine's pieces, None where the block is not wanted.

        A group is of one rank.
        """
        try:
            lease = self._client.acquire(groups)
            if not lease:
                return Loaded(good=(0,) * len(groups))
            copied = _copy_groups(lease, targets)
            loaded = _checked(lease, copied)
            lease.detach()
        except TierdError:  # a restart, a fork: the copy may be of anything
            self._count(failed_loads=1)
            return Loaded(good=(0,) * len(groups))
        self._count(loads=1, loaded_blocks=sum(loaded.good), loaded_bytes=int(lease.handles["length"].sum()))
        return loaded

    def save(self, group: PutGroup, sources: Sequence[Pieces], about: About | None = None) -> int:
        """Stores consecutive blocks; how many are stored now, from the first on. One of a name that exists already counts, and is not copied.

        about: what the engine calls them, and their tokens, for routers.
        """
        stored = 0
        group = group if about is None else replace(group, about=about)
        for start in range(0, len(group.hashes), SAVE_BLOCKS):
            part = slice(start, start + SAVE_BLOCKS)
            saved = _leading(self._save([_part_of(group, start)], sources[part]))
            stored += saved
            if saved < len(group.hashes[part]):
                break
        self._count(saves=1, saved_blocks=stored, dropped_blocks=len(group.hashes) - stored)
        return stored

    def save_each(self, groups: Sequence[PutGroup], sources: Sequence[Pieces]) -> list[bool]:
        """Stores blocks that do not follow each other, one a group, in one call; which of them are stored now. The caller bounds how many."""
        stored: list[bool] = self._save(groups, sources).tolist()
        self._count(saves=1, saved_blocks=sum(stored), dropped_blocks=len(stored) - sum(stored))
        return stored

    def take_counts(self) -> Counter[str]:
        """What was counted since the last time; `counts` begins anew."""
        with self._turn:
            taken, self.counts = self.counts, Counter()
        return +taken

    def close(self) -> None:
        """Ends the session."""
        self._closing.set()
        self._presence.join(PRESENCE_S)
        self._client.close()

    def _stay(self) -> None:
        """Connects, and again whenever the daemon is another one: operators see an engine before its first request. Ends with the store, or its process."""
        while not self._closing.is_set():
            self._client.connect()
            self._closing.wait(PRESENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save(self, groups: Sequence[PutGroup], sources: Sequence[Pieces]) -> NDArray[np.bool_]:
        """Which blocks are stored now."""
        try:
            reservation = self._client.reserve(groups)
            try:
                statuses = self._filled(reservation, groups, sources)
            finally:
                reservation.drop()  # says so and waits for nothing, as an abort would do beside a daemon that hangs
        except TierdError:
            self._count(failed_saves=1)
            return np.zeros(len(sources), dtype=np.bool_)
        return np.isin(statuses, (BlockStatus.READY, BlockStatus.EXISTS))

    def _filled(
        self, reservation: Reservation, groups: Sequence[PutGroup], sources: Sequence[Pieces]
    ) -> NDArray[np.uint16]:
        """What became of each block once its page was written and published."""
        statuses = reservation.statuses.copy()
        given = statuses == BlockStatus.RESERVED
        if given.any():
            layers = [group.namespace.spec.geometry.layers for group in groups for _ in group.hashes]
            blocks = [(sources[i], page, layers[i]) for i, page in enumerate(reservation.buffers()) if page is not None]
            reservation.summed(copy_all_in(*zip(*blocks, strict=True)))
            statuses[given] = reservation.commit(timeout_s=self._options.timeout_s).statuses
        self._count(saved_bytes=int(reservation.handles["length"][given].sum()))
        return statuses

    def _count(self, **amounts: int) -> None:
        with self._turn:
            self.counts.update(amounts)


def _copy_groups(lease: Lease, targets: Sequence[Sequence[Pieces | None]]) -> list[int]:
    """Copies what is wanted; per group, blocks from its first one on."""
    views = iter(lease.views())
    copied = []
    for group, pieces in zip(lease.groups, targets, strict=True):
        for block in range(group.first, group.first + group.count):
            view = next(views)
            wanted = pieces[block]
            if wanted is not None:
                copy_out(view, wanted)
        copied.append(group.first + group.count)
    return copied


def _checked(lease: Lease, copied: Sequence[int]) -> Loaded:
    """What was still there after it had been copied."""
    good = lease.check()
    first = tuple(group.first for group in lease.groups)
    whole = good >= max((group.count for group in lease.groups), default=0)
    if whole:
        return Loaded(lease.tokens, tuple(copied), first, lease.tier_tokens)
    if len(lease.groups) == 1:
        return Loaded(lease.tokens_of(good), (lease.groups[0].first + good,), first, lease.tier_tokens)
    return Loaded(good=(0,) * len(lease.groups))


def _part_of(group: PutGroup, start: int) -> PutGroup:
    """SAVE_BLOCKS of it from `start` on, with the parent and the position that they have there."""
    stop = min(start + SAVE_BLOCKS, len(group.hashes))
    size, total = group.namespace.spec.tokens_per_block, group.tokens
    tokens = None if total is None else min(total - start * size, (stop - start) * size)
    lengths = None if group.lengths is None else list(group.lengths[start:stop])
    parent = group.parent if start == 0 else group.hashes[start - 1].tobytes()
    hashes: Hashes = group.hashes[start:stop]
    about = group.about and group.about.part(start, stop, size=size)
    return PutGroup(group.namespace, hashes, tokens, lengths, group.rank, parent, group.position + start, about)


def _leading(good: NDArray[np.bool_]) -> int:
    return int(np.argmin(good)) if not good.all() else len(good)
