"""Sketch: how often a name was seen lately, in four counters of a table that all names share.

G. Cormode, S. Muthukrishnan, "An Improved Data Stream Summary: the Count-Min Sketch", 2005, with
conservative update (C. Estan, G. Varghese, 2002). Counters are at most 15 and are halved with time:
G. Einziger, R. Friedman, B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", TOS 2017,
section 3.

Differences. The paper halves all counters after so many uses. Here each use halves some, each
counter equally often, so no use pays for the whole. The table doubles when more blocks come: one
more bit separates names of one counter, and both counters start with its count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.table import Keys
from tierd.core.eviction import Ids

ROWS = 4
MOST = 15
SAMPLE_PER_COUNTER = 10
"""Uses after which every counter of a row was halved once, per counter of a row."""
_LEAST_WIDTH = 64
_MIX = np.array(
    [[0xC3A5C85C97CB3127], [0xB492B66FBE98F273], [0x9AE16A3B2F90404F], [0xCBF29CE484222325]], dtype=np.uint64
)
"""Odd factors of CityHash and FNV; keys are hashed with a secret already."""
_ROW = np.arange(ROWS)[:, None]


class Sketch:
    """See the module."""

    def __init__(self) -> None:
        self._counts = np.zeros(ROWS * _LEAST_WIDTH, dtype=np.uint8)  # row after row
        self._width = _LEAST_WIDTH
        self._halved = 0  # the place up to which all rows were halved in this pass
        self._due = 0.0

    def widen(self, blocks: int) -> None:
        """Makes room for so many blocks: a counter of each row for each."""
        while self._width < blocks:
            self._counts = np.repeat(self._counts, 2)  # places are the top bits of a product
            self._width *= 2
            self._halved *= 2

    def add(self, keys: Keys) -> None:
        """Each of the names was seen once."""
        places = self._places(keys)
        least = np.minimum(self._counts[places].min(axis=0) + 1, MOST)
        np.maximum.at(self._counts, places, np.broadcast_to(least, places.shape))
        self._age(len(keys))

    def counts(self, keys: Keys) -> NDArray[np.uint8]:
        """How often each name was seen, or a little more."""
        counts: NDArray[np.uint8] = self._counts[self._places(keys)].min(axis=0)
        return counts

    def _places(self, keys: Keys) -> Ids:
        shift = np.uint64(64 - self._width.bit_length() + 1)
        rows: Ids = ((keys * _MIX) >> shift).astype(np.int64) + _ROW * self._width
        return rows

    def _age(self, uses: int) -> None:
        self._due += uses / SAMPLE_PER_COUNTER
        while self._due >= 1:
            stop = min(self._width, self._halved + int(self._due))
            self._counts.reshape(ROWS, -1)[:, self._halved : stop] >>= 1
            self._due -= stop - self._halved
            self._halved = stop % self._width
