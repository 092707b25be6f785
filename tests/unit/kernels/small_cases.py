"""One small case of each kind, as a program, for sanitizers and deliberately broken kernels.

`python -m tests.unit.kernels.small_cases LIBRARY [--unit UNIT] [--orders 0,1] [--beyond]`
It prints the case that failed, and its order of threads.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from tests.unit.kernels.far_cases import (
    FAR_DECODES,
    FAR_PREFILLS,
    MANY,
    check_far_decode,
    check_far_pages,
    check_far_prefill,
)
from tests.unit.kernels.kernel_cases import (
    CUT_DECODES,
    DECODES,
    MERGES,
    NARROW_DECODES,
    PREFILLS,
    SHORT_PREFILLS,
    Shape,
    check_cut_decode,
    check_decode,
    check_dirty_decode,
    check_merge,
    check_narrow_decode,
    check_prefill,
    check_short_prefill,
)
from tests.unit.kernels.nan_cases import (
    ODD_DECODES,
    ODD_PREFILLS,
    ODD_SUMMARIES,
    Odd,
    check_odd_decode,
    check_odd_prefill,
    check_odd_summary,
)
from tests.unit.kernels.page_cases import (
    COPIES,
    LONG_COPIES,
    RUNS,
    STORES,
    SUMMARIES,
    check_copy,
    check_long_copy,
    check_runs,
    check_store,
    check_summary,
)
from tests.unit.kernels.read_cases import READS, check_read
from tests.unit.kernels.rot_cases import (
    BLOCKS,
    CODED,
    ODD_BLOCKS,
    Blocks,
    Coded,
    check_blocks,
    check_coded,
    check_odd_blocks,
)
from tests.unit.kernels.sparse_cases import (
    BOUNDS,
    CHOICES,
    FETCHES,
    RESOLVES,
    SCORES,
    check_bound,
    check_choose,
    check_fetch,
    check_resolve,
    check_score,
)
from tests.unit.kernels.sum_cases import SUMS, check_sums
from tierd.kernels.library import Emulated

UNITS: dict[str, list[tuple[Callable[..., None], Any]]] = {
    "decode": [
        *((check_decode, shape) for shape in DECODES),
        *((check_narrow_decode, shape) for shape in NARROW_DECODES),
        *((check_cut_decode, cut) for cut in CUT_DECODES),
        *((check_dirty_decode, cut) for cut in CUT_DECODES[1:]),
        *((check_odd_decode, odd) for odd in ODD_DECODES),
    ],
    "prefill": [
        *((check_prefill, shape) for shape in PREFILLS),
        *((check_short_prefill, shape) for shape in SHORT_PREFILLS),
        *((check_odd_prefill, odd) for odd in ODD_PREFILLS),
    ],
    "rot_decode": [(check_coded, given) for given in CODED],
    "rot_pages": [
        *((check_blocks, blocks) for blocks in BLOCKS),
        *((check_odd_blocks, number) for number in ODD_BLOCKS),
    ],
    "merge": [(check_merge, kind) for kind in MERGES],
    "pages": [
        (check, shape)
        for check, shapes in (
            (check_store, STORES),
            (check_copy, COPIES),
            (check_long_copy, LONG_COPIES),
            (check_runs, RUNS),
            (check_summary, SUMMARIES),
            (check_odd_summary, ODD_SUMMARIES),
        )
        for shape in shapes
    ],
    "sparse": [
        (check, shape)
        for check, shapes in (
            (check_bound, BOUNDS),
            (check_score, SCORES),
            (check_choose, CHOICES),
            (check_resolve, RESOLVES),
            (check_fetch, FETCHES),
        )
        for shape in shapes
    ],
    "hash": [(check_sums, spans) for spans in SUMS],
    "read": [(check_read, shape) for shape in READS],
}
"""By the source file of the kernels."""
BEYOND: dict[str, list[tuple[Callable[..., None], Any]]] = {
    "decode": [(check_decode, MANY), *((check_far_decode, shape) for shape in FAR_DECODES)],
    "prefill": [(check_far_prefill, shape) for shape in FAR_PREFILLS],
    "pages": [(check_far_pages, "bf16")],
}
"""Cases that take too long under sanitizers, by source file too."""


def main() -> int:
    """Returns 1 if a result is wrong. Exit codes: emulator 97, race detectors 66; a limit gives SIGKILL."""
    parser = argparse.ArgumentParser(description="Runs small cases of the kernels of an emulated library.")
    parser.add_argument("library", type=Path)
    parser.add_argument("--unit", action="append", choices=UNITS, help="of this source file alone")
    parser.add_argument("--head-dim", type=int, default=64, help="of decode and prefill")
    parser.add_argument("--orders", default="0", help="of threads, as in SIMT_ORDER")
    parser.add_argument(
        "--beyond", action="store_true", help="large batches and pages far apart too, in the first order"
    )
    parser.add_argument("--cpu-limit-s", type=int, default=resource.RLIM_INFINITY, help="for kernels that may hang")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CPU, (given.cpu_limit_s, given.cpu_limit_s))
    library, units = Emulated(given.library), given.unit or UNITS
    for i, order in enumerate(given.orders.split(",")):
        os.environ["SIMT_ORDER"] = order
        more = (BEYOND.get(unit, []) for unit in units if given.beyond and i == 0)
        for check, shape in chain(*(UNITS[unit] for unit in units), *more):
            try:
                check(library, _of_dim(shape, given.head_dim))
            except AssertionError as error:
                print(f"{check.__name__}, order {order}: {str(error).strip().splitlines()[0]}")
                return 1
    print("all right")
    return 0


def _of_dim(shape: Any, head_dim: int) -> Any:
    """A shape of attention with this head dim; any other shape unchanged."""
    if isinstance(shape, tuple):
        return tuple(_of_dim(part, head_dim) for part in shape)
    if isinstance(shape, Blocks):
        return replace(shape, head_dim=head_dim)
    if isinstance(shape, Odd | Coded):
        return replace(shape, shape=_of_dim(shape.shape, head_dim))
    return replace(shape, head_dim=head_dim) if isinstance(shape, Shape) else shape


if __name__ == "__main__":
    sys.exit(main())
