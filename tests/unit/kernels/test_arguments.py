"""Arguments of decode calls: every call checks them, and only the first of a kind prepares its launch."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.kernels.kernel_cases import Case, Shape, allocate, check, made
from tierd.errors import InvalidArgument
from tierd.kernels import Attended
from tierd.kernels.buffers import Buffer
from tierd.kernels.library import Emulated
from tierd.kernels.paged import Chunks, DecodeShape, PagedDecode, merge_parts, merge_scattered, paged_prefill
from tierd.kernels.pages import Place, copy_pages, copy_runs
from tierd.kernels.prepared import KEPT, Kept, Prepared

SHAPE = Shape(((1, 20), (1, 5)))


class Nothing:
    """A library that records its launches and launches nothing."""

    device = "cpu"
    block_shared_bytes = 232_448

    def __init__(self) -> None:
        self.launched: list[str] = []

    def launch(self, kernel: str, grid: Sequence[int], told: Structure, *, shared_bytes: int = 0) -> None:
        """Records the kernel only."""
        self.launched.append(kernel)


def moved(array: Any, by_bytes: int) -> Any:
    """A copy of the array that begins this many bytes after a multiple of 16."""
    room = np.empty(array.nbytes + 32, np.uint8)
    first = -room.ctypes.data % 16 + by_bytes
    there = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    there[:] = array
    return there


def wide(array: Any) -> Any:
    """The same values with a gap behind each."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


WRONG: dict[str, Any] = {
    "q: has type": lambda given: given["q"].astype(np.float32),
    "q: has shape": lambda given: given["q"][:, :, :32].copy(),
    "q: axis 2": lambda given: wide(given["q"]),
    "q: address": lambda given: moved(given["q"], 8),
    "out: address": lambda given: moved(given["out"], 8),
    "q: 5 sequences": lambda given: np.repeat(given["q"], 3, axis=0)[:5],
    "q: list": lambda given: given["q"].tolist(),
    "q: has shape []": lambda _: np.zeros((), np.float32),
    "pages.k: has shape": lambda given: replace(given["pages"], k=given["pages"].k[..., ::2]),
    "pages.k: address": lambda given: with_pages(given, moved(given["pages"].k, 8)),
    "pages.k: pages of 8": lambda given: with_pages(given, given["pages"].k[:, :8]),
    "pages.v: shape": lambda given: replace(given["pages"], v=given["pages"].v[:, :8]),
    "pages.k_scales": lambda given: replace(given["pages"], k_scales=np.ones(3, np.float32)),
    "batch.kv_lens": lambda given: replace(given["batch"], kv_lens=given["batch"].kv_lens.astype(np.int64)),
    "batch.tables": lambda given: replace(given["batch"], tables=given["batch"].tables[:1]),
    "batch.tables: axis 1": lambda given: replace(given["batch"], tables=wide(given["batch"].tables)),
    "batch.subset_sizes": lambda given: replace(given["batch"], subset_sizes=np.zeros((2, 2), np.int32)),
    "batch.subsets": lambda given: replace(given["batch"], subsets=np.zeros((2, 2), np.int32)),
    "batch: ": lambda given: replace(given["batch"], window=-3),
    "out": lambda given: given["out"][:, ::2],
    "lse": lambda given: given["lse"].astype(np.float64),
    "lse: NoneType": lambda _: None,
    "mass": lambda _: allocate((2, 8, 9), "float32"),
}


def with_pages(given: dict[str, Any], k: Any) -> Any:
    """The same array as keys and values."""
    return replace(given["pages"], k=k, v=k)


def right(case: Case) -> dict[str, Any]:
    """Arguments of a call."""
    n, heads, _ = case.q.shape
    out, lse = np.empty_like(case.q), allocate((n, heads), "float32")
    return {"q": case.q, "pages": case.pages, "batch": case.device, "out": out, "lse": lse}


def asked(decode: PagedDecode, given: dict[str, Any]) -> Attended:
    """Calls the decode with them."""
    to = Attended(given["out"], given["lse"], given.get("mass"))
    return decode(given["q"], given["pages"], given["batch"], to)


def decoding(library: Any, case: Case) -> PagedDecode:
    """A decode for twice as many sequences."""
    n, heads, dim = case.q.shape
    return PagedDecode(library, DecodeShape(2 * n, heads, case.shape.kv_heads, dim), blocks=3, allocate=allocate)


@pytest.mark.parametrize("is_known", [False, True], ids=["first", "after a right one"])
@pytest.mark.parametrize("said", WRONG)
def test_an_argument_that_does_not_fit_is_named(said: str, is_known: bool) -> None:
    """Every call checks shapes, types, strides, places and alignment before a kernel sees an address."""
    case, library = made(SHAPE), Nothing()
    decode, given = decoding(library, case), right(made(SHAPE))
    if is_known:
        asked(decode, given)
    library.launched.clear()
    given[said.partition(":")[0].partition(".")[0]] = WRONG[said](given)
    with pytest.raises(InvalidArgument) as caught:
        asked(decode, given)
    assert str(caught.value).startswith(said)
    assert library.launched == []


