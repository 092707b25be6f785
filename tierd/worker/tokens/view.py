"""The working view of a sequence under a token policy: the tokens that its block table still holds.

Only the table's own pages change: kept tokens are copied into private pages, and pages with names
are released as they are. Blocks stored in tierd stay complete. Tokens computed under a policy
differ from exact ones, so the table stores nothing from its first drop or partial read on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.worker.blocks import BlockTable
from tierd.worker.model import Llama, rope_frequencies
from tierd.worker.spec import LlamaSpec
from tierd.worker.tokens.choice import TokenChoice
from tierd.worker.tokens.policy import Place
from tierd.worker.tokens.weights import Floats, bounds_of, key_weights, scaled, turned


class TokenView:
    """One sequence's policies, one per layer. All layers and heads hold equally many tokens.

    shift: the position of a token is its number less this. A window's keys keep their rotation and
    sinks follow it; when positions end, they begin anew at 0.
    """

    def __init__(self, choice: TokenChoice, spec: LlamaSpec, *, prompt: int, page_tokens: int) -> None:
        """prompt: tokens of the prompt, which are computed exactly. page_tokens: of a page."""
        self._spec, self._prompt = spec, prompt
        places = [Place(layer, spec.kv_heads, prompt, page_tokens) for layer in range(spec.layers)]
        self._layers = [choice.policy(place) for place in places]
        self._noted = max(0, prompt - self._layers[0].queries)
        self._bounds: list[list[NDArray[np.float32]]] = [[] for _ in places]
        self._sinks: list[Floats] = []
        self.shift = 0

    @property
    def first_query(self) -> int:
        """The first token of the prompt whose query the policy needs, although its keys may be stored."""
        return min(self._noted, self._prompt - 1)

    def fork(self) -> TokenView:
        """An independent copy."""
        return copy.deepcopy(self)

    def chosen(self, table: BlockTable) -> NDArray[np.int64] | None:
        """Slots to keep, [layers, kv_heads, n]; None: all. Policies forget the others."""
        kept = [layer.keep(table.held, table.length) for layer in self._layers]
        return None if kept[0] is None else np.stack([slots for slots in kept if slots is not None])

    def drop(self, table: BlockTable, kept: NDArray[np.int64]) -> None:
        """Keeps these slots in private pages. Raises what reserving pages raises."""
        count = self._layers[0].sinks
        if count and not self._sinks:
            self._sinks = [table.keys(layer, count).copy() for layer in range(self._spec.layers)]
        table.keep(kept)
        self._place_sinks(table)

    def make_room(self, table: BlockTable, stop: int) -> None:
        """Begins positions anew if those up to token `stop` would be beyond the model's."""
        if stop - self.shift <= self._spec.max_positions or not self._sinks:
            return
        moved, self.shift = table.dropped - self.shift, table.dropped
        for layer in range(self._spec.layers):
            table.put_keys(layer, turned(table.keys(layer, table.held), -moved, rope_frequencies(self._spec)))
        self._place_sinks(table)

    def read(self, layer: int, q: Floats, table: BlockTable, stop: int) -> list[Sequence[int]] | None:
        """Pages that token `stop` - 1 reads, per kv head; None: all. q: [q_heads, head_dim]."""
        policy = self._layers[layer]
        if not policy.reads_pages or stop <= self._prompt or not policy.place.full_pages:
            return None
        bounds = self._bounds[layer]
        before = (stop - 1) // policy.place.page_tokens
        bounds += [bounds_of(table.page_keys(layer, page)) for page in range(len(bounds), before)]
        pages = policy.read(scaled(q), np.stack(bounds), len(table.pages))
        if pages is not None:
            table.is_exact = False
        return pages

    def note(self, layer: int, q: Floats, lse: Floats, table: BlockTable, stop: int) -> None:
        """Takes the attention of the tokens before `stop`: q [rows, q_heads, head_dim], lse [rows, q_heads]."""
        policy = self._layers[layer]
        first = max(self._noted, stop - len(q))
        if first < stop and policy.queries and (stop <= self._prompt or policy.notes_decoding):
            rows = slice(first - stop, None)
            policy.note(key_weights(q[rows], table.keys(layer, stop - table.dropped), lse[rows]))

    def advance(self, stop: int) -> None:
        """Tokens before `stop` were noted in all layers."""
        self._noted = max(self._noted, stop)

    def _place_sinks(self, table: BlockTable) -> None:
        by, frequencies = table.dropped - self.shift, rope_frequencies(self._spec)
        for layer, keys in enumerate(self._sinks):
            table.put_keys(layer, turned(keys, by, frequencies))


def open_view(choice: TokenChoice | None, spec: LlamaSpec, *, prompt: int, page_tokens: int) -> TokenView | None:
    """A view for a sequence whose request chose a policy. Arguments as TokenView."""
    return TokenView(choice, spec, prompt=prompt, page_tokens=page_tokens) if choice else None


def check_policy(choice: TokenChoice, model: Llama, chunk_tokens: int) -> None:
    """Raises InvalidArgument if this model's sequences cannot have the policy. chunk_tokens: of a prefill."""
    backend = model.backend
    if backend.library != "numpy" or backend.is_on_gpu:
        raise InvalidArgument(
            f"token_policy: {choice.name} selects on the host in numpy, the backend is {backend.library} on "
            f"{backend.device}; use Backend('numpy'), or no policy"
        )
    limit = model.spec.max_positions
    if choice.is_endless and choice.tokens + chunk_tokens > limit:
        raise InvalidArgument(
            f"token_policy.tokens: {choice.tokens} and a chunk of {chunk_tokens} are above the model's {limit} "
            "positions; lower tokens or chunk_tokens"
        )
