"""Sequences being served, and one pass of the model over some of them.

Purpose: what the engine knows of a request while it runs, and the attention of a pass: first every run's new keys and values
go into pages, then all is read there. Non-purpose: deciding what runs when. Invariant: rows of a pass are the runs' tokens
in order; positions before a table's length are read, never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from array_api_compat import to_device
from numpy.typing import NDArray

from tierd.kernels import PagedAttention, PagedBatch
from tierd.worker.blocks import BlockTable
from tierd.worker.report import Report, Request

Array = Any
"""A numpy array or a torch tensor."""


@dataclass(eq=False, slots=True)
class LiveSequence:
    """A request being served. logits: float32 [vocab] for the token after the last one. mass: attention weight per page."""

    request: Request
    table: BlockTable
    tokens: list[int]
    logits: NDArray[np.float32]
    rng: np.random.Generator
    report: Report
    started_s: float
    mass: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    is_done: bool = False

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[len(self.request.tokens) :]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one sequence in one pass. Those before the table's length are computed but not written."""

    sequence: LiveSequence
    start: int
    stop: int


class Pass:
    """Attention of one pass over the model: writes each layer's keys and values to pages, then reads them there."""

    def __init__(self, runs: Sequence[Run], *, attention: PagedAttention, with_mass: bool) -> None:
        self._runs, self._attention = runs, attention
        self._starts = [0]
        for run in runs:
            self._starts.append(self._starts[-1] + run.stop - run.start)
        self.last_rows = [stop - 1 for stop in self._starts[1:]]
        tables = [run.sequence.table for run in runs]
        firsts = [sum(len(t.pages) for t in tables[:i]) for i in range(len(tables))]
        self._batch = PagedBatch(
            self._starts,
            [run.stop for run in runs],
            [range(first, first + len(t.pages)) for first, t in zip(firsts, tables, strict=True)],
        )
        self.masses = [np.zeros(len(t.pages)) for t in tables] if with_mass else None

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Model's `Attend`."""
        for run, first in zip(self._runs, self._starts, strict=False):
            table = run.sequence.table
            start = max(run.start, table.length)
            rows = slice(first + start - run.start, first + run.stop - run.start)
            table.write(layer, start, k=k[rows], v=v[rows])
        pages = [page.array[layer] for run in self._runs for page in run.sequence.table.pages]
        attended = self._attention(q, pages, self._batch, with_mass=self.masses is not None)
        for total, mass in zip(self.masses or [], attended.mass or [], strict=True):
            seen = np.asarray(to_device(mass.mean(0), "cpu"), dtype=np.float64)
            total[: len(seen)] += seen
        return attended.out
