"""TierdCache: transformers' own dynamic cache, restored from tierd and saved to it.

It handles `restore` and blocks of contiguous K and V. transformers' DynamicLayer handles beams,
crops and offloading. Every layer holds every token, and masks apply windows and chunks. So the
stored blocks are the whole state of a prefix. The last token of a prompt is never restored.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from transformers.cache_utils import DynamicLayer

from tierd.integrations.pieces import Pieces
from tierd.integrations.transformers.identity import LayerShape
from tierd.integrations.transformers.kept import KeptCache
from tierd.integrations.transformers.rows import Row, rows_of
from tierd.integrations.transformers.store import TierdStore


class TierdLayer(DynamicLayer):
    """K and V [rows, kv_heads, tokens, head_dim]. A restored row is repeated for beams or answers."""

    def lay(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Starts with these K and V."""
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As DynamicLayer's."""
        if self.get_seq_length() and len(self.keys) < len(key_states):
            self.batch_repeat_interleave(len(key_states) // len(self.keys))
        return super().update(key_states, value_states, *args, **kwargs)


class TierdCache(KeptCache):
    """`past_key_values` for generate(), for any attention implementation. K and V are copied once
    from tierd, and once to it."""

    def __init__(self, store: TierdStore) -> None:
        """Empty."""
        super().__init__(store, [TierdLayer() for _ in store.shapes])

    @classmethod
    def restore(cls, store: TierdStore, input_ids: Any, attention_mask: Any = None) -> Self:
        """The longest prefix that tierd has of every row, or empty. Give generate() both, whole.

        input_ids: tokens [n] or [rows, n], tensor or list.
        attention_mask: of a batch padded on the left; None: the padding that generate() assumes.
        Raises InvalidArgument for other inputs.
        """
        cache = cls(store)
        cache._rows = rows_of(input_ids, attention_mask, store.padding)
        columns = min(row.start + store.find(row.tokens) for row in cache._rows)
        if columns > min(row.start for row in cache._rows):
            cache._load(columns)
        return cache

    def _load(self, columns: int) -> None:
        """Allocates room, fills it, and keeps the columns that all rows have."""
        size = self.store.options.tokens_per_block
        counts = [max(0, -(-(columns - row.start) // size)) for row in self._rows]
        width = max(row.start + count * size for row, count in zip(self._rows, counts, strict=True))
        for layer, shape in zip(self.layers, self.store.shapes, strict=True):
            layer.lay(*_room(shape, len(self._rows), width))
        for i, (row, count) in enumerate(zip(self._rows, counts, strict=True)):
            if count:
                good = self.store.load(row.tokens, [self._pieces(i, row.start + n * size) for n in range(count)])
                columns = min(columns, row.start + good)
        self._keep(columns)

    def _keep(self, columns: int) -> None:
        """Zeroes padding: it must be finite, because masked values are still multiplied."""
        if columns <= min(row.start for row in self._rows):
            self.reset()
            return
        self.restored = columns
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[:, :, :columns], layer.values[:, :, :columns]
            for i, row in enumerate(self._rows):
                layer.keys[i, :, : row.start] = layer.values[i, :, : row.start] = 0

    def _held_rows(self) -> int:
        return len(self.layers[0].keys) if self.get_seq_length() else 0

    def _first_keys(self, row: int, start: int) -> Any:
        return self.layers[0].keys[row, :, start:].transpose(0, 1)

    def _store(self, row: int, kept: Row) -> int:
        size = self.store.options.tokens_per_block
        return self.store.save(kept.tokens, lambda n: self._pieces(row, kept.start + n * size))

    def _pieces(self, row: int, start: int) -> Pieces:
        """A block's pieces: per layer K, then V, each [tokens, kv_heads, head_dim]."""
        part = slice(start, start + self.store.options.tokens_per_block)
        return [kv[row, :, part].transpose(0, 1) for layer in self.layers for kv in (layer.keys, layer.values)]


def _room(shape: LayerShape, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer, not filled."""
    made: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    keys = torch.empty((rows, shape.kv_heads, width, shape.head_dim), **made)
    return keys, torch.empty((rows, shape.kv_heads, width, shape.value_dim), **made)
