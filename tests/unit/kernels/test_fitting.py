"""The depth of the kernels' tile buffers, by the shared memory of a thread block."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tierd.errors import InvalidArgument
from tierd.kernels.arguments import GROUP_LIMIT, HEAD_DIMS
from tierd.kernels.fitting import RINGS, decode_fit, prefill_fit

LEAST, MOST = 101_376, 232_448
"""99 KiB, as a block of sm_86, 89 and 120 has, and the 227 KiB of sm_90 and 100."""
STORED = ("bf16", "f16", "e4m3")
EVERY = list(product(HEAD_DIMS, range(1, GROUP_LIMIT + 1), STORED))


def having(block_shared_bytes: int) -> Any:
    """A library with only the attributes that a fit needs."""
    return SimpleNamespace(device="cuda:0", block_shared_bytes=block_shared_bytes)


def test_all_that_kernels_are_built_for_fits_the_smallest_gpu() -> None:
    """Every head dim, group and type of pages decodes and prefills with 99 KiB."""
    for head_dim, group, kv_type in EVERY:
        assert decode_fit(having(LEAST), head_dim, group, kv_type).shared_bytes <= LEAST
        assert prefill_fit(having(LEAST), head_dim, kv_type).shared_bytes <= LEAST


def test_the_deepest_that_fits_is_taken() -> None:
    """A large GPU uses the deepest buffers; a small one only loses depth for wide heads of 16-bit pages."""
    for head_dim, group, kv_type in EVERY:
        assert decode_fit(having(MOST), head_dim, group, kv_type).depth == max(RINGS)
        is_wide = head_dim >= 128 and kv_type != "e4m3"
        assert decode_fit(having(LEAST), head_dim, group, kv_type).depth == (2 if is_wide and group > 1 else 3)


def test_a_fit_is_exact() -> None:
    """One byte less than a fit gives the next smaller one; below the smallest it is refused with limits."""
    deep = decode_fit(having(MOST), 128, 4, "bf16")
    assert decode_fit(having(deep.shared_bytes), 128, 4, "bf16") == deep
    small = decode_fit(having(deep.shared_bytes - 1), 128, 4, "bf16")
    assert (small.depth, small.shared_bytes) < (deep.depth, deep.shared_bytes)
    _refused(lambda library: decode_fit(library, 128, 4, "bf16"), small.shared_bytes)
    _refused(lambda library: prefill_fit(library, 256, "bf16"), prefill_fit(having(MOST), 256, "bf16").shared_bytes)


def _refused(fit: Any, least: int) -> None:
    """With one byte less."""
    said = rf"^q: head_dim \d+ of bf16.* takes {least} bytes .* a block of cuda:0 has {least - 1}; give pages of e4m3"
    with pytest.raises(InvalidArgument, match=re.compile(said)):
        fit(having(least - 1))
