"""Sequences being served, and one pass of the model over some of them.

The attention of a pass first writes every run's new keys and values into pages, then reads all
there. Kernels do both, or the array library does. The engine decides the order of runs. Rows of a
pass are the runs' tokens in order. Positions before a table's length are read, never written.
Pages that several decoding runs share are read once, if that saves enough (`SAVED_TOKENS`,
`SAVED_BYTES`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from array_api_compat import to_device
from numpy.typing import NDArray

from tierd.kernels import Attended, PagedAttention, PagedBatch
from tierd.kernels.attention import KernelAttention
from tierd.kernels.pool import joined
from tierd.kernels.prefixes import SharedPrefix, shared_prefixes
from tierd.worker.blocks import BlockTable
from tierd.worker.far import FarPrompt
from tierd.worker.report import Report, Request
from tierd.worker.tokens.view import TokenView

Array = Any
"""A numpy array or a torch tensor."""

SAVED_TOKENS = 2048
"""Without kernels, runs share a prefix if at least so many tokens need not be read again."""
SAVED_BYTES = 1 << 30
"""With kernels, if so many bytes a layer need not: a GPU reads them while the host launches the rest."""

Subsets = Sequence[Sequence[Sequence[int]]]
"""As `PagedBatch.subsets`."""


@dataclass(eq=False, slots=True)
class LiveSequence:
    """logits: float32 [vocab] for the token after the last one, once the sequence is ready.
    likeliest: that token, if the device told it; then logits may be empty, unless `is_scored`.
    start: the first token to compute. mass: attention weight per page.
    view: of the request's token policy; None: all tokens. far: the prompt, if it is read as a far
    one."""

    request: Request
    table: BlockTable
    tokens: list[int]
    logits: NDArray[np.float32]
    rng: np.random.Generator
    report: Report
    started_s: float
    start: int = 0
    mass: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    is_done: bool = False
    view: TokenView | None = None
    far: FarPrompt | None = None
    likeliest: int | None = None
    is_scored: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the logits after the last token are computed."""
        return self.start == len(self.tokens)

    @property
    def is_decoding(self) -> bool:
        """Whether it has tokens after the prompt."""
        return len(self.tokens) > len(self.request.tokens)

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[len(self.request.tokens) :]

    @property
    def first_query(self) -> int:
        """The first token of the prompt to compute although its page may be there. It is the last
        one, for its logits, or an earlier one whose query a token policy needs."""
        return self.view.first_query if self.view else len(self.request.tokens) - 1

    def drop(self, stop: int) -> None:
        """Drops tokens as the policy says, before those up to `stop` are computed."""
        if self.view is None:
            return
        kept = self.view.chosen(self.table)
        if kept is not None:
            self.report.stored_tokens = max(self.report.stored_tokens, self.table.stored_tokens)
            self.table.report_attention(self.mass)
            self.mass = np.zeros(0)
            self.view.drop(self.table, kept)
        self.view.make_room(self.table, stop)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one sequence in one pass; those before the table's length are not written."""

    sequence: LiveSequence
    start: int
    stop: int

    @property
    def positions(self) -> range:
        """Of its tokens, for the model."""
        shift = self.sequence.view.shift if self.sequence.view else 0
        return range(self.start - shift, self.stop - shift)

    @property
    def far(self) -> FarPrompt | None:
        """The far prompt that its one token reads; None: the tokens read all pages in place."""
        far, prompt = self.sequence.far, len(self.sequence.request.tokens)
        return far if far and far.tokens and self.stop - self.start == 1 and self.start >= prompt else None


