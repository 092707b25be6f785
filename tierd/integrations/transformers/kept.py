"""Common part of both caches: the tokens certainly in their rows, and `save`.

Nothing is stored under the names of other tokens. Of a row mixed by beams, only the prompt is
stored. If a row of tokens stands for several of the cache, only their common part is stored.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from transformers.cache_utils import Cache

from tierd.errors import InvalidArgument
from tierd.integrations.transformers.rows import Row, rows_of
from tierd.integrations.transformers.store import TierdStore


class KeptCache(Cache):
    """A cache over a TierdStore. restored: columns of the batch that need no computation."""

    def __init__(self, store: TierdStore, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.store = store
        self.restored = 0
        self._certain: int | None = None  # columns whose tokens are known; None: all
        self._rows: list[Row] = []

    def save(self, tokens: Any, attention_mask: Any = None) -> int:
        """Stores whole computed blocks; returns how many tokens of all rows are stored now.

        tokens: generate()'s result, or the prompts; one row for each of the cache's or each prompt.
        attention_mask: as given to generate(). Blocks end with the tokens or at mixed beams.
        Raises InvalidArgument for tokens that do not fit the cache.
        """
        rows = rows_of(tokens, attention_mask, self.store.padding)
        held = self._held_rows()
        copies, odd = divmod(held, len(rows))
        if odd or (held and not copies):
            raise InvalidArgument(f"save: {len(rows)} rows of tokens for {held} of the cache; give the prompts")
        self._check_same(rows, held)
        return sum(self._save_row(row, i * copies, copies) for i, row in enumerate(rows)) if held else 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders beams; from here on only the search knows each row's tokens."""
        self._doubt()
        self._choose(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only these rows, in this order: numbers, or a bool of each row."""
        self._choose(indices)
        super().batch_select_indices(indices)

    def activate_past_recording(self) -> None:
        """Starts assisted decoding, which computes the whole prompt, so a restored prefix is dropped."""
        if self.restored and self.get_seq_length() == self.restored:
            self.reset()
        elif self.get_seq_length():
            self._doubt()
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' own. Removed columns are no longer restored ones."""
        super().crop(tokens_to_remove)
        self.restored = min(self.restored, self.get_seq_length())

    def reset(self) -> None:
        """Empties the cache."""
        super().reset()
        self._certain, self._rows, self.restored = None, [], 0

    @abstractmethod
    def _held_rows(self) -> int:
        """Rows of the cache; 0 while it is empty."""

    @abstractmethod
    def _first_keys(self, row: int, start: int) -> Any:
        """Keys of the first layer, [tokens, ...], without the row's padding, which ends at column `start`."""

    @abstractmethod
    def _store(self, row: int, kept: Row) -> int:
        """Stores whole blocks of a row; returns how many tokens are stored. kept: its certain tokens."""

    def _save_row(self, row: Row, first: int, copies: int) -> int:
        length = self.get_seq_length()
        count = max(0, (length if self._certain is None else min(self._certain, length)) - row.start)
        keys = self._first_keys(first, row.start)[:count] if copies > 1 else None
        for other in range(first + 1, first + copies):
            count = min(count, _common(keys, self._first_keys(other, row.start)[:count]))
        return self._store(first, Row(row.tokens[:count], row.start))

    def _doubt(self) -> None:
        length = self.get_seq_length()
        self._certain = length if self._certain is None else min(self._certain, length)

    def _choose(self, indices: torch.Tensor) -> list[int]:
        """Numbers of the remaining rows, in their order; also selects the restored rows."""
        held = self._held_rows()
        chosen: list[int] = torch.arange(held)[indices.cpu()].tolist() if held else []
        self._rows = [self._rows[i * len(self._rows) // held] for i in chosen if self._rows]
        return chosen

    def _check_same(self, rows: list[Row], held: int) -> None:
        """Raises InvalidArgument if the rows differ from the restored ones. Several of the `held`
        cache rows may share one row of tokens, or may have done so when restored."""
        for at in range(held) if self.restored else ():
            i = at * len(rows) // held
            row, known = rows[i], self._rows[at * len(self._rows) // held]
            whole = max(0, min(self.restored - known.start, len(row.tokens)))
            if row.start != known.start or (row.tokens[:whole] != known.tokens[:whole]).any():
                raise InvalidArgument(
                    f"save: row {i} begins with other tokens, or other padding, than the prompt that was restored"
                )


def _common(first: Any, second: Any) -> int:
    """Leading tokens with equal keys in two rows of the first layer; these keys depend on the token alone."""
    same = (first[: len(second)] == second[: len(first)]).flatten(1).all(dim=1)
    return int(same.long().cumprod(0).sum())
