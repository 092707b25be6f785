"""NaN and infinity in queries, keys and values reach the result and never count as "no token seen".

Non-purpose: memory that must not be read, which is NaN in every case of `kernel_cases`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tests.unit.kernels.kernel_cases import (
    TYPES,
    Case,
    Shape,
    allocate,
    check,
    decoded,
    expected,
    made,
    placed,
    prefilled,
)
from tests.unit.kernels.page_cases import HEADS, TOKENS, Summary
from tierd.kernels import Attended, reference
from tierd.kernels.library import Library
from tierd.kernels.pages import summarize_pages

BEYOND_F16 = 65_536.0
"""A number of bf16 that fp16 cannot represent."""


@dataclass(frozen=True)
class Odd:
    """A shape with one odd number. token: its token; for a query, its channel from the end.
    Values of `where`: `key`, a token's channel; `keys`, all tokens; `value`; `query`, with negative
    keys. Keys of `nothing` have scores of -inf, so they weigh like unseen tokens."""

    shape: Shape
    where: str
    number: float = np.nan
    token: int = 0


def check_odd_decode(library: Library, odd: Odd) -> None:
    """By one block, and by so many that one part of a row alone has the number. Raises AssertionError."""
    for blocks in (1, 9):
        _check(library, odd, lambda case, blocks=blocks: decoded(library, case, blocks=blocks))


def check_odd_prefill(library: Library, odd: Odd) -> None:
    """The same for chunks. Raises AssertionError."""
    _check(library, odd, lambda case: prefilled(library, case))


def _check(library: Library, odd: Odd, attend: Callable[[Case], Attended]) -> None:
    case = _made(odd)
    got = attend(case)
    if odd.where != "query":
        check(case, got)
        return
    # The first row's second head sees all tokens and must give NaN, whatever the reference gives
    # beyond fp16.
    assert np.isnan(got.lse[0, 1]) and np.isnan(got.out[0, 1].astype(np.float32)).all(), f"{odd}: a number came out"
    others = np.ones(got.lse.shape, bool)
    others[0, 1] = False
    want = expected(case)
    np.testing.assert_allclose(got.lse[others], want.lse[others], atol=1e-5, err_msg=str(odd))
    assert not np.isnan(got.out[others].astype(np.float32)).any(), f"{odd}: others' results are none"


def _made(odd: Odd) -> Case:
    """The case with the odd number in sequence 0 and kv head 1, or in the first kv head's queries."""
    case = made(odd.shape)
    table, page_tokens, channel = case.batch.tables[0], odd.shape.page_tokens, odd.shape.head_dim - 3
    if odd.where == "query":
        channel -= odd.token
    if odd.where == "query":
        keys = case.pool[:, 0, :, 0, channel].astype(np.float32)
        case.pool[:, 0, :, 0, channel] = -np.abs(keys) - 0.25
        case.q[0, 1, channel] = odd.number
    elif odd.where == "nothing":
        case.pool[table, 0, :, 1, channel] = -np.copysign(np.float32(np.inf), case.q[0, 1, channel].astype(np.float32))
    elif odd.where == "keys":
        for i in range(case.batch.kv_lens[0]):
            case.pool[table[i // page_tokens], 0, i % page_tokens, 1, channel] = odd.number
    else:
        kind = 0 if odd.where == "key" else 1
        case.pool[table[odd.token // page_tokens], kind, odd.token % page_tokens, 1, channel] = odd.number
    return replace(case)


def check_odd_summary(library: Library, kind: str) -> None:
    """Bounds of a channel with one NaN token are NaN; others are unchanged. Raises AssertionError."""
    shape = Summary(kind=kind)
    rng = np.random.default_rng(4)
    keys = np.zeros((2, TOKENS, HEADS, shape.dim), np.float32)
    keys[:] = rng.standard_normal(keys.shape)
    keys[0, 0, 0, 1] = keys[0, 9, 1, 2] = keys[1, 3, 0, 0] = keys[1, 12, 0, 5] = (
        np.nan
    )  # the last is of no token that is there
    keys, pages, tokens = keys.astype(TYPES[kind]), np.array([1, 0], np.int32), np.array([5, TOKENS], np.int32)
    to = allocate((2, HEADS, 2, shape.dim), "float32")
    with placed(library) as put:
        summarize_pages(library, put(keys), put(pages), tokens=put(tokens), to=put(to))
    np.testing.assert_array_equal(to, reference.summarize_pages(keys, pages, tokens.tolist()))
    assert np.isnan(to).sum() == 6


LONG = Shape(((1, 300), (1, 40)))
ODD_DECODES = (
    *(Odd(LONG, "key", number, token) for number, token in ((np.nan, 0), (np.nan, 299), (np.inf, 130), (-np.inf, 7))),
    Odd(LONG, "keys"),
    Odd(Shape(((1, 90), (1, 40)), group=1), "nothing"),
    Odd(LONG, "value", token=250),
    Odd(Shape(((1, 90), (1, 40)), types=("f16", "e4m3"), group=9), "key", token=33),
    Odd(Shape(((1, 90), (1, 40)), types=("bf16", "e4m3")), "query", BEYOND_F16),
    Odd(Shape(((1, 90), (1, 40)), types=("bf16", "e4m3"), group=9), "query", -3e38),
    Odd(Shape(((1, 90), (1, 40)), types=("f16", "f16")), "query", np.inf),
    Odd(Shape(((1, 90), (1, 40))), "query", np.inf),
    Odd(LONG, "query", np.nan),
)
ODD_PREFILLS = (
    *(
        Odd(Shape(((5, 90), (3, 3))), "key", number, token)
        for number, token in ((np.nan, 0), (np.nan, 89), (np.inf, 40))
    ),
    Odd(Shape(((5, 90), (3, 3))), "keys"),
    Odd(Shape(((5, 90), (3, 3)), types=("f16", "e4m3")), "value", token=20),
    Odd(Shape(((5, 90), (3, 3)), types=("bf16", "e4m3")), "query", BEYOND_F16),
    Odd(Shape(((5, 90), (3, 3)), types=("f16", "f16")), "query", np.inf, token=8),
    Odd(Shape(((5, 90), (3, 3))), "query", np.inf),
)
ODD_SUMMARIES = ("bf16", "f16", "e4m3")
"""A case of each kind and place."""
