"""Block tables: the ordered pages of one sequence.

A table grows, writes, commits, forks and drops a sequence's pages; it computes no keys and values.
Pages[: named] are named and never written. A later page is copied before a write if it is named
(its end was cropped) or several tables hold it. The first `length` tokens have keys and values in
all layers. A lost page is dropped with all that follow before anything is read.

A token policy may drop tokens: `keep` leaves others in each layer and head, equally many. Then
`dropped` are gone, token t lies in slot t - dropped, and nothing more is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.kernels.pool import Located
from tierd.worker.pages import Held, Page, PageShape, PagesMissing, PageSource

Array = Any
"""A numpy array or a torch tensor."""


class BlockTable:
    """Pages of one sequence. Not usable after `release`."""

    def __init__(self, source: PageSource, held: Held | None = None) -> None:
        """held: a stored prefix, which the table owns; on an error it is released. Its tail is
        copied into a private page and released."""
        start = held or Held()
        self._arriving, self._tail = start.arriving, start.tail
        self._source = source
        self._tokens_per_block = source.shape.tokens_per_block
        self.pages: list[Page] = list(start.pages)
        self._located: Located | None = None
        self._known = self._fixed = 0
        self._moves = self._looked = Page.moves
        self._tried = 0
        self.named = len(self.pages)
        self.length = start.tokens
        self.dropped = 0
        self.is_exact = True
        if start.tail is not None:
            try:
                self.pages += source.reserve(1)
                if self._arriving is None:
                    self._copy_tail(None)
            except BaseException:
                self.release()
                raise

    @property
    def shape(self) -> PageShape:
        """Shape of every page."""
        return self._source.shape

    def located(self) -> Located:
        """The addresses of its pages, of which there is one at least: the same object until one
        changes. Only pages that came or moved since the last call are looked at. Raises
        InvalidArgument for pages of several layouts."""
        if self._moves != Page.moves:  # pages that had no name at the last call may have moved
            moved = (i for i in range(self._fixed, len(self.pages)) if self.pages[i].moved > self._moves)
            self._know(next(moved, self._known))
        if self._located is None or self._known < len(self.pages):
            first, before = (None, []) if self._located is None else (self._located.first, [self._located.addresses])
            new = Located.of([page.array for page in self.pages[self._known :]], first)
            self._located = replace(new, addresses=np.concatenate([*(b[: self._known] for b in before), new.addresses]))
        elif len(self._located) > len(self.pages):
            self._located = replace(self._located, addresses=self._located.addresses[: len(self.pages)])
        self._known, self._fixed, self._moves = len(self.pages), self.named, Page.moves
        return self._located

    @property
    def is_arriving(self) -> bool:
        """Whether layers of a stored prefix may still come."""
        return self._arriving is not None

    @property
    def held(self) -> int:
        """Tokens in the pages."""
        return self.length - self.dropped

    @property
    def capacity(self) -> int:
        """Tokens that fit the pages, dropped ones included."""
        return len(self.pages) * self._tokens_per_block + self.dropped

    def await_layer(self, layer: int) -> None:
        """Waits until a layer of a stored prefix is in the pages, in order from layer 0 on. Raises
        PagesMissing if it will not come."""
        if self._arriving is None:
            return
        if not self._arriving(layer):
            raise PagesMissing(self)
        self._copy_tail(layer)

    def await_layers(self) -> None:
        """Waits for all layers, before anything is computed. Raises PagesMissing."""
        if self._arriving is not None and not self._arriving(None):
            raise PagesMissing(self)
        self._copy_tail(None)

    def grow(self, length: int) -> None:
        """Makes positions self.length to length writable: reserves pages, and copies the page to be
        continued if it is shared or named."""
        needed = self._pages_of(length)
        if needed > len(self.pages):
            self.pages += self._source.reserve(needed - len(self.pages))
        for index in range(self.held // self._tokens_per_block, needed):
            if self.pages[index].holders > 1 or not self.pages[index].is_private:
                self._own(index)

    def write(self, layer: int, start: int, *, k: Array, v: Array) -> None:
        """Keys and values [rows, kv_heads, head_dim] of positions start, start + 1, ... of one layer.

        Raises InvalidArgument for positions that are not writable.
        """
        stop = start + k.shape[0]
        self._check_writable(start, stop)
        keys, values = self.shape.stored(layer, k, v)
        for kind, rows in enumerate((keys, values)):
            self._put(layer, kind, start - self.dropped, rows)

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Slots for positions from start on: a page's index in `pages` * tokens per page + offset;
        -1 for written ones.

        Raises InvalidArgument for positions that are not writable.
        """
        self._check_writable(max(start, self.length), stop)
        positions = np.arange(start, stop, dtype=np.int64)
        return np.where(positions < self.length, -1, positions - self.dropped)

    def advance(self, length: int) -> None:
        """Records that all layers up to this length have been written."""
        self.length = max(self.length, length)

    def crop(self, length: int) -> None:
        """Drops tokens beyond so many."""
        if length >= self.length:
            return
        keep = self._pages_of(length)
        gone, self.pages = self.pages[keep:], self.pages[:keep]
        self._know(keep)
        self._source.release(gone)
        self.length = length
        self.named, self._tried = (min(n, length // self._tokens_per_block) for n in (self.named, self._tried))

    def commit(self, tokens: Sequence[int]) -> int:
        """Names full private blocks; returns how many. Blocks that could not be stored are tried
        again with the next full one. tokens: of the sequence, from its first one on."""
        size = self._tokens_per_block
        full = min(self.length, len(tokens)) // size
        if full <= max(self.named, self._tried) or not self.is_exact:
            return 0
        self._tried = full
        before, after = self.named, self.pages[self.named - 1] if self.named else None
        given = self._source.commit(self.pages[before:full], tokens[before * size : full * size], after=after)
        if given != self.pages[before:full]:
            self._know(next(i for i in range(before, full) if given[i - before] is not self.pages[i]))
        self.pages[before:full] = given
        # A page that could not be stored ends the findable chain; later pages stay private too.
        while self.named < full and not self.pages[self.named].is_private:
            self.named += 1
        self.drop_lost()
        return self.named - before

    def drop_lost(self) -> None:
        """Drops pages from the first lost one on; another table that holds it may have lost it."""
        if self._looked == Page.moves:
            return
        self._looked = Page.moves
        lost = next((i for i in range(self.named, len(self.pages)) if self.pages[i].is_lost), None)
        if lost is not None:
            self.crop(lost * self._tokens_per_block + self.dropped)

    def commit_tail(self, tokens: Sequence[int]) -> bool:
        """Stores the tokens after the last full block as a short block. False: there are none, no
        room, or they are not exact."""
        full = self.length // self._tokens_per_block
        if not self.is_exact or full != self.named or self.length == full * self._tokens_per_block:
            return False
        after = self.pages[full - 1] if full else None
        tail = tokens[full * self._tokens_per_block : self.length]
        return self._source.commit_tail(self.pages[full], tail, after=after)

    @property
    def stored_tokens(self) -> int:
        """Tokens in named blocks."""
        return self.named * self._tokens_per_block

    def report_attention(self, mass: NDArray[np.float64]) -> None:
        """Reports the attention weight of the pages, if there is any."""
        if len(mass):
            self._source.report_attention(self.pages, mass.tolist())

    def fork(self) -> BlockTable:
        """A second table over the same pages; the first writer to the last one copies it."""
        other = BlockTable(self._source)
        for page in self.pages:
            page.holders += 1
        other.pages, other.named, other.length = list(self.pages), self.named, self.length
        other._located, other._known = self._located, self._known
        other._fixed, other._moves = self._fixed, self._moves
        other._tried, other._looked = self._tried, self._looked
        other.dropped, other.is_exact = self.dropped, self.is_exact
        return other

    def keep(self, slots: NDArray[np.int64]) -> None:
        """Moves the keys and values of these slots together, in private pages, and releases all others.

        slots: rising, [layers, kv_heads, n]; pages are numpy's. Pages that nobody else holds are
        used again. Nothing is stored from now on.
        """
        count = slots.shape[2]
        needed = -(-count // self._tokens_per_block)
        own = [page for page in self.pages if page.is_private and page.holders == 1][:needed]
        used = set(own)
        gone, self.pages = self.pages, own + self._source.reserve(needed - len(own))
        self._know(0)
        self.named, self.dropped, self.is_exact = 0, self.length - count, False
        try:
            for layer, kept in enumerate(slots):
                held = np.concatenate([page.array[layer] for page in gone], axis=1)
                moved = np.stack([held[:, some, head] for head, some in enumerate(kept)], axis=2)
                for kind in (0, 1):
                    self._put(layer, kind, 0, moved[kind])
        finally:
            self._source.release([page for page in gone if page not in used])

    def keys(self, layer: int, count: int) -> Array:
        """The first `count` keys of a layer as attention reads them, [count, kv_heads, head_dim]."""
        pages = self.shape.read([page.array for page in self.pages[: self._pages_of(count + self.dropped)]], layer)
        return np.concatenate([page[0] for page in pages])[:count]

    def put_keys(self, layer: int, keys: Array) -> None:
        """Overwrites the first keys of a layer, in pages of `keep`."""
        self._put(layer, 0, 0, self.shape.stored(layer, keys, keys)[0])

    def page_keys(self, layer: int, page: int) -> Array:
        """All keys of a page as attention reads them, [tokens_per_block, kv_heads, head_dim]."""
        return self.shape.read([self.pages[page].array], layer)[0][0]

    def release(self) -> None:
        """Releases every page."""
        self._drop_tail()
        pages, self.pages, self.named, self.length = self.pages, [], 0, 0
        self._know(0)
        self._source.release(pages)

    def _know(self, pages: int) -> None:
        """Keeps at most so many addresses."""
        self._known = min(self._known, pages)

    def _check_writable(self, start: int, stop: int) -> None:
        if start < self.length or stop > self.capacity:
            raise InvalidArgument(
                f"positions {start} to {stop}: only {self.length} to {self.capacity} are writable; grow first"
            )

    def _pages_of(self, length: int) -> int:
        """Pages that hold the first `length` tokens."""
        return -(-(length - self.dropped) // self._tokens_per_block)

    def _put(self, layer: int, kind: int, slot: int, rows: Array) -> None:
        """Writes keys (kind 0) or values (1) of slots from `slot` on."""
        size, done = self._tokens_per_block, 0
        while done < rows.shape[0]:
            page, offset = divmod(slot + done, size)
            some = rows[done : done + size - offset]
            self.pages[page].array[layer][kind, offset : offset + some.shape[0]] = some
            done += some.shape[0]

    def _own(self, index: int) -> None:
        """Replaces a shared page, or a named one with a cropped end, by a copy of its current content."""
        shared = self.pages[index]
        copy = self._source.reserve(1)[0]
        used = min(self._tokens_per_block, self.held - index * self._tokens_per_block)
        self._source.shape.backend.copy(shared.array, copy.array, tokens=used)
        self.pages[index] = copy
        self._know(index)
        self._source.release([shared])

    def _copy_tail(self, layer: int | None) -> None:
        """Copies a layer of the stored short block, or all (None), into the private page. The short
        block is released after the last one."""
        if self._tail is not None:
            source, target = self._tail.array, self.pages[self.named].array
            if layer is not None:
                source, target = source[layer : layer + 1], target[layer : layer + 1]
            self.shape.backend.copy(source, target, tokens=source.shape[2])
        if layer in (None, self.shape.geometry.layers - 1):
            self._drop_tail()

    def _drop_tail(self) -> None:
        tail, self._tail, self._arriving = self._tail, None, None
        if tail is not None:
            self._source.release([tail])
