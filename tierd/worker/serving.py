"""The queue of an engine: a request starts when there is room, and prompts do not stop others.

Each step computes the next token of every sequence that decodes, and one chunk of the oldest
unfinished prompt. Chunks of other prompts join within `EngineOptions.step_tokens`. A sequence that
ends makes room at once (Yu et al., Orca, OSDI 2022, section 3.1; Agrawal et al., Sarathi,
arXiv 2308.16369). A request opens when its first chunk has its turn. If its prompt begins as one
that is being computed, it waits for that one's blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from tierd.worker.report import Report, Request
from tierd.worker.sequences import LiveSequence

if TYPE_CHECKING:
    from tierd.worker.engine import Engine


class Queue:
    """Serves requests on one engine. One caller thread."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        """requests: possible ones."""
        self._engine = engine
        self._waiting = deque(enumerate(requests))
        self._prompts: dict[LiveSequence, int] = {}
        self._decoding: dict[LiveSequence, tuple[int, int]] = {}
        self._reports: dict[tuple[int, int], Report] = {}

    def serve(self) -> list[Report]:
        """One report per sample, in order. Releases all pages, also on an error."""
        try:
            while self._waiting or self._prompts or self._decoding:
                self._step()
        finally:
            for sequence in (*self._prompts, *self._decoding):
                sequence.table.release()
        return [report for _, report in sorted(self._reports.items(), key=lambda item: item[0])]

    def _step(self) -> None:
        """One pass, then a token for each sequence that it made ready."""
        decoding = list(self._decoding)
        computed = decoding + self._chunks(len(decoding))
        with self._engine.timed(decoding):
            self._engine.compute(computed)
            for sequence in [s for s in self._prompts if s.is_ready]:
                self._start_samples(sequence)
            self._engine.pick([s for s in self._decoding if s.is_ready])
        for sequence in [s for s in self._decoding if s.is_done]:
            self._reports[self._decoding[sequence]] = self._engine.end(sequence)
            del self._decoding[sequence]

    def _chunks(self, tokens: int) -> list[LiveSequence]:
        """Sequences of prompts with a chunk in this step, beside so many tokens."""
        chosen: list[LiveSequence] = []
        prompts = chain(list(self._prompts), self._opened())
        while not chosen or tokens < self._engine.options.step_tokens:
            sequence = next(prompts, None)
            if sequence is None:
                break
            tokens += self._engine.next_tokens(sequence)
            if not chosen or tokens <= self._engine.options.step_tokens:
                chosen.append(sequence)
        return chosen

    def _opened(self) -> Iterator[LiveSequence]:
        """Opens waiting requests one by one while there is room for their samples."""
        while self._waiting:
            number, request = self._waiting[0]
            taken = len(self._decoding) + sum(sequence.request.samples for sequence in self._prompts)
            if taken and taken + request.samples > self._engine.options.batch_limit:
                return
            if any(self._begin_alike(sequence.request, request) for sequence in self._prompts):
                return
            self._waiting.popleft()
            sequence = self._engine.open(request)
            self._prompts[sequence] = number
            yield sequence

    def _begin_alike(self, one: Request, other: Request) -> bool:
        """Whether both prompts have the same first block."""
        size = self._engine.source.shape.tokens_per_block
        return len(one.tokens) >= size and one.tokens[:size] == other.tokens[:size]

    def _start_samples(self, sequence: LiveSequence) -> None:
        """Forks a computed prompt; all of its samples decode from now on."""
        number = self._prompts.pop(sequence)
        self._decoding[sequence] = number, 0
        for stream in range(1, sequence.request.samples):
            self._decoding[self._engine.fork(sequence, stream=stream)] = number, stream
