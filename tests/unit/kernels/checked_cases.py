"""Callers' mistakes in arrays, for kernels of a checked build. Each ends its process.

`python -m tests.unit.kernels.checked_cases LIBRARY NAME` runs one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.unit.kernels.kernel_cases import TYPES, Case, Shape, allocate, decoded, made, prefilled
from tierd.kernels import sparse
from tierd.kernels.library import Emulated
from tierd.kernels.pages import KvPages, Place, copy_pages, store_tokens, summarize_pages

PAGES, TOKENS, HEADS, DIM = 3, 16, 2, 64


@dataclass(frozen=True)
class Mistake:
    """unit: the source file of the kernel that detects it; said: part of the message."""

    unit: str
    said: str
    make: Callable[[Emulated], object]


def _attended(
    change: Callable[[Case], object], *, decodes: bool = True, chosen: int = 0
) -> Callable[[Emulated], object]:
    """A case whose second sequence has 3 pages of a pool of 16, and a table of 10."""
    rows = 1 if decodes else 5

    def run(library: Emulated) -> object:
        case = made(Shape(((rows, 133), (rows, 40), (rows, 7)), chosen=chosen))
        change(case)
        return (decoded if decodes else prefilled)(library, case)

    return run


def _id(page: int) -> Callable[[Case], object]:
    return lambda case: case.device.tables.__setitem__((1, 2), page)


def _pool() -> KvPages:
    return KvPages(*(np.zeros((PAGES, TOKENS, HEADS, DIM), TYPES["bf16"]) for _ in range(2)))


def _stored(slot: int) -> Callable[[Emulated], object]:
    new = np.zeros((2, HEADS, DIM), TYPES["bf16"])
    return lambda library: store_tokens(library, new, new, np.array([0, slot], np.int64), _pool())


def _copied(*pages: int, of_target: bool) -> Callable[[Emulated], object]:
    arrays = [np.zeros((PAGES, 1, 2, TOKENS, HEADS, DIM), TYPES["bf16"]) for _ in range(2)]
    named, plain = np.array(pages, np.int32), np.arange(len(pages), dtype=np.int32)

    def run(library: Emulated) -> object:
        of, to = (plain, named) if of_target else (named, plain)
        return copy_pages(library, Place(arrays[0], of), Place(arrays[1], to))

    return run


def _bounded(page: int, tokens: int) -> Callable[[Emulated], object]:
    to = allocate((1, HEADS, 2, DIM), "float32")
    given = [np.array([number], np.int32) for number in (page, tokens)]
    return lambda library: summarize_pages(library, _pool().k, given[0], tokens=given[1], to=to)


def _granule(slot: int) -> Callable[[Emulated], object]:
    slots, tokens = np.array([[0, 16, slot, 0]], np.int64), np.array([40], np.int32)
    to = np.zeros((1, HEADS, 2, DIM), TYPES["bf16"])
    return lambda library: sparse.bound_keys(library, _pool().k, slots, tokens=tokens, to=to)


def _scored(granule: int, count: int) -> Callable[[Emulated], object]:
    context = sparse.Context(np.array([[0, granule]], np.int32), np.array([count], np.int32))
    q, bounds = (np.zeros(shape, TYPES["bf16"]) for shape in ((1, HEADS, DIM), (5, HEADS, 2, DIM)))
    to = np.zeros((1, HEADS, 2), np.float32)
    return lambda library: sparse.score_granules(library, q, bounds, context, to=to)


def _too_long(case: Case) -> None:
    case.device.kv_lens[1] = 10 * 16 + 1


def _more_queries(case: Case) -> None:
    case.device.kv_lens[1] = 4


def _chosen_behind(case: Case) -> None:
    case.device.subsets[1, 1, 0] = 12


MISTAKES = {
    "decode-id": Mistake("decode", "row 1 of the tables, page 2: id 16, and the pool has 16 pages", _attended(_id(16))),
    "decode-negative": Mistake("decode", "row 1 of the tables, page 2: id -1", _attended(_id(-1))),
    "decode-length": Mistake(
        "decode", "row 1 of the tables: 161 tokens, and it has room for 10 pages of 16", _attended(_too_long)
    ),
    "decode-chosen": Mistake(
        "decode", "request 1, kv head 1: chosen page 12 of a table of 10", _attended(_chosen_behind, chosen=3)
    ),
    "prefill-id": Mistake("prefill", "row 1 of the tables, page 2: id 16", _attended(_id(16), decodes=False)),
    "prefill-queries": Mistake(
        "prefill", "sequence 1: 5 query tokens of 4, from the 5-th on", _attended(_more_queries, decodes=False)
    ),
    "store-slot": Mistake("pages", "token 1: slot 48, and the pool has 3 pages of 16 tokens", _stored(48)),
    "copy-source": Mistake("pages", "page 1 of a copy: id 3, and there are 3 pages", _copied(2, 3, of_target=False)),
    "copy-target": Mistake("pages", "page 0 of a copy: id -2, and there are 3 pages", _copied(-2, 0, of_target=True)),
    "bounds-id": Mistake("pages", "page 0 of bounds: id 7 and 1 tokens", _bounded(7, 1)),
    "granule-slot": Mistake("sparse", "granule 0 of bounds: slot 48, and the pool has 3 pages of 16", _granule(48)),
    "score-id": Mistake("sparse", "request 0, granule 1: id 5, and there are bounds of 5", _scored(5, 2)),
    "score-count": Mistake("sparse", "request 0: 3 granules, and its table has room for 2", _scored(0, 3)),
    "bounds-tokens": Mistake("pages", "page 0 of bounds: id 1 and 17 tokens", _bounded(1, 17)),
}


if __name__ == "__main__":
    MISTAKES[sys.argv[2]].make(Emulated(Path(sys.argv[1])))
    print("all right")