OTHERS: dict[str, Any] = {
    "q: has shape [2, 64]": lambda given: prefill(given, q=given["q"][:, 0]),
    "pages.k: has shape": lambda given: prefill(given, pages=replace(given["pages"], k=given["pages"].k[0])),
    "batch.kv_lens: list": lambda given: prefill(given, batch=replace(given["batch"], kv_lens=[20, 5])),
    "batch.kv_lens: has shape []": lambda given: prefill(given, batch=replace(given["batch"], kv_lens=np.int32(2))),
    "chunks.starts: has shape [2]": lambda given: prefill(given, starts=2),
    "outs: has shape": lambda given: merge_parts(Nothing(), given["q"], given["lse"], Attended(None, None)),
    "outs: list": lambda given: merge_parts(Nothing(), [1.0], given["lse"], Attended(None, None)),
    "lses: has shape": lambda given: merge_parts(Nothing(), given["q"][None], given["lse"], Attended(None, None)),
    "parts: there are none": lambda given: scattered(given, parts=[]),
    "parts[1].out: has shape": lambda given: scattered(
        given, parts=[done(given), Attended(given["q"][:1], given["lse"])]
    ),
    "parts[1].lse: has shape": lambda given: scattered(
        given, parts=[done(given), Attended(given["q"], given["lse"][:1])]
    ),
    "parts[0].lse: has shape": lambda given: scattered(given, parts=[Attended(given["q"], given["lse"][:, :1])]),
    "parts[0].out: is on cuda:0": lambda given: scattered(given, parts=[away(given), away(given)]),
    "parts[1].out: is on cuda:0": lambda given: scattered(given, parts=[done(given), away(given)]),
    "addresses: has shape [2, 2]": lambda given: scattered(given, parts=[done(given)]),
    "addresses: has type i32": lambda given: scattered(given, addresses=np.zeros((2, 2), np.int32)),
    "out: has shape": lambda given: scattered(given, to=Attended(given["out"][:1], given["lse"])),
    "lse: has shape": lambda given: scattered(given, to=Attended(given["out"], given["lse"][:1])),
}


def done(given: dict[str, Any]) -> Attended:
    """A part."""
    return Attended(given["q"], given["lse"])


def away(given: dict[str, Any]) -> Attended:
    """A part on a GPU."""
    out, lse = (replace(Buffer.of("", array), device="cuda:0") for array in (given["q"], given["lse"]))
    return Attended(out, lse)


def scattered(given: dict[str, Any], **changes: Any) -> None:
    """A merge of two parts whose arguments are right except for the changes."""
    right_ones = {"parts": [done(given)] * 2, "addresses": np.zeros((2, 2), np.int64), "to": done(given)}
    merge_scattered(Nothing(), **(right_ones | changes))


def prefill(given: dict[str, Any], *, starts: int = 3, **changes: Any) -> None:
    """A call whose arguments are right except for the changes."""
    new = given | changes
    chunks, to = Chunks(new["q"], np.arange(starts, dtype=np.int32), 1), Attended(new["out"], new["lse"])
    paged_prefill(Nothing(), chunks, new["pages"], new["batch"], to)


@pytest.mark.parametrize("said", OTHERS)
def test_arguments_of_prefills_and_merges_are_named_too(said: str) -> None:
    """An argument with too few axes, or that is not an array, is refused like one with wrong lengths."""
    given = right(made(SHAPE))
    prefill(given)
    scattered(given)
    with pytest.raises(InvalidArgument) as caught:
        OTHERS[said](given)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(("heads", "dim"), [((7, 2), 64), ((34, 2), 64), ((8, 2), 80)])
def test_shapes_that_no_kernel_has(heads: tuple[int, int], dim: int) -> None:
    """Groups that do not divide or are too large, and other head dims, are refused when a decode is made."""
    with pytest.raises(InvalidArgument, match="^q: "):
        PagedDecode(Nothing(), DecodeShape(1, *heads, dim), blocks=1, allocate=allocate)


@pytest.mark.parametrize("blocks", [0, -1])
def test_somebody_must_do_the_work(blocks: int) -> None:
    """A decode or a copy without thread blocks, which would return stale results, is refused."""
    place = Place(np.zeros((1, 1, 2, 16, 2, 64), np.float16))
    runs = np.zeros(1, np.uint64)
    for call in (
        lambda: PagedDecode(Nothing(), DecodeShape(2, 8, 2, 64), blocks=blocks, allocate=allocate),
        lambda: copy_pages(Nothing(), place, place, blocks=blocks),
        lambda: copy_runs(Nothing(), runs, runs, lengths=np.zeros(1, np.uint32), blocks=blocks),
    ):
        with pytest.raises(InvalidArgument, match=f"^blocks: {blocks}"):
            call()


