"""Rounding of worths, so that a few queues hold all of them.

Numbers from 1 on are rounded to three significant bits (S. Ghandeharizadeh, S. Irani, J. Lam, J.
Yap, "CAMP: A Cost Adaptive Multi-Queue Eviction Policy for Key-Value Stores", Middleware 2014,
section 2.2). The value of `ROUNDED[level(x)]` is at most x and above 4/5 of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_STEPS = 4
"""Steps of each doubling."""
_LEVELS = np.arange(256)
ROUNDED = 2.0 ** ((_LEVELS - 1) // _STEPS) * (1 + (_LEVELS - 1) % _STEPS / _STEPS)
"""Value by level, from 1 on."""


def level(values: NDArray[Any]) -> NDArray[np.uint8]:
    """The level of each value from 1 to 2^63: 1 for 1, and one more for each step up."""
    half, exponent = np.frexp(values.astype(np.float64))
    return (1 + (exponent - 1) * _STEPS + (2 * _STEPS * half).astype(np.int64) - _STEPS).astype(np.uint8)
