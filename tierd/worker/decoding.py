"""Decode steps over arrays that stay on the device, so that a CUDA graph can replay them.

A step in which every sequence computes one token reads arrays that were allocated once. The host
copies one small array a step: tokens, positions, slots, lengths, and the entries of page tables
that changed. Pages keep their numbers while others come. A GPU runs a step of a size once,
captures it at its second use, and replays it from then on. A CPU calls the same function. Sizes are
powers of two: rows without a sequence have length 0, and their slot is -1. It does not compute
chunks of prompts, token policies, page masses, or shared prefixes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from tierd.kernels.arguments import DeviceBatch
from tierd.kernels.attention import KernelAttention
from tierd.kernels.pages import KvPages, store_tokens
from tierd.kernels.pool import Located, Pool, cast, joined, placed
from tierd.worker.blocks import BlockTable
from tierd.worker.model import Llama
from tierd.worker.pages import PageShape
from tierd.worker.sequences import Run, find_shared

Array = Any
"""A numpy array or a torch tensor."""
Scored = tuple[Array, Array]
"""Logits [rows, vocab] and the likeliest tokens i64 [rows], on the device."""
TOKEN, POSITION, SLOT, LENGTH, PLACE, NUMBER = range(6)
"""Rows of the array that is copied in each step; the last two are changed entries of tables."""
UNKNOWN = -1
_log = logging.getLogger(__name__)


class Decoding:
    """Decode steps of one engine. One caller thread."""

    def __init__(self, model: Llama, attention: KernelAttention, shape: PageShape, *, limit: int) -> None:
        """limit: sequences of a step. Tables have room for all positions of the model."""
        self._model, self._attention, self._shape = model, attention, shape
        self._limit = 1 << (limit - 1).bit_length()
        self._width = -(-model.spec.max_positions // shape.tokens_per_block)
        beside = model.backend.ints([0])
        self._given = placed(np.zeros((6, self._limit), np.int64), beside)
        # The row behind all others takes the entries of steps with fewer changes.
        self._mirror = np.full((self._limit + 1, self._width), UNKNOWN, np.int32)
        self._tables = placed(np.zeros_like(self._mirror), beside)
        self._of_rows: list[BlockTable] = []
        self._seen: list[Located | None] = [None] * self._limit
        self._pool: Pool | None = None
        self._layers: list[KvPages] = []
        self._has_shared = False
        self._replays: dict[int, Callable[[], Scored] | None] = {}

    @staticmethod
    def fits(model: Llama) -> bool:
        """Whether the model computes where its pages lie."""
        return model.backend.torch is not None or not model.backend.is_on_gpu

    def step(self, runs: Sequence[Run]) -> Scored | None:
        """Computes the token of each run, in order; rows beyond the runs mean nothing. The next
        step overwrites the result. None: a pass must compute them. Tables have grown before.

        Raises InvalidArgument for pages that are not alike or too far apart.
        """
        if not self._takes(runs):
            return None
        size = 1 << (len(runs) - 1).bit_length()
        try:
            self._bring(runs, size)
            return self._run(size)
        except BaseException:
            self._forget()  # entries may not have arrived
            raise

    def _takes(self, runs: Sequence[Run]) -> bool:
        tables = [run.sequence.table for run in runs]
        if len(runs) > self._limit or any(run.stop - run.start != 1 or run.sequence.view or run.far for run in runs):
            return False
        if any(table.is_arriving or len(table.pages) > self._width for table in tables):
            return False
        if tables != self._of_rows:
            self._of_rows, self._has_shared = tables, bool(find_shared(runs, by_kernels=True))
        return not self._has_shared

    def _bring(self, runs: Sequence[Run], size: int) -> None:
        """Copies the step's numbers to the device."""
        count, page_tokens = len(runs), self._shape.tokens_per_block
        places, numbers = self._changes(count)
        if len(places) > size:
            _fill(self._tables[:count], self._mirror[:count])
            places, numbers = places[:0], numbers[:0]
        given = np.zeros((6, self._limit), np.int64)
        given[SLOT], given[PLACE] = -1, self._limit * self._width
        given[TOKEN, :count] = [run.sequence.tokens[run.start] for run in runs]
        starts = given[POSITION, :count] = np.array([run.start for run in runs])
        given[LENGTH, :count] = starts + 1
        pages = self._mirror[np.arange(count), starts // page_tokens].astype(np.int64)
        is_new = starts >= [run.sequence.table.length for run in runs]
        given[SLOT, :count] = np.where(is_new, pages * page_tokens + starts % page_tokens, -1)
        given[PLACE, : len(places)], given[NUMBER, : len(numbers)] = places, numbers
        _fill(self._given, given)

    def _changes(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places in the flat tables whose entries changed, and the new ones. The mirror has them."""
        places, numbers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for row, table in enumerate(self._of_rows[:count]):
            located = table.located()
            if located is self._seen[row]:
                continue
            found = None if self._pool is None else self._pool.find_numbers(located.addresses)
            if found is None:
                self._renumber()
                return self._changes(count)
            line = self._mirror[row, : len(found)]
            changed = np.flatnonzero(line != found)
            line[changed], self._seen[row] = found[changed], located
            places.append(row * self._width + changed)
            numbers.append(found[changed])
        return np.concatenate(places), np.concatenate(numbers)

    def _renumber(self) -> None:
        """Numbers the pages anew, as some lie between the steps of the others. Captured steps have
        the previous numbers' first address and step."""
        pages = joined([table.located() for table in self._of_rows])
        self._pool = pool = Pool.of(self._shape.read(pages)).roomy()
        scales = None if pool.scales is None else self._attention.beside(pool.scales, self._given)
        self._layers = [pool.layer(layer, scales) for layer in range(self._model.spec.layers)]
        self._replays.clear()
        self._forget()

    def _forget(self) -> None:
        self._mirror[:] = UNKNOWN
        self._seen = [None] * self._limit

    def _run(self, size: int) -> Scored:
        if size not in self._replays:
            self._replays[size] = None
            return self._compute(size)
        replay = self._replays[size]
        if replay is None:
            replay = self._replays[size] = self._captured(size)
        return replay()

    def _captured(self, size: int) -> Callable[[], Scored]:
        try:
            return self._model.backend.captured(lambda: self._compute(size))
        except RuntimeError as fault:  # torch's; slower, but right
            _log.warning("decode steps of %d sequences run without a CUDA graph: %s", size, fault)
            return lambda: self._compute(size)

    def _compute(self, size: int) -> Scored:
        """One step. It reads the arrays of this object, weights and pages, and nothing else."""
        given, model, xp = self._given, self._model, array_namespace(self._given)
        entries = xp.astype(given[NUMBER, :size], xp.int32)
        xp.reshape(self._tables, (-1,))[given[PLACE, :size]] = entries
        batch = DeviceBatch(xp.astype(given[LENGTH, :size], xp.int32), self._tables[:size])
        slots = given[SLOT, :size]

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            return self._attend(self._layers[layer], (q, k, v), slots, batch)

        scores = model.scores(model.hidden(given[TOKEN, :size], given[POSITION, :size], attend))
        return scores, xp.argmax(scores, axis=-1)

    def _attend(self, kv: KvPages, qkv: tuple[Array, ...], slots: Array, batch: DeviceBatch) -> Array:
        assert self._pool is not None
        q, k, v = (self._pool.cast(array) for array in qkv)
        store_tokens(self._attention.library, k, v, slots, kv)
        return cast(self._attention.attended(q, kv, batch).out, qkv[0].dtype)


def _fill(target: Array, values: NDArray[Any]) -> None:
    """Copies from the host."""
    target[...] = array_namespace(target).asarray(values)
