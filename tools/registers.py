"""Reads the register counts that nvcc's assembler prints (`-Xptxas -v`), and names spills.

Purpose: if a kernel of SPILL_FREE spills, a wheel is built without kernels, and says why. Only the
standard library is needed, as in fatbins.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

SPILL_FREE = ("decode", "prefill", "slice_sums", "rotate", "unrotate", "score", "choose")
"""Prefixes of the kernels that may spill no byte on any architecture. The others may spill."""
RESOURCES = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Taken:
    """A kernel's use of registers by a thread. spilled: bytes that it stores to and loads from
    memory, for want of registers."""

    registers: int
    spilled: int


def parsed(said: str) -> dict[str, Taken]:
    """The use of each kernel that the assembler lists. Raises ValueError if it lists none."""
    found = RESOURCES.findall(said)
    if not found:
        raise ValueError(f"nvcc -Xptxas -v: tells nothing of registers any more\n{said[-4000:]}")
    return {name: Taken(int(registers), int(stores) + int(loads)) for name, stores, loads, registers in found}


def spilling(kernels: Mapping[str, Taken]) -> list[str]:
    """The kernels of SPILL_FREE that spill."""
    return [name for name, taken in kernels.items() if taken.spilled and name.startswith(SPILL_FREE)]
