"""Bytes as KV-cache has them: numbers of a normal distribution as bf16, whose signs and exponents repeat and whose mantissas do not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bf16_noise(seed: int, length: int) -> NDArray[np.uint8]:
    """uint8 [length], an even number."""
    numbers = np.random.default_rng(seed).standard_normal(length // 2, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
