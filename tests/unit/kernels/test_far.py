"""The kernels' own source with pages beyond 32-bit distances, and with batches of many rows."""

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
    """Decode is right in a pool of more than 4 GiB, with distances between pages beyond 32 bits."""
    check_far_decode(library, shape)


@pytest.mark.parametrize("shape", FAR_PREFILLS, ids=range(len(FAR_PREFILLS)))
def test_prefill_of_pages_far_apart(library: Emulated, shape: Shape) -> None:
    """The same for chunks."""
    check_far_prefill(library, shape)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_stores_copies_and_bounds_of_pages_far_apart(library: Emulated, kind: str) -> None:
    """The same for stores, copies and bounds, to the bit."""
    check_far_pages(library, kind)


def test_decode_of_many_rows(library: Emulated) -> None:
    """A batch with more requests than a block has threads is right."""
    check_decode(library, MANY)
