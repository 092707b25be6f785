"""Decode on the GPU against the reference in float64: every type, head dim, group and page size,
windows, chosen pages, long ragged batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tests.unit.kernels.kernel_cases import (
    CUT_DECODES,
    DECODES,
    NARROW_DECODES,
    Narrow,
    Shape,
    check,
    check_narrow_decode,
    decoded,
    expected,
    made,
)
from tests.unit.kernels.nan_cases import ODD_DECODES, check_odd_decode
from tools.gpu.bench import Bench
from tools.gpu.families import Case, family
from tools.gpu.results import Result, Row

TYPES = (("bf16", "bf16"), ("f16", "f16"), ("bf16", "e4m3"), ("f16", "e4m3"))
DIMS = (64, 96, 128, 256)
LEAST_SHARED_BYTES = 101_376
"""Shared memory of a block of sm_86, 89 and 120: 99 KiB."""
RAGGED = ((1, 133), (1, 0), (1, 1), (1, 16), (1, 300))
WINDOWS = ((0, 1), (4, 100), (40, 33), (16, 16), (3, 1000))
SPARSE = ((1, 500), (1, 20), (1, 3), (1, 0), (1, 700))


def results(bench: Bench) -> Iterator[Result]:
    """A check for each family."""
    gpu = bench.gpu()
    many = 2 * gpu.multiprocessors
    for name, shapes in (_small() if bench.is_small else _full()).items():
        yield family(bench, gpu.kernels, name, _by_blocks(shapes, (3, 7, many)))
    odd = [(check_odd_decode, odd) for odd in ODD_DECODES[: bench.pick(len(ODD_DECODES), 1)]]
    yield family(bench, gpu.kernels, "decode_odd", odd)
    yield family(bench, gpu.kernels, "decode_narrow", _narrow(bench.pick(DIMS, ())))
    yield _flat(bench, gpu.kernels)
    cut = [(_of(blocks), Shape(((1, 500), (1, 20), (1, 40)))) for blocks in (1, 2, 7, 64, many)]
    cut += [(_of(blocks), shape) for blocks, shape in CUT_DECODES]
    yield family(bench, gpu.kernels, "decode_blocks", cut[: bench.pick(len(cut), 1)])


def _flat(bench: Bench, library: Any) -> Row:
    """Nearly equal weights, whose rounding does not cancel; queries are a quarter of the others'."""
    case = made(Shape(((1, bench.pick(20_000, 300)),), head_dim=bench.pick(128, 64)))
    case.q = (case.q.astype(np.float32) / 4).astype(case.q.dtype)
    got, want = decoded(library, case, blocks=7), expected(case)
    distance = float(np.linalg.norm(got.out.astype(np.float64) - want.out) / np.linalg.norm(want.out))
    return Row("decode_flat", distance, "relative L2")


def _full() -> dict[str, list[Shape]]:
    rng = np.random.default_rng(11)
    crowd = tuple((1, int(length)) for length in np.exp(rng.uniform(0, np.log(3000), 64)))
    return {
        "decode_types": [Shape(RAGGED, types, dim, seed=dim) for types in TYPES for dim in DIMS],
        "decode_groups": [Shape(((1, 70), (1, 33)), group=n, kv_heads=1, seed=n) for n in range(1, 17)],
        "decode_pages": [Shape(((1, 300), (1, n), (1, n + 1)), page_tokens=n) for n in (16, 32, 64, 128, 256)],
        "decode_windows": [
            *(Shape(SPARSE, sinks=sinks, window=window) for sinks, window in WINDOWS),
            *(Shape(SPARSE, page_tokens=n, chosen=3) for n in (16, 64)),
        ],
        "decode_long": [
            Shape(((1, 20_000), (1, 0), (1, 7_777), (1, 1), (1, 513)), head_dim=128),
            Shape(crowd, head_dim=128, seed=1),
            Shape(crowd, ("f16", "e4m3"), head_dim=128, group=8, page_tokens=64, seed=2),
        ],
    }


def _small() -> dict[str, list[Shape]]:
    names = ("decode_types", "decode_groups", "decode_pages", "decode_windows", "decode_long")
    return {name: [DECODES[i % len(DECODES)]] for i, name in enumerate(names)}


def _narrow(dims: Iterable[int]) -> Iterator[Case]:
    """As on GPUs whose blocks have less memory: every type; other shapes always by the small ring."""
    for types, dim in itertools.product(TYPES, dims):
        yield _check_least, Shape(RAGGED, types, dim, seed=dim)
    for shape in NARROW_DECODES:
        yield check_narrow_decode, shape


def _check_least(library: Any, shape: Shape) -> None:
    _of(7)(Narrow(library, LEAST_SHARED_BYTES), shape)


def _by_blocks(shapes: list[Shape], counts: tuple[int, ...]) -> Iterator[Case]:
    """Each shape with another number of thread blocks."""
    for shape, blocks in zip(shapes, itertools.cycle(counts), strict=False):
        yield _of(blocks), shape


def _of(blocks: int) -> Callable[[Any, Shape], None]:
    def checked(library: Any, shape: Shape) -> None:
        case = made(shape)
        got = decoded(library, case, blocks=blocks)
        check(case, got)
        assert got.mass is not None
        for mass, (_, length) in zip(got.mass, shape.sequences, strict=True):
            sees = bool(length)
            assert np.abs(mass.sum(axis=-1) - sees).max() <= 1e-5, f"{shape}: page masses do not sum to {int(sees)}"

    return checked
