"""What nvcc's assembler says of registers (`-Xptxas -v`), and which kernels may not spill any.

Purpose: no wheel has kernels one of which spills; it is built without them, and says why. Only the standard library is needed, as in fatbins.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

SPILL_FREE = ("decode", "prefill", "slice_sums")
"""Kernels, by how their names begin, that spill nothing on any architecture: not one byte is allowed. The others may."""
RESOURCES = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a thread of a kernel takes. spilled: bytes that it stores to memory and loads from it, for want of registers."""

    registers: int
    spilled: int


def parsed(said: str) -> dict[str, Taken]:
    """Of each kernel, of what the assembler said. Raises ValueError if it told of none."""
    found = RESOURCES.findall(said)
    if not found:
        raise ValueError(f"nvcc -Xptxas -v: tells nothing of registers any more\n{said[-4000:]}")
    return {name: Taken(int(registers), int(stores) + int(loads)) for name, stores, loads, registers in found}


def spilling(kernels: Mapping[str, Taken]) -> list[str]:
    """Those of SPILL_FREE that do."""
    return [name for name, taken in kernels.items() if taken.spilled and name.startswith(SPILL_FREE)]
