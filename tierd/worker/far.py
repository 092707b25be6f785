"""Sparse decoding over a far prompt: each step brings the granules that its query attends to.

A prompt may be larger than the near tier. Its blocks stay leased in host memory, and bounds of all
its granules are kept where attention runs (`tierd.kernels.granules`). A decode step scores the
granules of each layer and chooses the best of them for each kv head. Those that are not in the hot
buffer are copied into it from the leased pages. The query attends to the chosen granules and to
all later tokens, and the results are merged. The prompt itself is computed with all tokens.

The hot buffer has a fixed size. If more granules are chosen than it has slots, they come in rounds.
A round's granules are attended in the order of the prompt, whether they were in the buffer or not.
So no result depends on what an earlier step has left there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from array_api_compat import array_namespace, to_device
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.kernels import Attended, PagedAttention, PagedBatch, merge_attention
from tierd.kernels.e4m3 import E4M3
from tierd.kernels.granules import GRANULE_TOKENS, HotBuffer, Resolved, bounds, choose, scores
from tierd.worker.backend import page_bytes
from tierd.worker.blocks import BlockTable
from tierd.worker.pages import PageShape

Array = Any
"""A numpy array or a torch tensor."""
FORCED = 1
"""Granules that every query reads, at each end of the prompt."""


@dataclass(frozen=True, slots=True)
class FarChoice:
    """How decoding reads a request's prompt.

    granules: of 64 tokens, to choose in each step, layer and kv head; None: all, which is exact.
    hot_tokens: room of the hot buffer in each layer and kv head. More of them means fewer copies.
    """

    granules: int | None = None
    hot_tokens: int = 4096

    def checked(self) -> FarChoice:
        """The choice itself. Raises InvalidArgument."""
        if self.granules is not None and self.granules < 2 * FORCED:
            raise InvalidArgument(
                f"far.granules: {self.granules} is below {2 * FORCED}; the first and the last one are always chosen"
            )
        if self.hot_tokens < GRANULE_TOKENS:
            raise InvalidArgument(
                f"far.hot_tokens: {self.hot_tokens} is below {GRANULE_TOKENS}, the tokens of one granule; give more"
            )
        return self


@dataclass(slots=True)
class FarReport:
    """Counts of decoding over a far prompt, of all steps, layers and kv heads.

    chosen: granules; hits: those that were in the hot buffer. fetched_bytes: copied into it.
    hot_bytes: its size, of all layers; forks share one.
    masses: for each step and layer the share of attention that was read, the mean over query heads.
    Only `measure_attention` fills them.
    """

    chosen: int = 0
    hits: int = 0
    fetched_bytes: int = 0
    hot_bytes: int = 0
    masses: list[float] = field(default_factory=list)

    @property
    def misses(self) -> int:
        """Chosen granules that were copied."""
        return self.chosen - self.hits

    def add(self, placed: Resolved, granule_bytes: int) -> None:
        """Counts granules that got their slots."""
        missed = int(placed.is_miss.sum())
        self.chosen += placed.is_miss.size
        self.hits += placed.is_miss.size - missed
        self.fetched_bytes += missed * granule_bytes

    @property
    def chosen_mass(self) -> float:
        """The median of `masses`; NaN if none was measured."""
        return statistics.median(self.masses) if self.masses else math.nan


class FarPrompt:
    """The whole granules of one prompt: their bounds, and a hot buffer. Forks share it.

    tokens: of these granules, whole pages too; later tokens are always read.
    """

    def __init__(self, choice: FarChoice, shape: PageShape, *, prompt: int, attention: PagedAttention) -> None:
        """prompt: its tokens. shape: of its pages, as `check_far` allows. attention: of any pages."""
        unit = math.lcm(GRANULE_TOKENS, shape.tokens_per_block)
        self.tokens = prompt // unit * unit
        self._shape, self._attention = shape, attention
        self._granules = self.tokens // GRANULE_TOKENS
        self._chosen = min(self._granules, choice.granules or self._granules)
        slots = min(self._granules, choice.hot_tokens // GRANULE_TOKENS)
        self._layers = [_Layer(i, shape, self._granules, slots) for i in range(shape.geometry.layers if slots else 0)]

    @property
    def hot_bytes(self) -> int:
        """Bytes of the hot buffer, of all layers."""
        return sum(layer.hot_bytes for layer in self._layers)

    def attend(self, layer: int, q: Array, table: BlockTable, stop: int, report: FarReport) -> Attended:
        """Attention of token `stop` - 1 to its chosen granules, and to all tokens behind the granules.

        q: [q_heads, head_dim], of a sequence that has the whole prompt. The result has one row, and
        q's type. Unless all granules are chosen, the table stores nothing from now on.
        """
        xp, here = array_namespace(q), self._layers[layer]
        wide = xp.astype(q, xp.float32, copy=False)
        chosen = here.choose(wide, table, self._chosen)
        if self._chosen < self._granules:
            table.is_exact = False
        parts = [self._near(layer, wide, table, stop)]
        for at in range(0, self._chosen, here.slots):
            few = chosen[:, at : at + here.slots]
            placed = here.fetch(table, few)
            report.add(placed, here.granule_bytes)
            parts.append(here.attend(wide, placed, self._attention))
        report.hot_bytes = self.hot_bytes
        merged = merge_attention([part.out for part in parts], [part.lse for part in parts])
        return Attended(xp.astype(merged.out, q.dtype, copy=False), merged.lse)

    def _near(self, layer: int, q: Array, table: BlockTable, stop: int) -> Attended:
        """Attention to the tokens behind the granules."""
        pages = [page.array for page in table.pages[self.tokens // self._shape.tokens_per_block :]]
        batch = PagedBatch([0, 1], [stop - self.tokens], [range(len(pages))])
        return self._attention(q[None], self._shape.read(pages, layer), batch)


class _Layer:
    """One layer's bounds and hot buffer. Each kv head has slots of its own, of one granule's keys
    and values each."""

    def __init__(self, layer: int, shape: PageShape, granules: int, slots: int) -> None:
        self._layer, self._size, geometry = layer, shape.tokens_per_block, shape.geometry
        self._granules, self.slots = granules, slots
        self._empty = partial(HotBuffer, geometry.kv_heads, granules, slots)
        self._buffer = self._empty()
        # As pages of one kv head, head by head, so any attention over pages reads them.
        pages = replace(geometry, layers=geometry.kv_heads * slots, kv_heads=1)
        self.hot_bytes = page_bytes(pages, GRANULE_TOKENS)
        self.granule_bytes = self.hot_bytes // pages.layers
        self._hot = shape.backend.page(shape.backend.memory(self.hot_bytes), geometry=pages, tokens=GRANULE_TOKENS)
        self._bounds: Array = None

    def choose(self, q: Array, table: BlockTable, count: int) -> NDArray[np.int32]:
        """The granules with the greatest bounds for a query, int32 [kv_heads, count], rising."""
        if count == self._granules:
            return np.tile(np.arange(count, dtype=np.int32), (len(self._buffer.where), 1))
        if self._bounds is None:
            self._bounds = self._bounded(table)
        chosen = choose(scores(q, self._bounds), count, forced_first=FORCED, forced_last=FORCED)
        return np.asarray(to_device(chosen, "cpu"))

    def fetch(self, table: BlockTable, chosen: NDArray[np.int32]) -> Resolved:
        """Gives these granules slots, and copies those that have none yet from their pages."""
        placed = self._buffer.resolve(chosen)
        try:
            for head, place in zip(*np.nonzero(placed.is_miss), strict=True):
                slot = self._hot[self.slots * head + placed.slots[head, place]]
                for part, page, tokens in self._pieces(int(chosen[head, place])):
                    slot[:, part, 0] = table.pages[page].array[self._layer][:, tokens, head]
        except BaseException:  # an interrupt, perhaps: slots may lack their granules
            self._buffer = self._empty()
            raise
        return placed

    def attend(self, q: Array, placed: Resolved, attention: PagedAttention) -> Attended:
        """Attention of one row to granules in their slots: each kv head is a sequence of its own."""
        xp, (kv_heads, count) = array_namespace(q), placed.slots.shape
        tables = (placed.slots + self.slots * np.arange(kv_heads)[:, None]).tolist()
        batch = PagedBatch(range(kv_heads + 1), [count * GRANULE_TOKENS] * kv_heads, tables)
        done = attention(xp.reshape(q, (kv_heads, -1, q.shape[-1])), self._hot, batch)
        return Attended(xp.reshape(done.out, (1, *q.shape)), xp.reshape(done.lse, (1, q.shape[0])))

    def _bounded(self, table: BlockTable) -> Array:
        """Bounds of all granules; keys of a few pages at a time are in memory."""
        found = list[Array]()
        for granule in range(self._granules):
            keys = [table.pages[page].array[self._layer][0, tokens] for _, page, tokens in self._pieces(granule)]
            found.append(bounds(array_namespace(*keys).concat(keys)))
        return array_namespace(*found).concat(found)

    def _pieces(self, granule: int) -> Iterator[tuple[slice, int, slice]]:
        """Of a granule by pages: its tokens, a page, and that page's tokens."""
        done = 0
        while done < GRANULE_TOKENS:
            page, offset = divmod(granule * GRANULE_TOKENS + done, self._size)
            some = min(self._size - offset, GRANULE_TOKENS - done)
            yield slice(done, done + some), page, slice(offset, offset + some)
            done += some


def check_far(shape: PageShape) -> None:
    """Raises InvalidArgument for pages from which granules cannot be copied."""
    backend, dtype = shape.backend, shape.geometry.dtype
    if backend.is_on_gpu or dtype == E4M3:
        raise InvalidArgument(
            f"far: pages of {dtype} on {backend.device}; granules are copied on the CPU, from pages of 16 bits or "
            "more; choose device='cpu' and such pages, or no far prompt"
        )