def test_too_little_shared_memory_is_said_before_anything_is_launched() -> None:
    """The error names the argument, a block's limit and the remedy."""
    library, case = Nothing(), made(SHAPE)
    library.block_shared_bytes = 16_384
    decode = decoding(library, case)
    library.launched.clear()
    with pytest.raises(
        InvalidArgument, match=r"^q: head_dim 64 of bf16 .* a block of cpu has 16384; give pages of e4m3"
    ):
        asked(decode, right(case))
    assert library.launched == []


def test_a_later_call_uses_its_own_arrays(library: Emulated) -> None:
    """Calls with alike arrays at other places, with masses or without, each get their own result."""
    cases = [made(replace(SHAPE, seed=seed)) for seed in range(3)]
    decode = decoding(library, cases[0])
    rooms = [(right(case), allocate((2, 8, case.device.tables.shape[1]), "float32")) for case in cases]
    for with_mass in (False, True, False, True):
        for case, (given, mass) in zip(cases, rooms, strict=True):
            for array in (given["out"], given["lse"], mass):
                array[:] = np.nan
            check(case, asked(decode, given | ({"mass": mass} if with_mass else {})))
            assert np.isnan(mass).all() or with_mass


def test_numbers_are_not_those_of_an_earlier_call(library: Emulated) -> None:
    """Windows, sinks and the scale of scores apply per call, with the same arrays."""
    plain, scaled = made(Shape(((1, 100), (1, 70)))), made(Shape(((1, 100), (1, 70))))
    scaled.q = (plain.q * 2).astype(plain.q.dtype)
    decode = decoding(library, plain)
    for sinks, window in ((0, 0), (4, 20), (0, 20), (0, 0)):
        for case in (plain, scaled):
            case.batch = replace(case.batch, sinks=sinks, window=window)
            case.device = replace(case.device, sinks=sinks, window=window)
        given = right(plain)
        check(plain, asked(decode, given))
        given["batch"] = replace(plain.device, scale=2 / 8)
        check(scaled, asked(decode, given))


def test_growing_tables_do_not_pile_up() -> None:
    """A decode with masses and growing tables keeps at most four times the memory of the longest."""
    made_bytes: list[int] = []

    def counted(shape: tuple[int, ...], dtype: str) -> Any:
        made_bytes.append(int(np.prod(shape)) * 4)
        return allocate(shape, dtype)

    case = made(SHAPE)
    decode = PagedDecode(Nothing(), DecodeShape(2, 8, case.shape.kv_heads, 64), blocks=3, allocate=counted)
    before, longest, given = sum(made_bytes), 300, right(case)
    for pages in range(2, longest + 1):
        given["batch"] = replace(case.device, tables=np.zeros((2, pages), np.int32))
        asked(decode, given | {"mass": allocate((2, 8, pages), "float32")})
    assert sum(made_bytes) - before <= 4 * (2 * 8 * longest * 4)


def test_what_is_kept_has_a_bound() -> None:
    """The oldest entry is dropped, newer ones are made once, and a failed one is tried again."""
    kept, made_so_far = Kept(), list[int]()

    def make(layout: int) -> Prepared:
        made_so_far.append(layout)
        return Prepared([], [])

    for layout in [*range(KEPT + 1), *range(1, KEPT + 1)]:
        kept.find_or_make(layout, lambda layout=layout: make(layout))
    assert made_so_far == list(range(KEPT + 1))
    kept.find_or_make(0, lambda: make(0))
    assert made_so_far[-1] == 0

    def refused() -> Prepared:
        raise InvalidArgument("q: no")

    for _ in range(2):
        with pytest.raises(InvalidArgument):
            kept.find_or_make("other", refused)


@pytest.mark.parametrize("longest", [0, 9, -3])
def test_a_longest_sequence_that_cannot_be_is_refused(longest: int) -> None:
    """A longest sequence too short for the query tokens is refused with both numbers before any launch."""
    case, library = made(Shape(((15, 20), (5, 5)))), Nothing()
    to = Attended(np.empty_like(case.q), allocate(case.q.shape[:2], "float32"))
    chunks = Chunks(case.q, np.array(case.batch.query_starts, np.int32), longest)
    with pytest.raises(
        InvalidArgument, match=rf"^chunks\.longest: 2 sequences of at most {longest} tokens have no 20; give"
    ):
        paged_prefill(library, chunks, case.pages, case.device, to)
    assert library.launched == []