class Pass:
    """Attention of one model pass: writes each layer's keys and values to pages, then reads them there."""

    def __init__(self, runs: Sequence[Run], *, attention: PagedAttention, with_mass: bool) -> None:
        starts = [0]
        for run in runs:
            starts.append(starts[-1] + run.stop - run.start)
        self.last_rows = [stop - 1 for stop in starts[1:]]
        tables = [run.sequence.table for run in runs]
        ends = list(accumulate(len(table.pages) for table in tables))
        batch = PagedBatch(
            starts,
            # Masses are those of all tokens; else attention to a far prompt is none of the batch's.
            [0 if run.far and not with_mass else run.stop - run.sequence.table.dropped for run in runs],
            [range(end - len(t.pages), end) for end, t in zip(ends, tables, strict=True)],
            shared=[] if with_mass else find_shared(runs, by_kernels=isinstance(attention, KernelAttention)),
        )
        self._runs, self._starts, self._shape = runs, starts, tables[0].shape
        self._has_views = any(run.sequence.view for run in runs)
        self._with_mass = with_mass
        self._work: _Work = (
            _KernelWork(attention, runs, batch)
            if isinstance(attention, KernelAttention)
            else _PlainWork(attention, runs, batch)
        )

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Model's `Attend`. Raises PagesMissing, before anything of this layer is read."""
        for run in self._runs:
            if self._has_views:  # their notes cannot be taken back
                run.sequence.table.await_layers()
            else:
                run.sequence.table.await_layer(layer)
        self._work.store(layer, k, v)
        subsets = self._subsets(layer, q) if self._has_views else None
        attended = self._work.attend(layer, q, with_mass=self._with_mass, subsets=subsets)
        if self._has_views:
            self._note(layer, q, attended.lse)
        for run, row in zip(self._runs, self._starts, strict=False):
            if run.far:
                attended.out[row] = self._read_far(layer, run, q[row], attended.lse[row])
        return attended.out

    def _read_far(self, layer: int, run: Run, q: Array, lse: Array) -> Array:
        """The output of a run's one row over its far prompt. lse: [q_heads], over all tokens if
        attention is measured."""
        assert run.far is not None
        report = run.sequence.report.far
        done = run.far.attend(layer, q, run.sequence.table, run.stop, report)
        if self._with_mass:
            shares = self._shape.backend.to_numpy(done.lse[0] - lse)
            report.masses.append(float(np.exp(shares).mean()))
        return done.out[0]

    def masses(self) -> list[NDArray[np.float64]]:
        """Attention weight on each page of each run, the mean over query heads, over all layers so far."""
        means = [np.asarray(to_device(mass.mean(0), "cpu"), dtype=np.float64) for mass in self._work.masses()]
        return [np.nan_to_num(mean) for mean in means]  # rows without scores have no mass

    def _subsets(self, layer: int, q: Array) -> Subsets | None:
        """Pages that each run reads, if a policy chooses some; a run of several tokens reads all."""
        chosen = [
            run.sequence.view.read(layer, q[first], run.sequence.table, run.stop)
            if run.sequence.view and run.stop - run.start == 1
            else None
            for run, first in zip(self._runs, self._starts, strict=False)
        ]
        if all(pages is None for pages in chosen):
            return None
        heads = self._runs[0].sequence.table.shape.geometry.kv_heads
        every = [range(len(run.sequence.table.pages)) for run in self._runs]
        return [[all_] * heads if some is None else some for some, all_ in zip(chosen, every, strict=True)]

    def _note(self, layer: int, q: Array, lse: Array) -> None:
        for run, first in zip(self._runs, self._starts, strict=False):
            if run.sequence.view:
                rows = slice(first, first + run.stop - run.start)
                run.sequence.view.note(layer, q[rows], lse[rows], run.sequence.table, run.stop)


