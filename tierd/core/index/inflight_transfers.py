"""Transfers in flight, by id.

The planner makes and ends them. A second request for a page finds the transfer that fills it. Each
transfer pins both of its pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.columns import lengthen, rows_for
from tierd.core.formats.model import Reason, StructArray
from tierd.core.plan import Ids, TransferIds
from tierd.errors import NotFound

INFLIGHT = np.dtype(
    [
        ("block", "<i8"),
        ("source_tier", "<i8"),
        ("source_page", "<i8"),
        ("target_tier", "<i8"),
        ("target_page", "<i8"),
        ("reason", "<u2"),
    ]
)


class InflightTransfers:
    """Rows of INFLIGHT by transfer id."""

    def __init__(self) -> None:
        self._rows: NDArray[Any] = np.zeros(0, INFLIGHT)
        self._row_of: dict[int, int] = {}
        self._filler: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._next = 1

    def __len__(self) -> int:
        return len(self._row_of)

    def begin(self, transfers: StructArray) -> TransferIds:
        """Ids for new transfers, rising from 1, never used twice."""
        count = len(transfers)
        if len(self._free) < count:
            old = len(self._rows)
            lengthen(self._rows, rows_for(old, old + count))
            self._free.extend(range(len(self._rows) - 1, old - 1, -1))
        rows = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        ids = range(self._next, self._next + count)
        self._next += count
        self._rows[rows] = transfers
        self._row_of.update(zip(ids, rows, strict=True))
        self._filler.update(zip(_targets(transfers), ids, strict=True))
        return np.arange(ids.start, ids.stop, dtype=np.uint64)

    def end(self, ids: TransferIds) -> StructArray:
        """Removes distinct transfers. Raises NotFound, and changes nothing, if one is not in flight."""
        unknown = [i for i in ids.tolist() if i not in self._row_of]
        if unknown or len(set(ids.tolist())) != len(ids):
            raise NotFound(
                f"transfer {unknown[:1] or 'given twice'}: not in flight; finish each transfer of a plan once"
            )
        rows = [self._row_of.pop(i) for i in ids.tolist()]
        self._free.extend(rows)
        transfers: StructArray = self._rows[rows]
        for target in _targets(transfers):
            del self._filler[target]
        return transfers

    def fillers(self, tier: int, pages: Ids) -> TransferIds:
        """The transfer that fills each page of the tier; 0: none. uint64 [n]."""
        if not self._filler:
            return np.zeros(len(pages), np.uint64)
        return np.asarray([self._filler.get((tier, page), 0) for page in pages.tolist()], np.uint64)

    def sources(self, tier: int, reason: Reason) -> Ids:
        """Source pages in the tier of transfers made for this reason."""
        rows = self._rows[list(self._row_of.values())]
        pages: Ids = rows["source_page"][(rows["source_tier"] == tier) & (rows["reason"] == reason)]
        return pages

    def pages(self) -> list[tuple[Ids, Ids]]:
        """(tiers, pages) of all sources and of all targets."""
        rows = self._rows[list(self._row_of.values())]
        return [(rows[f"{end}_tier"], rows[f"{end}_page"]) for end in ("source", "target")]


def _targets(transfers: StructArray) -> Iterable[tuple[int, int]]:
    return zip(transfers["target_tier"].tolist(), transfers["target_page"].tolist(), strict=True)
