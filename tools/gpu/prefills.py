"""Prefill and the merge of parts on the GPU against the reference in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from tests.unit.kernels.kernel_cases import (
    MERGES,
    PREFILLS,
    SHORT_PREFILLS,
    Narrow,
    Shape,
    check_merge,
    check_prefill,
    check_short_prefill,
)
from tests.unit.kernels.nan_cases import ODD_PREFILLS, check_odd_prefill
from tools.gpu.bench import Bench
from tools.gpu.decodes import DIMS, LEAST_SHARED_BYTES, TYPES
from tools.gpu.families import Case, family
from tools.gpu.results import Result

MIXED = ((20, 60), (17, 17), (1, 30))
GROUPS = (1, 3, 8, 16)
WINDOWS = ((0, 1), (4, 20), (16, 7), (3, 1000))


def results(bench: Bench) -> Iterator[Result]:
    """A check for each family."""
    library = bench.gpu().kernels
    for name, shapes in (_small() if bench.is_small else _full()).items():
        yield family(bench, library, name, ((check_prefill, shape) for shape in shapes))
    yield family(bench, library, "prefill_odd", _odd(bench.pick(len(ODD_PREFILLS), 1)))
    yield family(bench, library, "prefill_narrow", bench.pick(list(_narrow(DIMS)), [(_check_least, PREFILLS[0])]))
    yield family(bench, library, "merge", ((check_merge, kind) for kind in MERGES))


def _full() -> dict[str, list[Shape]]:
    return {
        "prefill_types": [Shape(MIXED, types, dim, seed=dim) for types in TYPES for dim in DIMS],
        "prefill_groups": [
            *(Shape(((30, 41), (0, 9), (5, 5)), group=n, kv_heads=1, page_tokens=32) for n in GROUPS),
            *(Shape(((40, 130), (9, 9)), sinks=sinks, window=window, group=2) for sinks, window in WINDOWS),
            *(Shape(((40, 500), (20, 20)), page_tokens=n, chosen=3, group=2) for n in (16, 64)),
        ],
        "prefill_long": [
            Shape(((600, 2000), (1, 900), (333, 333)), head_dim=128),
            Shape(((1000, 1000), (64, 3000)), ("f16", "e4m3"), head_dim=128, group=2, page_tokens=64),
        ],
    }


def _narrow(dims: Iterable[int]) -> Iterator[Case]:
    """As on GPUs whose blocks have less shared memory: every type."""
    for types, dim in itertools.product(TYPES, dims):
        yield _check_least, Shape(((20, 150), (9, 9)), types, dim, seed=dim)


def _odd(count: int) -> Iterator[Case]:
    """This many of either."""
    yield from ((check_odd_prefill, odd) for odd in ODD_PREFILLS[:count])
    yield from ((check_short_prefill, shape) for shape in SHORT_PREFILLS[:count])


def _check_least(library: Any, shape: Shape) -> None:
    check_prefill(Narrow(library, LEAST_SHARED_BYTES), shape)


def _small() -> dict[str, list[Shape]]:
    names = ("prefill_types", "prefill_groups", "prefill_long")
    return {name: [PREFILLS[i % len(PREFILLS)]] for i, name in enumerate(names)}
