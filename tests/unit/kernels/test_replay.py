"""Replays of a captured graph: the same launches, with other lengths, tables and places in the arrays."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import DECODES, Case, Shape, allocate, check, made
from tests.unit.kernels.page_cases import poison
from tierd.kernels import Attended, merge_attention, params, reference
from tierd.kernels.library import Emulated
from tierd.kernels.paged import Chunks, DecodeShape, PagedDecode, merge_parts, paged_prefill
from tierd.kernels.pages import KvPages, store_tokens

Array = np.ndarray[Any, Any]
Launch = tuple[str, tuple[int, ...], int, bytes]


class Graph:
    """A library that records each launch: kernel, grid, shared bytes, parameters."""

    device = "cpu"

    def __init__(self, library: Emulated) -> None:
        self._library, self.block_shared_bytes = library, library.block_shared_bytes
        self.launches: list[Launch] = []

    def launch(self, kernel: str, grid: Sequence[int], told: Structure, *, shared_bytes: int = 0) -> None:
        """See Library."""
        self.launches.append((kernel, tuple(grid), shared_bytes, bytes(told)))
        self._library.launch(kernel, grid, told, shared_bytes=shared_bytes)

    def resident_blocks(self, kernel: str, *, shared_bytes: int = 0) -> int:
        """See Library."""
        return self._library.resident_blocks(kernel, shared_bytes=shared_bytes)

    def replay(self) -> None:
        """Repeats all launches, and nothing else."""
        for kernel, grid, shared_bytes, told in self.launches:
            kind = next(kind for name, kind in KINDS.items() if kernel.startswith(name))
            self._library.launch(kernel, grid, kind.from_buffer_copy(told), shared_bytes=shared_bytes)


KINDS: dict[str, type[Structure]] = {
    "decode_clear": params.Clear,
    "decode_page_mass": params.Mass,
    "decode": params.Decode,
    "prefill": params.Prefill,
    "merge": params.Merge,
    "store": params.Store,
}
"""The kind of parameters by the beginning of a kernel's name; the first match counts."""


def room(case: Case, *, with_mass: bool) -> Attended:
    """Outputs of poison."""
    rows, heads, _ = case.q.shape
    mass: Any = allocate((rows, heads, case.device.tables.shape[1]), "float32") if with_mass else None
    return Attended(np.full(case.q.shape, np.nan, case.q.dtype), allocate((rows, heads), "float32"), mass)


def poisoned(to: Attended) -> None:
    """Overwrites the previous results with NaN."""
    arrays: tuple[Any, ...] = (to.out, to.lse, to.mass)
    for array in arrays:
        if array is not None:
            array[:] = np.nan


def told(case: Case, lens: Sequence[int], *, swapped: bool = False) -> None:
    """Writes other lengths, and optionally swapped tables, to the arrays that the kernels were given."""
    case.device.kv_lens[:] = lens
    case.batch = replace(case.batch, kv_lens=list(lens))
    if swapped:
        case.device.tables[:] = case.device.tables[::-1].copy()
        case.batch = replace(case.batch, tables=case.batch.tables[::-1])


def decoding(case: Case, graph: Graph, allocated: Any = allocate) -> PagedDecode:
    """A decode for the case's sequences."""
    n, heads, dim = case.q.shape
    return PagedDecode(graph, DecodeShape(n, heads, case.shape.kv_heads, dim), blocks=3, allocate=allocated)


@pytest.mark.parametrize("limits", [{}, {"sinks": 4, "window": 50}, {"chosen": 3}], ids=str)
def test_decode_replays_with_other_lengths_and_tables(library: Emulated, limits: dict[str, int]) -> None:
    """A decode captured at short lengths is right for longer ones, none, and swapped tables."""
    case, graph = made(Shape(((1, 300), (1, 200)), **limits)), Graph(library)  # type: ignore[arg-type]
    to, decode = room(case, with_mass=True), decoding(case, graph)
    told(case, [17, 1])
    check(case, decode(case.q, case.pages, case.device, to))
    graph.launches = [one for one in graph.launches if one[0] != "decode_clear"]
    captured = list(graph.launches)
    for lens in ([180, 64], [0, 33], [300, 200]):
        told(case, lens)
        poisoned(to)
        graph.replay()
        check(case, to)
    if not limits.get("chosen"):
        told(case, [200, 300], swapped=True)
        poisoned(to)
        graph.replay()
        check(case, to)
    graph.launches.clear()
    decode(case.q, case.pages, case.device, to)
    assert graph.launches == captured


