"""What is broken in the kernels, one at a time, to see that their tests notice: `python -m tools.kernel_mutants` tries it.

Purpose: the table `MUTANTS`. Non-purpose: how they are tried. Invariant: what is replaced stands in its file exactly once, which a test sees to.
Every barrier and every wait has a row but the two waits at the ends of decode and prefill: all that they wait for is empty groups of copies.
"""

from __future__ import annotations

from tools.kernel_faults.attention import ATTENTION
from tools.kernel_faults.decode import DECODES
from tools.kernel_faults.moving import MOVING
from tools.kernel_faults.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (*DECODES, *ATTENTION, *MOVING)
