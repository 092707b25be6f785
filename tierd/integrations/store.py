"""tierd as an engine sees it: look up how much is stored, load it, save it.

A call handles one sequence with its groups and ranks. It copies once between an engine's pieces and
the daemon's pages, then checks the copy. No call raises or outlasts its timeout; a failure is a
smaller number. After `load`, blocks reported good hold the bytes committed under their hashes. The
content of other blocks is unknown. In a namespace with a codec, blocks are encoded before they are
saved, and good blocks hold their decoded form.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

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
from tierd.client.advice import EngineAdvice
from tierd.client.values import Hashes
from tierd.core.formats.model import Need
from tierd.errors import TierdError, Unavailable
from tierd.integrations.coding import Codings, Engine, Source
from tierd.integrations.facts import EngineFacts
from tierd.integrations.loading import Loaded, decoded, fill, loaded_of
from tierd.integrations.options import Options
from tierd.integrations.pieces import Pieces, are_whole_slices, copy_all_in, piece_bytes

PRESENCE_S = 1.0
"""Seconds between checks of the connection; a check sends nothing while it is up."""
SAVE_BLOCKS = 64
"""Pages reserved at a time: a long sequence must not hold half a tier while it is copied."""


class EngineStore:
    """One engine process's store. Threads may share it. Raises only ConfigError, for an impossible target."""

    def __init__(self, options: Options, facts: EngineFacts) -> None:
        name = f"{facts.engine} {facts.role}".strip()
        self._options, self.codings = options, Codings(options)
        self._client = Client(options.target or None, name=name, best_effort=True, timeout_s=options.timeout_s)
        self._client.introduce(facts.words())
        self._turn, self._closing = threading.Lock(), threading.Event()
        self.advice = EngineAdvice(is_on=options.advisor)
        self.counts: Counter[str] = Counter()
        """Blocks and bytes loaded and saved, misses, drops: by name, for the engine's metrics."""
        self._presence = threading.Thread(target=self._stay, name="tierd-presence", daemon=True)
        self._presence.start()

    @property
    def client(self) -> Client:
        """For operations that have no method here: pages that are written and read in place."""
        return self._client

    @property
    def tiers(self) -> tuple[str, ...]:
        """The daemon's tiers, near to far, in the order of tier_tokens."""
        return self._client.tiers

    @property
    def tells_events(self) -> bool:
        """Whether routers receive events. If so, saving a block stored already is useful: it
        reports the engine's name for the block and copies nothing."""
        return self._client.tells_events

    def introduce(self, facts: EngineFacts) -> None:
        """Replaces the facts when some were unknown at first. A new connection, made at once, sends them."""
        self._client.introduce(facts.words())

    def open(self, spec: NamespaceSpec) -> OpenedNamespace:
        """The namespace; without a daemon it opens later. Raises InvalidArgument for an impossible spec."""
        return self._client.open_namespace(spec, error_limit=self._options.error_limit)

    def lookup(self, groups: Sequence[Group]) -> Found:
        """The tokens and blocks that the daemon could serve now. It begins to bring them near, unless
        the advisor doubts that they are worth it."""
        intent = "none" if self.advice.is_doubtful else "default"
        for computed in self.advice.take_computed():
            self._client.note_computed(computed.request, computed.tokens, times=computed[2:])
        found = self._client.lookup(groups, timeout_s=self._options.lookup_timeout_s, intent=intent)
        self._count(lookups=1, found_tokens=found.tokens)
        return found

    def prefetch(self, groups: Sequence[Group]) -> int:
        """Starts copying blocks to a near tier; returns how many copies this call started."""
        return self._client.prefetch(groups, timeout_s=self._options.lookup_timeout_s)

    def load(
        self,
        groups: Sequence[Group],
        targets: Sequence[Sequence[Pieces | None]],
        *,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> Loaded:
        """Copies each group's servable blocks into the engine's memory.

        `targets` holds the engine's pieces per group and block, None for an unwanted block. A group
        is of one rank. Blocks near need no call if their pieces are host memory. stream: a
        torch.cuda.Stream for copies to a device. timeout_s: at most the option's.
        """
        wait_s = self._options.timeout_s if timeout_s is None else min(timeout_s, self._options.timeout_s)
        until, loaded = time.monotonic() + wait_s, None
        try:
            loaded = self._got(groups, targets, until) if wait_s > 0 else Loaded()
            if loaded is None:
                lease = self._client.acquire(groups, timeout_s=wait_s)
                loaded = self._copied(lease, groups, targets, (stream, until))
        except (TierdError, MemoryError):  # a restart, a fork or the engine's deadline: the bytes are unknown
            self._count(failed_loads=1)
        if loaded and any(loaded.good):
            return loaded
        self._count(late_loads=int(time.monotonic() >= until))
        return Loaded(good=(0,) * len(groups))

    def save(self, group: PutGroup, sources: Sequence[Pieces], about: About | None = None) -> int:
        """Stores consecutive blocks; returns how many leading ones are stored now.

        A block whose name exists counts and is not copied. `about` holds the engine's names for the
        blocks, and their tokens, for routers.
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
        """Stores unrelated blocks, one a group; returns which are stored now. The caller bounds their number."""
        stored: list[bool] = self._save(groups, sources).tolist()
        self._count(saves=1, saved_blocks=sum(stored), dropped_blocks=len(stored) - sum(stored))
        return stored

    def take_counts(self) -> Counter[str]:
        """Returns the counts since the last call and resets `counts`."""
        with self._turn:
            taken, self.counts = self.counts, Counter()
        return +taken

    def close(self) -> None:
        """Ends the session."""
        self._closing.set()
        self._presence.join(PRESENCE_S)
        self._client.close()

    def _stay(self) -> None:
        """Connects, and reconnects when the daemon is replaced, so operators see an engine before
        its first request. Ends with the store or its process."""
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
            ready = self._encoded(groups, sources)
            reservation = self._client.reserve([group for group, _ in ready])
            try:
                statuses = self._filled(reservation, groups, [pieces for _, parts in ready for pieces in parts])
            finally:
                # reports the end without waiting; an abort would wait for a hanging daemon
                reservation.drop()
        except (TierdError, MemoryError):
            self._count(failed_saves=1)
            return np.zeros(len(sources), dtype=np.bool_)
        return np.isin(statuses, (BlockStatus.READY, BlockStatus.EXISTS))

    def _encoded(
        self, groups: Sequence[PutGroup], sources: Sequence[Pieces]
    ) -> list[tuple[PutGroup, Sequence[Pieces | None]]]:
        """Each group and its pieces, encoded if its namespace has a codec. Blocks that are stored
        already are not encoded: None, and the greatest length."""
        rest, ready = list(sources), list[tuple[PutGroup, Sequence[Pieces | None]]]()
        for group in groups:
            mine, rest = rest[: len(group.hashes)], rest[len(group.hashes) :]
            engine = self.codings.of(group.namespace.spec)
            ready.append((group, mine) if engine is None else self._encoded_group(engine, group, mine))
        return ready

    def _encoded_group(
        self, engine: Engine, group: PutGroup, pieces: Sequence[Pieces]
    ) -> tuple[PutGroup, list[Pieces | None]]:
        covered = group.namespace.block_tokens(len(pieces), tokens=group.tokens).tolist()
        wanted = Group(group.namespace, group.hashes, group.tokens, ranks=(group.rank,))
        found = self._client.lookup([wanted], timeout_s=self._options.timeout_s).tier_of
        is_new = found[0][0] < 0 if found else np.ones(len(pieces), np.bool_)
        fresh = [Source(pieces[i], covered[i], group.position + i) for i in np.flatnonzero(is_new).tolist()]
        stored = iter(self.codings.each(engine.encoded, fresh))
        blocks = [[next(stored)] if new else None for new in is_new]
        lengths = [engine.coding.most_bytes if block is None else len(block[0]) for block in blocks]
        return replace(group, lengths=lengths), [*blocks]

    def _filled(
        self, reservation: Reservation, groups: Sequence[PutGroup], sources: Sequence[Pieces | None]
    ) -> NDArray[np.uint16]:
        """The status of each block after its page was written and committed. Raises Unavailable if a
        block was evicted after `_encoded` found it."""
        statuses = reservation.statuses.copy()
        given = statuses == BlockStatus.RESERVED
        if given.any():
            layers = [group.namespace.spec.geometry.layers for group in groups for _ in group.hashes]
            pages = [(i, page) for i, page in enumerate(reservation.buffers()) if page is not None]
            blocks = [(pieces, page, layers[i]) for i, page in pages if (pieces := sources[i]) is not None]
            if len(blocks) < len(pages):
                raise Unavailable("save: a block was evicted while others were encoded; it is saved next time")
            reservation.summed(copy_all_in(*zip(*blocks, strict=True)))
            statuses[given] = reservation.commit(timeout_s=self._options.timeout_s).statuses
        self._count(saved_bytes=int(reservation.handles["length"][given].sum()))
        return statuses

    def _got(self, groups: Sequence[Group], targets: Sequence[Sequence[Pieces | None]], until: float) -> Loaded | None:
        """Loads by a get, which needs no call if all blocks are near. None if their kind or the
        engine's memory needs a lease."""
        (group, *others), pieces = groups, targets[0]
        first = next((i for i, its in enumerate(pieces) if its is not None), len(pieces))
        spec, wanted = group.namespace.spec, [its for its in pieces[first:] if its is not None]
        if others or group.need is not Need.PREFIX or self.codings.of(spec) is not None:
            return None
        if len(wanted) < len(pieces) - first:
            return None
        if not wanted or not all(are_whole_slices(its, spec.geometry.layers) for its in wanted):
            return None
        begun = time.monotonic()
        part, left_s = group.part(first, len(pieces)), max(0.0, until - begun)
        got = self._client.get(group.namespace, part, out=wanted, timeout_s=left_s)
        size = sum(piece_bytes(piece) for its in wanted[: got.blocks] for piece in its)
        if not got:
            return Loaded(good=(0,))
        if all(name.startswith("host") for name, its in zip(self.tiers, got.tier_tokens, strict=False) if its):
            self.advice.copied(size, time.monotonic() - begun)
        self._count(loads=1, loaded_blocks=got.blocks, loaded_bytes=size)
        return Loaded(first * spec.tokens_per_block + got.tokens, (first + got.blocks,), (first,), got.tier_tokens)

    def _copied(
        self,
        lease: Lease,
        groups: Sequence[Group],
        targets: Sequence[Sequence[Pieces | None]],
        how: tuple[Any, float],
    ) -> Loaded | None:
        """Copies and decodes the wanted blocks, and says which of them are good. how: as for `load`,
        stream and end."""
        if not lease:
            return None
        begun, size = time.monotonic(), int(lease.handles["length"].sum())
        filled = fill(lease, groups, targets, self.codings, how[0])
        good = lease.check()
        bad = decoded(filled, good, self.codings, until=how[1])
        self._count(undecoded_blocks=len(bad))
        self.advice.copied(size, time.monotonic() - begun)
        loaded = loaded_of(lease, filled.copied, min([good, *bad]))
        lease.detach()
        self._count(loads=1, loaded_blocks=sum(loaded.good), loaded_bytes=size)
        return loaded

    def _count(self, **amounts: int) -> None:
        with self._turn:
            self.counts.update(amounts)


def _part_of(group: PutGroup, start: int) -> PutGroup:
    """SAVE_BLOCKS of it from `start` on, with the parent and position that they have there."""
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
