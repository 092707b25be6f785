"""The kernels' own source where pages lie beyond what 32 bits count, and where a batch has many rows."""

from __future__ import annotations

import pytest

from tests.unit.kernels.far_cases import (
    FAR_DECODES,
    FAR_PREFILLS,
    MANY,
    check_far_decode,
    check_far_pages,
    check_far_prefill,
)
from tests.unit.kernels.kernel_cases import Shape, check_decode
from tierd.kernels.library import Emulated


@pytest.mark.parametrize("shape", FAR_DECODES, ids=range(len(FAR_DECODES)))
def test_decode_of_pages_far_apart(library: Emulated, shape: Shape) -> None:
    """Of a pool of more than 4 GiB, and of pages whose distances are of as many."""
    check_far_decode(library, shape)


@pytest.mark.parametrize("shape", FAR_PREFILLS, ids=range(len(FAR_PREFILLS)))
def test_prefill_of_pages_far_apart(library: Emulated, shape: Shape) -> None:
    """The same of chunks."""
    check_far_prefill(library, shape)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_stores_copies_and_bounds_of_pages_far_apart(library: Emulated, kind: str) -> None:
    """The same of what moves pages, to the bit."""
    check_far_pages(library, kind)


def test_decode_of_many_rows(library: Emulated) -> None:
    """More requests than a block has threads."""
    check_decode(library, MANY)
