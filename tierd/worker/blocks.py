"""Block tables: the ordered pages of one sequence.

A table grows, writes, commits, forks and drops a sequence's pages; it computes no keys and values.
Pages[: named] are named and never written. A later page is copied before a write if it is named
(its end was cropped) or several tables hold it. The first `length` tokens have keys and values in
all layers. A lost page is dropped with all that follow before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.worker.pages import Held, Page, PageShape, PageSource

Array = Any
"""A numpy array or a torch tensor."""


class BlockTable:
    """Pages of one sequence. Not usable after `release`."""

    def __init__(self, source: PageSource, held: Held | None = None) -> None:
        """held: a stored prefix, which the table owns; on an error it is released. Its tail is
        copied into a private page and released."""
        start = held or Held()
        self._source = source
        self._tokens_per_block = source.shape.tokens_per_block
        self.pages: list[Page] = list(start.pages)
        self.named = len(self.pages)
        self.length = start.tokens
        if start.tail is not None:
            try:
                self._copy_tail(start.tail)
            except BaseException:
                self.release()
                raise
            finally:
                source.release([start.tail])

    @property
    def shape(self) -> PageShape:
        """Shape of every page."""
        return self._source.shape

    @property
    def capacity(self) -> int:
        """Tokens that fit the pages."""
        return len(self.pages) * self._tokens_per_block

    def grow(self, length: int) -> None:
        """Makes positions self.length to length writable: reserves pages, and copies the page to be
        continued if it is shared or named."""
        missing = -(-length // self._tokens_per_block) - len(self.pages)
        if missing > 0:
            self.pages += self._source.reserve(missing)
        first = self.length // self._tokens_per_block
        for index in range(first, -(-length // self._tokens_per_block)):
            if self.pages[index].holders > 1 or not self.pages[index].is_private:
                self._own(index)

    def write(self, layer: int, start: int, *, k: Array, v: Array) -> None:
        """Keys and values [rows, kv_heads, head_dim] of positions start, start + 1, ... of one layer.

        Raises InvalidArgument for positions that are not writable.
        """
        stop = start + k.shape[0]
        self._check_writable(start, stop)
        keys, values = self.shape.stored(layer, k, v)
        at = start
        while at < stop:
            page, slot = divmod(at, self._tokens_per_block)
            end = min(stop, (page + 1) * self._tokens_per_block)
            target = self.pages[page].array[layer]
            target[0, slot : slot + end - at] = keys[at - start : end - start]
            target[1, slot : slot + end - at] = values[at - start : end - start]
            at = end

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Slots for positions from start on: a page's index in `pages` * tokens per page + offset;
        -1 for written ones.

        Raises InvalidArgument for positions that are not writable.
        """
        self._check_writable(max(start, self.length), stop)
        positions = np.arange(start, stop, dtype=np.int64)
        return np.where(positions < self.length, -1, positions)

    def advance(self, length: int) -> None:
        """Records that all layers up to this length have been written."""
        self.length = max(self.length, length)

    def crop(self, length: int) -> None:
        """Drops tokens beyond so many."""
        if length >= self.length:
            return
        keep = -(-length // self._tokens_per_block)
        gone, self.pages = self.pages[keep:], self.pages[:keep]
        self._source.release(gone)
        self.length = length
        self.named = min(self.named, length // self._tokens_per_block)

    def commit(self, tokens: Sequence[int]) -> int:
        """Names every full private block; returns how many. tokens: of the sequence, from its first one on."""
        size = self._tokens_per_block
        full = min(self.length, len(tokens)) // size
        if full <= self.named:
            return 0
        before, after = self.named, self.pages[self.named - 1] if self.named else None
        given = self._source.commit(self.pages[before:full], tokens[before * size : full * size], after=after)
        self.pages[before:full] = given
        # A page that could not be stored ends the findable chain; later pages stay private too.
        while self.named < full and not self.pages[self.named].is_private:
            self.named += 1
        self.drop_lost()
        return self.named - before

    def drop_lost(self) -> None:
        """Drops pages from the first lost one on; another table that holds it may have lost it."""
        lost = next((i for i, page in enumerate(self.pages) if page.is_lost), None)
        if lost is not None:
            self.crop(lost * self._tokens_per_block)

    def commit_tail(self, tokens: Sequence[int]) -> bool:
        """Stores the tokens after the last full block as a short block. False: there are none, or no room."""
        full = self.length // self._tokens_per_block
        if full != self.named or self.length == full * self._tokens_per_block:
            return False
        after = self.pages[full - 1] if full else None
        tail = tokens[full * self._tokens_per_block : self.length]
        return self._source.commit_tail(self.pages[full], tail, after=after)

    def fork(self) -> BlockTable:
        """A second table over the same pages; the first writer to the last one copies it."""
        other = BlockTable(self._source)
        for page in self.pages:
            page.holders += 1
        other.pages, other.named, other.length = list(self.pages), self.named, self.length
        return other

    def release(self) -> None:
        """Releases every page."""
        pages, self.pages, self.named, self.length = self.pages, [], 0, 0
        self._source.release(pages)

    def _check_writable(self, start: int, stop: int) -> None:
        if start < self.length or stop > self.capacity:
            raise InvalidArgument(
                f"positions {start} to {stop}: only {self.length} to {self.capacity} are writable; grow first"
            )

    def _own(self, index: int) -> None:
        """Replaces a shared page, or a named one with a cropped end, by a copy of its current content."""
        shared = self.pages[index]
        copy = self._source.reserve(1)[0]
        used = min(self._tokens_per_block, self.length - index * self._tokens_per_block)
        self._source.shape.backend.copy(shared.array, copy.array, tokens=used)
        self.pages[index] = copy
        self._source.release([shared])

    def _copy_tail(self, tail: Page) -> None:
        self.pages += self._source.reserve(1)
        self._source.shape.backend.copy(tail.array, self.pages[-1].array, tokens=tail.array.shape[2])