def find_shared(runs: Sequence[Run], *, by_kernels: bool) -> list[SharedPrefix]:
    """Prefixes that runs of one token share, without those that save too little. Runs of token
    policies and over far prompts have none."""
    shape = runs[0].sequence.table.shape
    size = shape.tokens_per_block
    singles = [run.stop - run.start == 1 and not (run.sequence.view or run.far) for run in runs]
    if sum(singles) < 2:
        return []
    pages = [
        run.sequence.table.located().addresses[: run.start // size] if is_single else np.zeros(0, np.int64)
        for run, is_single in zip(runs, singles, strict=True)
    ]
    page_bytes = shape.block_bytes // shape.geometry.layers
    return shared_prefixes(pages, least=-(-SAVED_BYTES // page_bytes) if by_kernels else -(-SAVED_TOKENS // size))


class _Work(Protocol):
    """Operations on the pages of a pass, layer by layer."""

    def store(self, layer: int, k: Array, v: Array) -> None: ...

    def attend(self, layer: int, q: Array, *, with_mass: bool, subsets: Subsets | None) -> Attended: ...

    def masses(self) -> Sequence[Array]: ...


class _PlainWork:
    """By the array library, page by page."""

    def __init__(self, attention: PagedAttention, runs: Sequence[Run], batch: PagedBatch) -> None:
        self._attention, self._runs, self._batch = attention, runs, batch
        self._shape = runs[0].sequence.table.shape
        self._pages = [page.array for run in runs for page in run.sequence.table.pages]
        self._masses: list[Array] = []

    def store(self, layer: int, k: Array, v: Array) -> None:
        for run, first in zip(self._runs, self._batch.query_starts, strict=False):
            table = run.sequence.table
            start = max(run.start, table.length)
            rows = slice(first + start - run.start, first + run.stop - run.start)
            table.write(layer, start, k=k[rows], v=v[rows])

    def attend(self, layer: int, q: Array, *, with_mass: bool, subsets: Subsets | None) -> Attended:
        batch = self._batch if subsets is None else replace(self._batch, subsets=subsets)
        done = self._attention(q, self._shape.read(self._pages, layer), batch, with_mass=with_mass)
        if done.mass is not None:
            self._masses = _added(self._masses, done.mass)
        return done

    def masses(self) -> Sequence[Array]:
        return self._masses


class _KernelWork:
    """By kernels, of a GPU or emulated: one launch stores all new tokens, and pages are read in place."""

    def __init__(self, attention: KernelAttention, runs: Sequence[Run], batch: PagedBatch) -> None:
        tables = [run.sequence.table for run in runs]
        places = [run.sequence.table.slots(run.start, run.stop) for run in runs]
        shape, firsts = tables[0].shape, [table[0] * tables[0].shape.tokens_per_block for table in batch.tables]
        slots = [np.where(own < 0, own, first + own) for own, first in zip(places, firsts, strict=True)]
        pages = joined([table.located() for table in tables])
        self._over = partial(attention.over, shape.read(pages), slots=np.concatenate(slots))
        self._batch, self._pass = batch, self._over(batch)
        self._backend, self._dtype = shape.backend, shape.geometry.dtype
        self._apart: list[Array] = []
        self._queries: Array = None

    def store(self, layer: int, k: Array, v: Array) -> None:
        keys, values = (self._backend.to_pages(array, self._dtype) for array in (k, v))
        self._pass.store(layer, keys, values)

    def attend(self, layer: int, q: Array, *, with_mass: bool, subsets: Subsets | None) -> Attended:
        queries = self._backend.to_pages(q, self._dtype)
        over = self._pass if subsets is None else self._over(replace(self._batch, subsets=subsets))
        done = over.attend(layer, queries, with_mass=with_mass)
        if with_mass and subsets is not None:
            self._apart = _added(self._apart, over.masses(queries))
        self._queries = queries
        return replace(done, out=self._backend.from_kernels(done.out))

    def masses(self) -> Sequence[Array]:
        return _added(self._apart, self._pass.masses(self._queries))


def _added(one: Sequence[Array], other: Sequence[Array]) -> list[Array]:
    """Their sums; an empty list is none."""
    return [a + b for a, b in zip(one, other, strict=True)] if one else list(other)
