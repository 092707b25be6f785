"""Pages cut out of a segment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.client.blocks.lease import ROWS_LEAST, rows_of
from tierd.core.formats.model import HANDLE

WHOLE = np.arange(256, dtype=np.uint8)


@given(
    first=st.integers(0, 40),
    step=st.integers(0, 24),
    length=st.integers(0, 24),
    count=st.integers(0, 2 * ROWS_LEAST),
    moved=st.none() | st.tuples(st.integers(0, 2 * ROWS_LEAST), st.sampled_from(["offset", "length"])),
)
def test_rows_are_the_slices(first: int, step: int, length: int, count: int, moved: tuple[int, str] | None) -> None:
    """Pages cut as rows equal their slices; pages of uneven length or distance never are rows."""
    handles = np.zeros(count, HANDLE)
    handles["offset"], handles["length"] = first + step * np.arange(count), length
    if moved is not None and moved[0] < count:
        handles[moved[1]][moved[0]] += 1
    rows = rows_of(WHOLE, handles)
    slices = [WHOLE[start : start + size] for start, size in zip(handles["offset"], handles["length"], strict=True)]
    if rows is not None:
        assert [row.tobytes() for row in rows] == [piece.tobytes() for piece in slices]
    else:
        is_even = moved is None or moved[0] >= count
        assert not (is_even and count >= ROWS_LEAST and 0 < length <= step and first + count * step <= len(WHOLE))
