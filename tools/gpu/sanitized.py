"""The program that `sanitizing` checks: `python -m tools.gpu.sanitized FATBINS`. It compares
results of two small cases of each source file, and of a decode whose parts are joined in two
steps. Of sparse decode it has one case for each step."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.kernels.kernel_cases import CUT_DECODES, check_cut_decode
from tests.unit.kernels.small_cases import UNITS
from tools.gpu.device import Gpu

OF_EACH = 2
CASES = [
    (check_cut_decode, CUT_DECODES[-1]),
    *(case for unit, cases in UNITS.items() if unit not in ("read", "sparse") for case in cases[:OF_EACH]),
    *{check: (check, shape) for check, shape in reversed(UNITS["sparse"])}.values(),
]


def main() -> None:
    """Raises AssertionError if a result is wrong."""
    kernels = Gpu(Path(sys.argv[1])).kernels
    for check, shape in CASES:
        check(kernels, shape)
    print(f"{len(CASES)} cases")


if __name__ == "__main__":
    main()
