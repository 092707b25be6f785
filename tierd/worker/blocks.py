"""Block tables: the ordered pages of one sequence.

Purpose: grow, write, commit, fork and drop the pages behind a sequence. Non-purpose: computing keys and values; knowing
where pages come from. Invariants: pages[: named] are named and never written; after them a page that is
named (its end was cropped) or that several tables hold is copied before it is written; `length` counts tokens whose keys and values are in all layers; a page that
was lost is dropped with all that follow it before anything is read.
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
        """held: a stored prefix; the table becomes its holder, and if it cannot be made nobody is. Its tail is copied into a private page and released."""
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
        """What every page looks like."""
        return self._source.shape

    @property
    def capacity(self) -> int:
        """Tokens that the pages have room for."""
        return len(self.pages) * self._tokens_per_block

    def grow(self, length: int) -> None:
        """Makes positions self.length to length writable: reserves pages, and copies the page to be continued if it is shared or named."""
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
        """Where positions from start on are written: a page's place in `pages` * tokens per page + offset; -1 for those that are there already.

        Raises InvalidArgument for positions that are not writable.
        """
        self._check_writable(max(start, self.length), stop)
        positions = np.arange(start, stop, dtype=np.int64)
        return np.where(positions < self.length, -1, positions)

    def advance(self, length: int) -> None:
        """All layers up to this length have been written."""
        self.length = max(self.length, length)

    def crop(self, length: int) -> None:
        """Forgets what comes behind so many tokens."""
        if length >= self.length:
            return
        keep = -(-length // self._tokens_per_block)
        gone, self.pages = self.pages[keep:], self.pages[:keep]
        self._source.release(gone)
        self.length = length
        self.named = min(self.named, length // self._tokens_per_block)

    def commit(self, tokens: Sequence[int]) -> int:
        """Names every full block that is still private. tokens: of the sequence, from its first one on. Returns how many were named."""
        size = self._tokens_per_block
        full = min(self.length, len(tokens)) // size
        if full <= self.named:
            return 0
        before, after = self.named, self.pages[self.named - 1] if self.named else None
        given = self._source.commit(self.pages[before:full], tokens[before * size : full * size], after=after)
        self.pages[before:full] = given
        # A page that could not be stored ends the chain that others can find; what follows it stays private too.
        while self.named < full and not self.pages[self.named].is_private:
            self.named += 1
        self.drop_lost()
        return self.named - before

    def drop_lost(self) -> None:
        """Forgets pages from the first lost one on; another table that holds it may have lost it."""
        lost = next((i for i, page in enumerate(self.pages) if page.is_lost), None)
        if lost is not None:
            self.crop(lost * self._tokens_per_block)

    def commit_tail(self, tokens: Sequence[int]) -> bool:
        """Stores the tokens after the last full block as a short block of their own. False: there are none, or no room."""
        full = self.length // self._tokens_per_block
        if full != self.named or self.length == full * self._tokens_per_block:
            return False
        after = self.pages[full - 1] if full else None
        tail = tokens[full * self._tokens_per_block : self.length]
        return self._source.commit_tail(self.pages[full], tail, after=after)

    def fork(self) -> BlockTable:
        """A second table over the same pages; whoever writes first into the last one copies it."""
        other = BlockTable(self._source)
        for page in self.pages:
            page.holders += 1
        other.pages, other.named, other.length = list(self.pages), self.named, self.length
        return other

    def release(self) -> None:
        """Lets go of every page."""
        pages, self.pages, self.named, self.length = self.pages, [], 0, 0
        self._source.release(pages)

    def _check_writable(self, start: int, stop: int) -> None:
        if start < self.length or stop > self.capacity:
            raise InvalidArgument(
                f"positions {start} to {stop}: only {self.length} to {self.capacity} are writable; grow first"
            )

    def _own(self, index: int) -> None:
        """Replaces a shared page, or a named one of which the end was cropped, by a copy of what it holds so far."""
        shared = self.pages[index]
        copy = self._source.reserve(1)[0]
        used = min(self._tokens_per_block, self.length - index * self._tokens_per_block)
        self._source.shape.backend.copy(shared.array, copy.array, tokens=used)
        self.pages[index] = copy
        self._source.release([shared])

    def _copy_tail(self, tail: Page) -> None:
        self.pages += self._source.reserve(1)
        self._source.shape.backend.copy(tail.array, self.pages[-1].array, tokens=tail.array.shape[2])
