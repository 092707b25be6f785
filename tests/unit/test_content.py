"""Blocks for tests: their bytes identify the block and the position within it."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.testing import chain, content_of, is_content

LONG = 128 << 10


@pytest.mark.parametrize("length", [1, 511, 4096, 4097, 20_000])
def test_short_is_the_beginning_of_long(length: int) -> None:
    """A block of any length has that many bytes, the first bytes of a longer block of the same name."""
    name = chain(1, 1)[0]
    found = content_of(name, length)
    assert (found.dtype, found.shape) == (np.uint8, (length,))
    assert np.array_equal(found, content_of(name, LONG)[:length])


def test_no_word_comes_twice() -> None:
    """No eight bytes repeat in a block or between blocks, so a misplaced row is wrong everywhere."""
    words = np.concatenate([content_of(name, LONG).view(np.uint64) for name in chain(2, 8)])
    assert len(np.unique(words)) == len(words)


def test_any_wrong_byte_shows() -> None:
    """One flipped bit at either end, or in any row, makes the content wrong."""
    name = chain(3, 1)[0]
    right = content_of(name, LONG)
    assert is_content(right, name)
    for at in (0, *range(4095, LONG, 4096)):
        wrong = right.copy()
        wrong[at] ^= 1
        assert not is_content(wrong, name)
