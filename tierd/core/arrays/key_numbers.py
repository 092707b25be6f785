"""Numbers for 64-bit keys, in order of arrival: 0, 1, 2, ...

Each key gets a row, with columns beside it. A key keeps its number; none is removed.
"""

from __future__ import annotations

import numpy as np

from tierd.core.arrays.columns import Columns, rows_for
from tierd.core.arrays.table import Ids, Keys, Table


class KeyNumbers:
    """See the module. keys: uint64 [rows], by number. Columns may be added; new rows hold 0."""

    def __init__(self, limit: int) -> None:
        """limit: most keys; memory is taken only as it is written to."""
        self.columns = Columns(limit)
        self.keys: Keys = self.columns.column(np.uint64)
        self.count = 0
        self._table = Table()
        self._lengthen(1)

    def find(self, keys: Keys) -> Ids:
        """The number of each key, -1 for none."""
        return self._table.find(
            keys, lambda asked, rows: np.asarray(self.keys.take(rows) == keys.take(asked), np.bool_)
        )

    def add(self, keys: Keys) -> Ids:
        """Numbers for distinct keys that have none."""
        rows = np.arange(self.count, self.count + len(keys))
        self._lengthen(self.count + len(keys))
        self.count += len(keys)
        self.keys[rows] = keys
        self._table.insert(rows, keys)
        return rows

    def _lengthen(self, wanted: int) -> None:
        if wanted > self.columns.rows:
            self.columns.lengthen(rows_for(self.columns.rows, wanted))
