"""Faults in the kernels, one at a time, for `python -m tools.kernel_mutants`.

Purpose: the table `MUTANTS`; its runs show that the kernels' tests detect each fault. Non-purpose:
the runs. Invariant, which a test checks: the replaced text is in its file exactly once. Every
barrier and wait has a row, except the last waits of decode and prefill, whose groups are empty.
"""

from __future__ import annotations

from tools.kernel_faults.attention import ATTENTION
from tools.kernel_faults.decode import DECODES
from tools.kernel_faults.moving import MOVING
from tools.kernel_faults.mutant import Mutant
from tools.kernel_faults.rotated import ROTATED
from tools.kernel_faults.sparse import SPARSES

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (*DECODES, *ATTENTION, *MOVING, *ROTATED, *SPARSES)
