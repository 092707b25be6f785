"""One host pool's pages in tierd: lookup, load, save.

It maps SGLang's keys to an EngineStore; host memory is in pages.py. Nothing raises. Loaded and
saved pages are counted from the first key on. The namespace opens itself as soon as there is a
daemon.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tierd.client import Group, NamespaceSpec, PutGroup
from tierd.client.advice import Blocks
from tierd.client.match import Match
from tierd.client.values import NO_HASHES, Hashes
from tierd.core.formats.model import ROOT
from tierd.integrations.pieces import Pieces
from tierd.integrations.sglang.names import about_of
from tierd.integrations.store import EngineStore

LOAD_PAGES = 64
"""Pages held at a time while they are copied."""
LOOKUP_PAGES = 1024
"""Pages of one lookup call."""


class StoredPages:
    """Threads may share it. Raises InvalidArgument for an impossible spec, later nothing.

    spec, rank: the owner of the pages. publishes_names: whether routers receive SGLang's names of
    them.
    """

    def __init__(self, store: EngineStore, spec: NamespaceSpec, *, rank: int, publishes_names: bool) -> None:
        self._store, self._rank, self._publishes_names = store, rank, publishes_names
        self._space = store.open(spec)

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page is stored."""
        found: list[bool] = []
        for start in range(0, len(keys), LOOKUP_PAGES):
            part = keys[start : start + LOOKUP_PAGES]
            tiers = self._store.lookup([self._group(part)]).tier_of
            found += (tiers[0][0] >= 0).tolist() if tiers else [False] * len(part)
        return found

    def worth(self, keys: Sequence[str]) -> int:
        """Pages, from the first on, that are stored and worth loading."""
        spec, count = self._space.spec, 0
        size = spec.tokens_per_block
        blocks = Blocks(size, spec.block_bytes * spec.rank_count / size)  # ranks load at the same time
        for start in range(0, len(keys), LOOKUP_PAGES):
            part = keys[start : start + LOOKUP_PAGES]
            found = self._store.lookup([self._group(part)])
            match = Match(found.tokens, 0, len(part) * size + 1)
            here = self._store.advice.claim(match, found, blocks).tokens // size
            count += here
            if here < len(part):
                break
        return count

    def load(self, keys: Sequence[str], targets: Sequence[Pieces]) -> int:
        """Copies pages into the targets; returns how many leading ones are good."""
        good = 0
        for start in range(0, len(keys), LOAD_PAGES):
            part = keys[start : start + LOAD_PAGES]
            group = self._group(part)
            if len(group.hashes) < len(part):  # no daemon
                break
            here = self._store.load([group], [targets[start : start + LOAD_PAGES]]).good[0]
            good += here
            if here < len(part):
                break
        return good

    def save(self, keys: Sequence[str], sources: Sequence[Pieces], *, before: Sequence[str] = ()) -> int:
        """Stores pages; returns how many leading ones are stored now. before: keys of all preceding
        pages of the sequence."""
        hashes = self._hashes(keys)
        if len(hashes) < len(keys):  # no daemon
            return 0
        parent = self._space.fold([before[-1].encode()])[0].tobytes() if before else ROOT
        group = PutGroup(self._space, hashes, rank=self._rank, parent=parent, position=len(before))
        return self._store.save(group, sources, about_of(keys, before) if self._publishes_names else None)

    def _group(self, keys: Sequence[str]) -> Group:
        return Group(self._space, self._hashes(keys), ranks=(self._rank,))

    def _hashes(self, keys: Sequence[str]) -> Hashes:
        if not self._space.is_open:
            self._store.lookup([Group(self._space, NO_HASHES, ranks=(self._rank,))])  # opens it if there is a daemon
        return self._space.fold([key.encode() for key in keys])


def leading(good: Sequence[Any]) -> int:
    """Leading true values."""
    return sum(1 for _ in itertools.takewhile(bool, good))
