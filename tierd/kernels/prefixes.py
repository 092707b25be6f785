"""Pages that sequences of a batch share: found, so that attention reads them once for all.

Sequences share leading pages after a fork, or if they began with the same stored prefix. Their
queries attend to these pages together, and each to its other pages alone. Both parts are merged by
their log-sum-exps (Juravsky et al., Hydragen, arXiv 2402.05099, sections 3.1 and 3.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """sequences: at least two, by their places in a batch. pages: how many leading pages of each
    are the same."""

    sequences: Sequence[int]
    pages: int

    @property
    def saved(self) -> int:
        """Pages that need not be read again."""
        return (len(self.sequences) - 1) * self.pages


def shared_prefixes(tables: Sequence[NDArray[np.int64]], *, least: int) -> list[SharedPrefix]:
    """Disjoint groups: large ones, or smaller ones in them if these save more pages. A group that
    saves fewer than `least` is left out.

    tables: per sequence something that identifies each page, such as its address, for pages that
    may be shared.
    """
    return [one for one in _best(range(len(tables)), tables, 0) if one.saved >= least]


def _best(sequences: Sequence[int], tables: Sequence[NDArray[np.int64]], known: int) -> list[SharedPrefix]:
    """Groups of sequences whose first `known` pages are the same: the whole, or smaller groups that
    share more pages."""
    alike = defaultdict(list)
    for i in sequences:
        if len(tables[i]) > known:
            alike[int(tables[i][known])].append(i)
    found: list[SharedPrefix] = []
    for some in alike.values():
        if len(some) > 1:
            whole = SharedPrefix(some, _common([tables[i] for i in some]))
            found += max([whole], _best(some, tables, whole.pages), key=lambda groups: sum(one.saved for one in groups))
    return found


def _common(tables: Sequence[NDArray[np.int64]]) -> int:
    """How many leading entries are the same in all."""
    shortest = min(map(len, tables))
    differs = np.any([table[:shortest] != tables[0][:shortest] for table in tables[1:]], axis=0)
    return int(np.argmax(differs)) if differs.any() else shortest
