"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.units import format_bytes, parse_bytes, parse_seconds


@given(st.integers(0, 1 << 60))
def test_size_survives_writing_and_reading(size: int) -> None:
    """Any size reads back as the same number after formatting."""
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize(
    ("text", "size"), [("512 MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2 TB", 2 * 10**12), (4096, 4096), ("0 B", 0)]
)
def test_size_in_any_unit(text: object, size: int) -> None:
    """Binary and decimal units, with or without a space, and bare numbers are bytes."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("value", ["12 GX", "12", "-1 MiB", -1, "1.5 B", 1.5, True, "", None, "MiB", "1 mib"])
def test_no_size(value: object) -> None:
    """An ambiguous or invalid size is refused."""
    with pytest.raises(ValueError, match=r"write|units are"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("text", "duration_s"), [("5 s", 5.0), ("250 ms", 0.25), ("2 min", 120.0), (3, 3.0), (0.5, 0.5)]
)
def test_duration_in_any_unit(text: object, duration_s: float) -> None:
    """Durations with a unit, and bare numbers, become seconds."""
    assert parse_seconds(text) == duration_s


@pytest.mark.parametrize("value", ["5", "5 days", -1, float("inf"), float("nan"), True, None])
def test_no_duration(value: object) -> None:
    """An ambiguous or invalid duration is refused."""
    with pytest.raises(ValueError, match=r"write|units are"):
        parse_seconds(value)
