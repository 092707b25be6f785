"""Token policies in teacher-forced evaluation, without pages.

A prompt is computed once and exactly; then any policy continues it. Each token of the continuation
acts as a decode step of the engine does: drop, choose pages, attend, note.

    prompt = Prompt()
    model.hidden(tokens[:768], positions[:768], prompt.attend)
    hidden = model.hidden(tokens[768:], positions[768:], attention_for(choice, prompt, model.spec))
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tierd.kernels import PagedBatch, paged_attention
from tierd.worker.model import Attend, rope_frequencies
from tierd.worker.spec import LlamaSpec
from tierd.worker.tokens.choice import TokenChoice
from tierd.worker.tokens.policy import Place, TokenPolicy
from tierd.worker.tokens.weights import bounds_of, key_weights, scaled, turned

Floats = NDArray[np.floating]


@dataclass(slots=True)
class Prompt:
    """An exactly computed prompt of numpy arrays; a caller may replace keys and values by coded ones.

    q: per layer [tokens, q_heads, head_dim]. k and v: per layer [tokens, kv_heads, head_dim].
    """

    q: list[Floats] = field(default_factory=list)
    k: list[Floats] = field(default_factory=list)
    v: list[Floats] = field(default_factory=list)

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """Model's `Attend`: exact, and recorded."""
        assert layer == len(self.q), "a prompt is computed once"
        for kept, array in ((self.q, q), (self.k, k), (self.v, v)):
            kept.append(array)
        out: Floats = paged_attention(q, [np.stack([k, v])], _over(len(q), len(k), len(k))).out
        return out


def attention_for(choice: TokenChoice, prompt: Prompt, spec: LlamaSpec, *, tokens_per_block: int = 16) -> Attend:
    """Model's `Attend` for the tokens behind a prompt; usable for one pass. tokens_per_block: of the
    pages that "quest" chooses from. Raises InvalidArgument for an impossible choice."""
    choice.checked()
    frequencies = rope_frequencies(spec)

    def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        policy = choice.policy(Place(layer, spec.kv_heads, len(prompt.k[layer]), tokens_per_block))
        view = _LayerView(policy, prompt, layer, room=len(q))
        if not choice.tokens and not policy.reads_pages:
            return view.at_once(q, k, v, frequencies)
        steps = zip(q, k, v, strict=True)
        return np.stack([view.step(*step, frequencies) for step in steps])

    return attend


class _LayerView:
    """Keys and values that one layer still holds: the first `held` of kv [2, slots, kv_heads, head_dim]."""

    def __init__(self, policy: TokenPolicy, prompt: Prompt, layer: int, *, room: int) -> None:
        both = np.stack([prompt.k[layer], prompt.v[layer]])
        self._policy, self.held, self.seen = policy, both.shape[1], both.shape[1]
        self._kv = np.concatenate([both, np.zeros((2, room, *both.shape[2:]), both.dtype)], axis=1)
        self._sinks = both[0, : policy.sinks].copy()
        self._bounds: list[NDArray[np.float32]] = []
        if policy.queries:
            q = prompt.q[layer][-policy.queries :]
            attended = paged_attention(q, [both], _over(len(q), self.held, self.held))
            policy.note(key_weights(q, both[0], attended.lse))

    def at_once(self, q: Floats, k: Floats, v: Floats, frequencies: NDArray[np.float32]) -> Floats:
        """The outputs for all tokens, if those decoded stay."""
        self._drop(frequencies)
        stop = self.held + len(k)
        self._kv[:, self.held : stop] = k, v
        out: Floats = paged_attention(q, [self._kv[:, :stop]], _over(len(q), stop, stop)).out
        return out

    def step(self, q: Floats, k: Floats, v: Floats, frequencies: NDArray[np.float32]) -> Floats:
        """The output for one token, [q_heads, head_dim]."""
        self._drop(frequencies)
        self._kv[:, self.held] = k, v
        self.held, self.seen = self.held + 1, self.seen + 1
        size = self._policy.place.page_tokens
        pages = [self._kv[:, at : at + size] for at in range(0, self.held, size)]
        batch = _over(1, self.held, size)
        if self._policy.reads_pages and self._policy.place.full_pages:
            self._bounds += [bounds_of(page[0]) for page in pages[len(self._bounds) : -1]]
            chosen = self._policy.read(scaled(q), np.stack(self._bounds), len(pages))
            batch = batch if chosen is None else replace(batch, subsets=[chosen])
        attended = paged_attention(q[None], pages, batch)
        if self._policy.notes_decoding:
            self._policy.note(key_weights(q[None], self._kv[0, : self.held], attended.lse))
        out: Floats = attended.out[0]
        return out

    def _drop(self, frequencies: NDArray[np.float32]) -> None:
        kept = self._policy.keep(self.held, self.seen)
        if kept is None:
            return
        self.held = kept.shape[1]
        for head, slots in enumerate(kept):
            self._kv[:, : self.held, head] = self._kv[:, slots, head]
        if len(self._sinks):
            self._kv[0, : len(self._sinks)] = turned(self._sinks, self.seen - self.held, frequencies)


def _over(rows: int, slots: int, size: int) -> PagedBatch:
    """The last rows of a sequence in pages of so many tokens."""
    return PagedBatch([0, rows], [slots], [range(-(-slots // size))])
