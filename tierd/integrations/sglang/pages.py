"""Pages of SGLang's host pools as pieces: by pointer if the pool has pointers, else flat tensors.

It maps `host_indices` to bytes; names of pages are in names.py. The pool itself gives the lengths
of pieces. A piece keeps its pool alive. A page is copied once by pointer, twice as a flat tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tierd.errors import InvalidArgument, Unsupported
from tierd.integrations.pieces import Bytes, Pieces


class Span:
    """A pool's memory for numpy: an array interface on an object that keeps the pool alive."""

    __slots__ = ("__array_interface__", "pool")

    def __init__(self, pointer: int, length_bytes: int, pool: Any) -> None:
        self.pool = pool
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (int(length_bytes),),
            "data": (int(pointer), False),
        }


class PointerPages:
    """Pages whose parts the pool names by pointer and size. Raises Unsupported for a layout without these."""

    form = "pointers"

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_tokens = page_tokens(pool)
        self.is_logical = is_logical(pool)
        self.lengths: tuple[int, ...] = () if self.is_logical else tuple(self._meta_of_one())

    def sources(self, host_indices: Any, *, pages: int) -> list[Pieces]:
        """Each page's parts, in the block's order. Raises InvalidArgument for a wrong number of indices."""
        _check(host_indices, pages=pages, page_tokens=self.page_tokens)
        if not pages:
            return []
        pointers, lengths = self.pool.get_page_buffer_meta(host_indices)
        parts = [_array(pointer, length, self.pool) for pointer, length in zip(pointers, lengths, strict=True)]
        per_page, rest = divmod(len(parts), pages)
        if rest:
            raise InvalidArgument(f"host pool: {len(parts)} buffers for {pages} pages; give it whole pages")
        return [parts[i * per_page : (i + 1) * per_page] for i in range(pages)]

    targets = sources

    def settle(self, host_indices: Any, targets: Sequence[Pieces], *, good: int) -> None:
        """Does nothing: the bytes are in place."""

    def _meta_of_one(self) -> list[int]:
        try:
            _, lengths = self.pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (ValueError, NotImplementedError) as error:
            raise Unsupported(
                f"hicache-mem-layout: {getattr(self.pool, 'layout', '?')!r} of {type(self.pool).__name__} has no buffers by pointer ({error}); use page_first"
            ) from error
        return [int(length) for length in lengths]


class FlatPages:
    """Pages that the pool exchanges as flat tensors."""

    form = "flat"

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_tokens = page_tokens(pool)
        self.is_logical = is_logical(pool)
        self.lengths: tuple[int, ...] = () if self.is_logical else (int(pool.get_dummy_flat_data_page().nbytes),)

    def sources(self, host_indices: Any, *, pages: int) -> list[Pieces]:
        """Each page's bytes. Raises InvalidArgument if the indices are not so many pages."""
        _check(host_indices, pages=pages, page_tokens=self.page_tokens)
        return [[self.pool.get_data_page(index, flat=True)] for index in self._starts(host_indices)]

    def targets(self, host_indices: Any, *, pages: int) -> list[Pieces]:
        """Room for each page's bytes. Raises InvalidArgument if the indices are not so many pages."""
        _check(host_indices, pages=pages, page_tokens=self.page_tokens)
        return [[self.pool.get_dummy_flat_data_page()] for _ in range(pages)]

    def settle(self, host_indices: Any, targets: Sequence[Pieces], *, good: int) -> None:
        """Copies the first so many pages into the pool."""
        for index, (page,) in zip(self._starts(host_indices)[:good], targets[:good], strict=True):
            self.pool.set_from_flat_data_page(index, page)

    def _starts(self, host_indices: Any) -> list[int]:
        return [int(index) for index in host_indices[:: self.page_tokens]]


HostPages = PointerPages | FlatPages


def pages_of(pool: Any) -> HostPages:
    """A side pool's pages: by pointer if it has pointers."""
    try:
        return PointerPages(pool)
    except Unsupported:
        return FlatPages(pool)


def page_tokens(pool: Any) -> int:
    """Indices of a page. With decode context parallelism this exceeds the rows on this rank."""
    return int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 0) or 1)


def is_logical(pool: Any) -> bool:
    """Whether the pool only counts, and other pools hold its bytes."""
    return getattr(pool, "kv_buffer", pool) is None


def _array(pointer: int, length: int, pool: Any) -> Bytes:
    return np.asarray(Span(pointer, length, pool))


def _check(host_indices: Any, *, pages: int, page_tokens: int) -> None:
    found = 0 if host_indices is None else len(host_indices)
    if found != pages * page_tokens:
        raise InvalidArgument(f"host_indices: {found} for {pages} pages of {page_tokens}; give page_size of them a key")
