"""The NVMe health log, as programs print it in JSON.

`parse_smart` accepts the names that versions of nvme-cli and smartctl use for the same numbers. The
log is that of the NVM Express Base Specification, "SMART / Health Information (02h)". The
percentage used is of the endurance that the maker estimates and may exceed 100. Data units are
thousands of 512 bytes.

nvme-cli has `percent_used`. It prints the 128-bit counters as integers (1.x, and 2.x since its
uint128), as floats (2.0), or as texts with separators. With --verbose the warning is an object with
a `value`. smartctl has `percentage_used` inside `nvme_smart_health_information_log`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

DATA_UNIT_BYTES = 512_000
_PERCENT = ("percent_used", "percentage_used")
_SEPARATORS = re.compile(r"[\s,'_%]|(?<=\d)\.(?=\d{3}(?:\D|$))")
_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Smart:
    """percentage_used: of the endurance, may exceed 100. written_bytes, power_on_hours: None if
    absent.
    warning: bits of the log; 0 means no warning."""

    percentage_used: int
    written_bytes: int | None = None
    power_on_hours: int | None = None
    warning: int = 0


def parse_smart(text: bytes | str) -> Smart:
    """Parse the log in a JSON text. Raises ValueError."""
    try:
        log = _find_log(json.loads(text), _DEPTH)
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if log is None:
        raise ValueError(f"no {' or '.join(_PERCENT)} in it")
    used = next(count for name in _PERCENT if (count := _count(log.get(name))) is not None)
    units = _count(log.get("data_units_written"))
    return Smart(
        percentage_used=used,
        written_bytes=None if units is None else units * DATA_UNIT_BYTES,
        power_on_hours=_count(log.get("power_on_hours")),
        warning=_count(log.get("critical_warning")) or 0,
    )


def _find_log(value: Any, depth: int) -> dict[str, Any] | None:
    """The first object that has a percentage used."""
    if not isinstance(value, dict) or not depth:
        return None
    if any(_count(value.get(name)) is not None for name in _PERCENT):
        return value
    return next((found for inner in value.values() if (found := _find_log(inner, depth - 1)) is not None), None)


def _count(value: Any) -> int | None:
    """A number in any version's form; None for other values."""
    if isinstance(value, dict):
        return _count(value.get("value"))
    if isinstance(value, str):
        digits = _SEPARATORS.sub("", value)
        return int(digits) if digits.isdecimal() else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e38:
        return None
    return int(value)