def test_what_a_graph_holds_stays(library: Emulated) -> None:
    """Masses of larger tables allocate more memory; a captured graph keeps its smaller arrays."""
    made_so_far: list[weakref.ref[Array]] = []

    def noted(shape: tuple[int, ...], dtype: str) -> Array:
        array = allocate(shape, dtype)
        made_so_far.append(weakref.ref(array))
        return array

    small, large, graph = made(DECODES[0]), made(Shape(((1, 600), (1, 0), (1, 3)))), Graph(library)
    decode, to = decoding(small, graph, noted), room(small, with_mass=True)
    check(small, decode(small.q, small.pages, small.device, to))
    captured = [one for one in graph.launches if one[0] != "decode_clear"]
    check(large, decode(large.q, large.pages, large.device, room(large, with_mass=True)))
    assert len(made_so_far) == 6
    assert all(array() is not None for array in made_so_far)
    graph.launches = captured
    poisoned(to)
    graph.replay()
    check(small, to)


def test_prefill_replays_with_other_lengths_and_cuts(library: Emulated) -> None:
    """A captured prefill is right for other cuts and pasts, up to the longest chunk of the capture."""
    case, graph = made(Shape(((20, 60), (17, 200)), group=3)), Graph(library)
    starts, to = np.array([0, 20, 37], np.int32), room(case, with_mass=False)

    def launched() -> None:
        paged_prefill(graph, Chunks(case.q, starts, 30), case.pages, case.device, to)

    told(case, [20, 17])
    launched()
    check(case, to)
    captured = [one for one in graph.launches if one[0] != "decode_clear"]
    for cuts, lens in (([0, 20, 37], [60, 200]), ([0, 7, 37], [50, 31]), ([0, 30, 37], [30, 130])):
        told(case, lens)
        starts[:] = cuts
        case.batch = replace(case.batch, query_starts=cuts)
        poisoned(to)
        graph.replay()
        check(case, to)
    graph.launches.clear()
    launched()
    assert graph.launches == captured


def test_merge_and_store_replay_with_other_numbers(library: Emulated) -> None:
    """A captured merge and store are right for other parts, one now empty, and other slots, some negative."""
    rng, graph = np.random.default_rng(0), Graph(library)
    outs, lses = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 2, 64), (2, 5, 2)))
    to = Attended(allocate((5, 2, 64), "float32"), allocate((5, 2), "float32"))
    k, v = (rng.standard_normal((6, 2, 64)).astype(np.float16) for _ in range(2))
    slots, pool = np.arange(6), poison((4, 2, 16, 2, 64), "f16")
    merge_parts(graph, outs, lses, to)
    store_tokens(graph, k, v, slots, KvPages(pool[:, 0], pool[:, 1]))
    outs[:], lses[0, 3] = outs[::-1].copy(), -np.inf
    slots[:], pool.view(np.uint8)[:] = [40, -1, 3, 17, -5, 63], 0xFF
    poisoned(to)
    graph.replay()
    want = merge_attention(outs.astype(np.float64), lses.astype(np.float64))
    np.testing.assert_allclose(to.out, want.out, atol=1e-6)
    np.testing.assert_allclose(to.lse, want.lse, atol=1e-5)
    stored = poison(pool.shape, "f16")
    for side, values in enumerate((k, v)):
        reference.store_tokens(values, slots.tolist(), stored[:, side])
    assert pool.tobytes() == stored.tobytes()
