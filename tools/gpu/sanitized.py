"""What `sanitizing` looks at, as a program: `python -m tools.gpu.sanitized FATBINS`. Two small cases of each kernel and a decode whose parts are joined in two steps, each result compared."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.kernels.kernel_cases import CUT_DECODES, check_cut_decode
from tests.unit.kernels.small_cases import UNITS
from tools.gpu.device import Gpu

OF_EACH = 2
CASES = [
    (check_cut_decode, CUT_DECODES[-1]),
    *(case for unit, cases in UNITS.items() if unit != "read" for case in cases[:OF_EACH]),
]


def main() -> None:
    """Raises AssertionError where a result is wrong."""
    kernels = Gpu(Path(sys.argv[1])).kernels
    for check, shape in CASES:
        check(kernels, shape)
    print(f"{len(CASES)} cases")


if __name__ == "__main__":
    main()
