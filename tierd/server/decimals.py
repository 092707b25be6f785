"""Whole numbers as text, thousands at a time: six times as fast as one by one, which a recording's lines are mostly made of.

Purpose: `columns_of`, `joined`. Invariant: what comes out is what `",".join(map(str, numbers))` gives.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMIT = 10**8
"""Numbers are below it."""
HALF = 10**4
WIDTH = 9
"""Bytes of a number and its comma, before the spaces go."""
_ROW = np.dtype([("high", "<u4"), ("low", "<u4"), ("comma", "u1")])


def _four(texts: list[bytes]) -> NDArray[Any]:
    return np.frombuffer(b"".join(texts), "<u4")


@cache
def _halves() -> tuple[NDArray[Any], NDArray[Any]]:
    """Four digits each: of an upper half, where 0 is nothing; of a lower half, and behind those of one that has no upper half. Made for the first recording: it takes 10 ms."""
    high = _four([(b"%d" % i if i else b"").rjust(4) for i in range(HALF)])
    low = _four([b"%04d" % i for i in range(HALF)] + [(b"%d" % i).rjust(4) for i in range(HALF)])
    return high, low


def columns_of(numbers: NDArray[np.int64]) -> bytes:
    """Each number in WIDTH bytes: spaces, digits, a comma."""
    rows = np.empty(len(numbers), _ROW)
    high = numbers // HALF
    highs, lows = _halves()
    rows["high"] = highs.take(high)
    rows["low"] = lows.take(numbers - high * HALF + HALF * (high == 0))
    rows["comma"] = ord(",")
    return rows.tobytes()


def joined(columns: bytes, first: int, count: int) -> bytes:
    """So many of the numbers from one on, with commas between them and no spaces."""
    return columns[first * WIDTH : (first + count) * WIDTH - 1].translate(None, b" ")
