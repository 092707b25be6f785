"""Numbers for people: sizes, counts, durations, shares.

Every table spells a unit the same way. All functions are pure. render.py has layout and color.
"""

from __future__ import annotations

import math

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
COUNT_UNITS = ("", "k", "M", "G", "T")


def human_bytes(count: float) -> str:
    """`1.5 MiB`: three significant digits, binary units."""
    value, unit = scaled(count, step=1024, units=BYTE_UNITS)
    return f"{digits(value, whole=unit == 'B')} {unit}"


def human_rate(bytes_per_s: float) -> str:
    """`1.5 GiB/s`, or a dash for zero."""
    return f"{human_bytes(bytes_per_s)}/s" if bytes_per_s >= 1 else "-"


def human_count(count: float) -> str:
    """`12,345`; from ten million on `12.3 M`."""
    if abs(count) < 10_000_000:
        return f"{count:,.0f}"
    value, unit = scaled(count, step=1000, units=COUNT_UNITS)
    return f"{digits(value)} {unit}"


def human_seconds(seconds: float) -> str:
    """`310 us`, `4.20 ms`, `12.3 s`, `3 min 12 s`, `2 h 05 min`, `3 d 4 h`."""
    if seconds < 0 or not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return sub_second(seconds)
    if seconds < 60:
        return f"{digits(seconds)} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def human_share(part: float, whole: float) -> str:
    """`12.3 %`; a dash if the whole is zero."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def sub_second(seconds: float) -> str:
    """A duration below a second, in ms or us."""
    if seconds == 0:
        return "0 s"
    return f"{digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{digits(seconds * 1e6)} us"


def scaled(value: float, *, step: int, units: tuple[str, ...]) -> tuple[float, str]:
    """The value in the largest unit in which it is at least 1."""
    place = 0
    while abs(value) >= step * 0.9995 and place < len(units) - 1:
        value /= step
        place += 1
    return value, units[place]


def digits(value: float, *, whole: bool = False) -> str:
    """Three significant digits, no exponent."""
    if whole or abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
