"""Sizes and durations as people write them: "512 MiB", "1.5 GB", "250 ms".

One reader for both, and a writer for sizes. A size is a whole number of bytes, never negative.
`parse(format(x)) == x` for sizes. A refused value raises ValueError with fault, value and remedy;
the caller puts the setting's name in front.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

BYTE_UNITS: Mapping[str, int] = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
"""Bytes per unit; binary units end in iB."""

SECOND_UNITS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
"""Seconds per unit."""

BYTES_LIMIT = 1 << 60
SECONDS_LIMIT = 10 * 365 * 86400.0
"""An EiB, and ten years: larger values are refused, and calculations stay within these."""

_QUANTITY = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_bytes(value: object) -> int:
    """The bytes of a whole number, or of a text such as "512 MiB". Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        size: float = value
    else:
        size = _scaled(value, BYTE_UNITS, example='"512 MiB"')
    if size > BYTES_LIMIT:
        raise ValueError(f"{value!r:.40} is more than 1 EiB; write less")
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes; write a smaller unit")
    return int(size)


def parse_rate(value: object) -> int:
    """The bytes per second of a whole number, or of a text such as "100 MiB/s". Raises ValueError."""
    if not isinstance(value, str):
        return parse_bytes(value)
    size, slash, second = value.partition("/")
    if not slash or second.strip() != "s":
        raise ValueError(f'{value!r} is not a size per second; write for example "100 MiB/s"')
    return parse_bytes(size)


def parse_seconds(value: object) -> float:
    """The seconds of a number, or of a text such as "5 s" or "250 ms". Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        duration_s: float = value
    else:
        duration_s = _scaled(value, SECOND_UNITS, example='"5 s"')
    if duration_s > SECONDS_LIMIT:
        raise ValueError(f"{value!r:.40} is more than ten years; write less")
    return float(duration_s)


def format_bytes(size: int) -> str:
    """The size in the largest binary unit that keeps it whole: "512 MiB"."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % BYTE_UNITS[name] == 0:
            return f"{size // BYTE_UNITS[name]} {name}"
    return f"{size} B"


def _scaled(value: object, units: Mapping[str, float], *, example: str) -> float:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match["unit"] == "" and "." in match["number"]):
        raise ValueError(f"{value!r} is not a number with a unit; write for example {example}")
    unit = match["unit"]
    if unit == "":
        raise ValueError(f"{value!r} has no unit; write for example {example}, or a bare number")
    if unit not in units:
        raise ValueError(f"{value!r} has the unknown unit {unit!r}; the units are {', '.join(units)}")
    return _exact(match["number"], units[unit])


def _exact(number: str, scale: float) -> float:
    """Multiplies whole numbers without rounding, so sizes above 2**53 bytes stay exact."""
    return int(number) * scale if number.isdecimal() and len(number) < 20 else float(number) * scale
