"""PagedTierdCache: K and V stay in tierd's pages and attention reads them there.

Block tables implement transformers' cache interface, for attn_implementation="tierd_paged". Restore
and save copy only what finds no room. update() returns only the new K and V; a page with a name is
never written. One thread a store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from transformers.cache_utils import CacheLayerMixin

from tierd.errors import InvalidArgument
from tierd.integrations.transformers.attention import NAME, PADDING, WRITTEN, Written, padding_of
from tierd.integrations.transformers.kept import KeptCache
from tierd.integrations.transformers.rows import Row, rows_of
from tierd.integrations.transformers.store import TierdStore
from tierd.worker.blocks import BlockTable


class PagedLayer(CacheLayerMixin):
    """One layer's part of the cache's block tables."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedTierdCache, index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.cache, self.index, self.columns = cache, index, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: pages come with tokens."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Writes K and V [rows, kv_heads, new tokens, head_dim] into pages; returns them unchanged."""
        self.cache.write(self, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(cached and new tokens, 0)."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """Unlimited."""
        return -1


class PagedTierdCache(KeptCache):
    """`past_key_values` for attn_implementation="tierd_paged". Raises InvalidArgument for another one."""

    def __init__(self, store: TierdStore) -> None:
        """Empty."""
        if store.attention != NAME:
            raise InvalidArgument(
                f"PagedTierdCache: the model attends by {store.attention!r}; call model.set_attn_implementation({NAME!r}) before TierdStore(model), or use TierdCache"
            )
        super().__init__(store, [PagedLayer(self, i) for i in range(len(store.shapes))])
        self.tables: list[BlockTable] = []
        self._starts: list[int] = []

    @classmethod
    def restore(cls, store: TierdStore, input_ids: Any, attention_mask: Any = None) -> Self:
        """As TierdCache.restore."""
        cache = cls(store)
        rows = rows_of(input_ids, attention_mask, store.padding)
        held = [store.pages.acquire(row.tokens[: store.find(row.tokens)].tolist()) for row in rows]
        columns = min(row.start + one.tokens for row, one in zip(rows, held, strict=True))
        if columns > min(row.start for row in rows):
            cache.tables = [BlockTable(store.pages, one) for one in held]
            cache._starts, cache._rows, cache.restored = [row.start for row in rows], rows, columns
            cache._cut(columns)
        return cache

    def write(self, layer: PagedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes a layer's new K and V, [rows, kv_heads, tokens, head_dim]; passes its pages to attention."""
        rows, new = keys.shape[0], keys.shape[2]
        if not self.tables:
            self.tables = [BlockTable(self.store.pages) for _ in range(rows)]
            self._starts = padding_of(PADDING.get(), rows)
        elif len(self.tables) < rows:
            self.batch_repeat_interleave(rows // len(self.tables))
        layer.columns += new
        lengths = [max(0, layer.columns - start) for start in self._starts]
        for i, (table, length) in enumerate(zip(self.tables, lengths, strict=True)):
            count = min(new, length)
            table.grow(length)
            k, v = keys[i, :, new - count :].transpose(0, 1), values[i, :, new - count :].transpose(0, 1)
            table.write(layer.index, length - count, k=k, v=v)
            if layer is self.layers[-1]:
                table.advance(length)
        WRITTEN.set(self._written(layer.index, lengths))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Gives rows tables of the same pages; the first writer to a shared last page copies it."""
        self._doubt()
        self._take(self._choose(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row so many times."""
        self._take([i for i in range(len(self.tables)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only these rows."""
        self._take(self._choose(indices))

    def crop(self, tokens_to_remove: int) -> None:
        """Removes so many tokens, given as a negative number. Raises ValueError for a positive one,
        as transformers does since 5.20."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop: {tokens_to_remove} is positive; give minus the number of tokens to take away")
        self._cut(max(0, self.get_seq_length() + tokens_to_remove))

    def reset(self) -> None:
        """Empties the cache."""
        for table in self.tables:
            table.release()
        self.tables, self._starts = [], []
        for layer in self.layers:
            layer.columns = 0
        self._certain, self._rows, self.restored = None, [], 0

    def __deepcopy__(self, _: object) -> Self:
        """Another cache over the same pages."""
        other = type(self)(self.store)
        other.tables, other._starts = [table.fork() for table in self.tables], list(self._starts)
        other._certain, other._rows, other.restored = self._certain, list(self._rows), self.restored
        for layer in other.layers:
            layer.columns = self.get_seq_length()
        return other

    def _cut(self, columns: int) -> None:
        self.restored = min(self.restored, columns)
        for layer in self.layers:
            layer.columns = columns
        for table, start in zip(self.tables, self._starts, strict=True):
            table.crop(max(0, columns - start))

    def _take(self, rows: Iterable[int]) -> None:
        """Takes these rows, in this order, possibly repeated."""
        before, chosen = self.tables, list(rows)
        self.tables, self._starts = [before[i].fork() for i in chosen], [self._starts[i] for i in chosen]
        for table in before:
            table.release()

    def _written(self, layer: int, lengths: list[int]) -> Written:
        pages = [page.array[layer] for table in self.tables for page in table.pages]
        firsts = [sum(len(table.pages) for table in self.tables[:i]) for i in range(len(self.tables))]
        spans = [range(first, first + len(table.pages)) for first, table in zip(firsts, self.tables, strict=True)]
        return Written(layer, pages, spans, lengths)

    def _held_rows(self) -> int:
        return len(self.tables) if self.get_seq_length() else 0

    def _first_keys(self, row: int, start: int) -> Any:
        table = self.tables[row]
        return torch.cat([page.array[0, 0] for page in table.pages])[: table.length]

    def _store(self, row: int, kept: Row) -> int:
        table = self.tables[row]
        table.commit(kept.tokens.tolist())
        return (
            min(table.named, len(kept.tokens) // self.store.options.tokens_per_block)
            * self.store.options.tokens_per_block
        )
