"""Bytes like those of a KV cache: normally distributed numbers as bf16. Their signs and exponents
repeat, their mantissas do not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bf16_noise(seed: int, length: int) -> NDArray[np.uint8]:
    """uint8 [length]; length is even."""
    numbers = np.random.default_rng(seed).standard_normal(length // 2, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
