"""Reads and writes prior.txt: hazards of the developers' traces, by `tools/learn_prior.py`.

`hazard.blend` chooses between the experts. The file has a line per group, with a character per age,
expert after expert. Characters are logarithmic steps of an eighth from `_LEAST` on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tierd.policies.reuse.hazard import AGES, CERTAIN, Floats

TABLE = Path(__file__).with_name("prior.txt")

_LEAST = 1.2e-5
_STEP = 0.125
_FIRST = ord("#")  # printable characters from here to "~"; `encode` uses no more than needed


def prior_hazards() -> Floats:
    """float64 [experts, groups, ages], each in (0, 1)."""
    lines = TABLE.read_bytes().split()
    steps = np.array([np.frombuffer(line, dtype=np.uint8) for line in lines]).astype(np.float64) - _FIRST
    experts = steps.reshape(len(lines), -1, AGES).swapaxes(0, 1)
    return np.asarray(_LEAST * np.exp(_STEP * experts), dtype=np.float64)


def encode(experts: Floats) -> str:
    """The text of such a table."""
    steps = np.rint((np.log(np.clip(experts, _LEAST, CERTAIN)) - np.log(_LEAST)) / _STEP).astype(np.uint8) + _FIRST
    return "".join(f"{bytes(steps[:, group].ravel()).decode('ascii')}\n" for group in range(steps.shape[1]))
