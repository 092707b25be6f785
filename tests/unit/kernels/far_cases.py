"""Cases beyond the small ones: pages whose distances exceed 32 bits, and batches of many rows.

The pages are as far apart as in a GPU's pool of many GiB. The memory between them is untouched.
ThreadSanitizer scans its shadow of all that memory, so sanitizers do not run these cases.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import numpy as np

from tests.unit.kernels.kernel_cases import Shape, check, decoded, made, prefilled
from tests.unit.kernels.page_cases import HEADS, TOKENS, assert_same_bytes, poison
from tierd.kernels import reference
from tierd.kernels.library import Library
from tierd.kernels.pages import KvPages, Place, copy_pages, store_tokens, summarize_pages

Array = np.ndarray[Any, Any]
STEP_BYTES = (1 << 30) + (1 << 16)
"""From a page to the next: the third is beyond 31 bits, the fifth beyond 32."""
PAGES = 6
MAP_NORESERVE = 0x4000
"""Linux's flag to reserve no memory for untouched pages."""
FAR_DECODES = (Shape(((1, 50), (1, 16))), Shape(((1, 90),), types=("f16", "e4m3"), group=2))
FAR_PREFILLS = (Shape(((20, 40), (3, 3)), group=1),)
MANY = Shape(((1, 1), (1, 0), (1, 17)) * 50, group=1)
"""More requests than a block has threads."""


def far_apart(pages: Array) -> Array:
    """The same pages [n, ...] in separate memory, STEP_BYTES from one to the next."""
    room = mmap.mmap(-1, STEP_BYTES * len(pages), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    view: Array = np.ndarray(pages.shape, pages.dtype, room, strides=(STEP_BYTES, *pages.strides[1:]))
    view[:] = pages
    return view


def check_far_decode(library: Library, shape: Shape) -> None:
    """Raises AssertionError."""
    case = made(shape)
    far = far_apart(case.pool)
    case.pages = replace(case.pages, k=far[:, 0], v=far[:, 1])
    check(case, decoded(library, case))


def check_far_prefill(library: Library, shape: Shape) -> None:
    """Raises AssertionError."""
    case = made(shape)
    far = far_apart(case.pool)
    case.pages = replace(case.pages, k=far[:, 0], v=far[:, 1])
    check(case, prefilled(library, case))


def check_far_pages(library: Library, kind: str) -> None:
    """Stores, copies in both directions and bounds of far pages are right. Raises AssertionError."""
    rng = np.random.default_rng(6)
    want = poison((PAGES, 1, 2, TOKENS, HEADS, 64), kind)
    far = far_apart(want)
    k, v = rng.standard_normal((2, PAGES * TOKENS, HEADS, 64)).astype(want.dtype)
    slots = rng.permutation(PAGES * TOKENS).astype(np.int64)
    for side, new in enumerate((k, v)):
        reference.store_tokens(new, slots, want[:, 0, side])
    store_tokens(library, k, v, slots, KvPages(far[:, 0, 0], far[:, 0, 1]))
    assert_same_bytes(np.ascontiguousarray(far), want, f"{kind}: stored")
    ids, tokens = np.arange(PAGES, dtype=np.int32)[::-1].copy(), np.full(PAGES, TOKENS, np.int32)
    bounds = np.full((PAGES, HEADS, 2, 64), np.nan, np.float32)
    summarize_pages(library, far[:, 0, 0], ids, tokens=tokens, to=bounds)
    np.testing.assert_array_equal(bounds, reference.summarize_pages(want[:, 0, 0], ids, tokens), f"{kind}: bounds")
    near, other = poison(want.shape, kind), far_apart(poison(want.shape, kind))
    copy_pages(library, Place(far), Place(near), blocks=3)
    assert_same_bytes(near, want, f"{kind}: copied from there")
    copy_pages(library, Place(near), Place(other), blocks=3)
    assert_same_bytes(np.ascontiguousarray(other), want, f"{kind}: copied there")
