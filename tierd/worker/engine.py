"""The engine: requests in, tokens out, keys and values in pages.

It does chunked prefill behind a stored prefix, decodes several sequences at once, forks, and
reports figures per request. It does no scheduling across workers, no tokenizing and no HTTP.
Attention reads every key from a page, also new ones, so page rounding is equal in all runs. Chunks
of a prefill end on a fixed grid of absolute positions, so reuse changes results by rounding at
most. A step computes, picks, then commits. Contents of a lost page are computed again. Every exit
releases the pages.

    with Engine(Llama(open_checkpoint(folder)), source) as engine:
        report = engine.generate([Request(tokens, max_new_tokens=64)])[0]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.kernels import PagedAttention
from tierd.worker.attention import attention_for
from tierd.worker.blocks import BlockTable
from tierd.worker.model import Llama
from tierd.worker.pages import Held, PageSource
from tierd.worker.report import Report, Request
from tierd.worker.sampling import pick_token
from tierd.worker.sequences import LiveSequence, Pass, Run


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits and features of an engine.

    chunk_tokens: prefill computes up to its next multiple; more is faster, in memory of its square.
    batch_limit: sequences decoded at once. keep_tails: store the tokens after the last full block.
    measure_attention: report each page's attention weight at the end; costs a sum per page.
    """

    chunk_tokens: int = 256
    batch_limit: int = 64
    keep_tails: bool = True
    measure_attention: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        for name in ("chunk_tokens", "batch_limit"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"engine.{name}: {getattr(self, name)} is below 1; choose a positive number")


class Engine:
    """Serves requests on one model and one source of pages. One caller thread."""

    def __init__(
        self,
        model: Llama,
        source: PageSource,
        *,
        options: EngineOptions | None = None,
        attention: PagedAttention | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The engine closes `source`. attention: None: chosen by `attention_for`. clock: seconds,
        for reports.

        Raises InvalidArgument if the source's pages are not of the model's shape, and as
        `attention_for`.
        """
        self.model, self.source, self.options = model, source, options or EngineOptions()
        self._clock = clock
        geometry = source.shape.geometry
        wanted = model.spec.geometry(geometry.dtype)
        if geometry != wanted:
            raise InvalidArgument(
                f"source: pages are {geometry}, the model needs {wanted}; make it with the model's spec"
            )
        self._attention = attention or attention_for(model, source.shape)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def close(self) -> None:
        """Releases spare pages."""
        self.source.close()

    def generate(self, requests: Sequence[Request]) -> list[Report]:
        """Serves all requests, batch_limit at a time; one report per sample, in order. Raises
        InvalidArgument before it begins."""
        for request in requests:
            self._check(request)
        reports: list[Report] = []
        waiting = list(requests)
        while waiting:
            reports += self._serve(self._take_batch(waiting))
        return reports

    def begin(self, request: Request) -> LiveSequence:
        """Finds the stored prefix, computes the rest. Next: `pick`, which also commits the last chunk."""
        self._check(request)
        started = self._clock()
        held = self.source.acquire(request.tokens, marks=request.marks)
        sequence = self._open(request, held, started)
        try:
            self._prefill(sequence)
        except BaseException:
            sequence.table.release()
            raise
        return sequence

    def fork(self, sequence: LiveSequence, *, stream: int) -> LiveSequence:
        """A second continuation over the same pages; stream numbers its random draws."""
        return LiveSequence(
            request=sequence.request,
            table=sequence.table.fork(),
            tokens=list(sequence.tokens),
            logits=sequence.logits,
            rng=np.random.default_rng([sequence.request.seed, stream]),
            report=sequence.report.fresh(),
            started_s=sequence.started_s,
        )

    def pick(self, sequences: Sequence[LiveSequence]) -> None:
        """Picks the next token of each unfinished sequence, then commits full blocks.

        Raises InvalidArgument for a sequence whose logits were already used.
        """
        live = [s for s in sequences if not s.is_done]
        for sequence in live:
            self._pick(sequence)
        for sequence in live:
            sequence.report.committed_blocks += sequence.table.commit(sequence.tokens)

    def step(self, sequences: Sequence[LiveSequence]) -> None:
        """Computes all unfinished sequences together, then picks one more token for each."""
        live = [s for s in sequences if not s.is_done]
        if live:
            started_s = self._clock()
            for sequence in live:
                self._catch_up(sequence)
            logits = self._compute([Run(s, len(s.tokens) - 1, len(s.tokens)) for s in live])
            for sequence, row in zip(live, logits, strict=True):
                sequence.logits = row
            self.pick(live)
            spent_s = self._clock() - started_s
            for sequence in live:
                sequence.report.decode_s += spent_s

    def score(self, request: Request, following: Sequence[int]) -> NDArray[np.float64]:
        """Natural logarithms of the probabilities of these tokens after the prompt: float64 [n].

        The prompt's full blocks are stored, these tokens are not.
        """
        sequence, found = self.begin(request), []
        try:
            for token in following:
                logits = np.asarray(sequence.logits, np.float64)
                found.append(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
                sequence.tokens.append(token)
                sequence.logits = self._compute([Run(sequence, len(sequence.tokens) - 1, len(sequence.tokens))])[0]
        finally:
            sequence.table.release()
        return np.array(found)

    def end(self, sequence: LiveSequence) -> Report:
        """Commits the rest, releases the pages and returns the report."""
        report, table = sequence.report, sequence.table
        try:
            report.committed_blocks += table.commit(sequence.tokens)
            report.stored_tokens = table.named * self.source.shape.tokens_per_block
            if self.options.keep_tails and table.commit_tail(sequence.tokens):
                report.stored_tokens = table.length
            if self.options.measure_attention:
                self.source.report_attention(table.pages, sequence.mass.tolist())
        finally:
            table.release()
        report.tokens = sequence.generated
        report.total_s = self._clock() - sequence.started_s
        return report

    def _check(self, request: Request) -> None:
        spec = self.model.spec
        request.checked()
        total = len(request.tokens) + request.max_new_tokens
        if total > spec.max_positions:
            raise InvalidArgument(
                f"request: {len(request.tokens)} tokens and {request.max_new_tokens} new ones are above the model's "
                f"{spec.max_positions} positions; shorten one of them"
            )
        if min(request.tokens) < 0 or max(request.tokens) >= spec.vocab_size:
            raise InvalidArgument(
                f"request.tokens: an id is outside 0 to {spec.vocab_size - 1}; is this the model's tokenizer?"
            )

    def _take_batch(self, waiting: list[Request]) -> list[Request]:
        """Removes from the front as many requests as fit the batch limit, at least one."""
        room, taken = self.options.batch_limit, 0
        while taken < len(waiting) and (taken == 0 or waiting[taken].samples <= room):
            room -= waiting[taken].samples
            taken += 1
        batch, waiting[:taken] = waiting[:taken], []
        return batch

    def _serve(self, requests: Sequence[Request]) -> list[Report]:
        live: list[LiveSequence] = []
        try:
            for request in requests:
                live.append(self.begin(request))
                live += [self.fork(live[-1], stream=i) for i in range(1, request.samples)]
                self.pick(live[-request.samples :])
            while not all(s.is_done for s in live):
                self.step(live)
            return [self.end(s) for s in live]
        finally:
            for sequence in live:
                sequence.table.release()

    def _open(self, request: Request, held: Held, started_s: float) -> LiveSequence:
        total = len(request.tokens)
        return LiveSequence(
            request=request,
            table=BlockTable(self.source, held),
            tokens=list(request.tokens),
            logits=np.zeros(0, dtype=np.float32),
            rng=np.random.default_rng([request.seed, 0]),
            report=Report(
                prompt_tokens=total,
                reused_tokens=held.tokens,
                computed_tokens=max(1, total - held.tokens),
                tier_tokens=dict(held.tier_tokens),
                acquire_s=self._clock() - started_s,
            ),
            started_s=started_s,
        )

    def _prefill(self, sequence: LiveSequence) -> None:
        """Computes the prompt behind the held prefix by chunks; each is committed before the next begins."""
        total, table = len(sequence.tokens), sequence.table
        # A wholly held prompt computes its last token again, for its logits; its page is there.
        start = min(table.length, total - 1)
        while start < total:
            sequence.report.committed_blocks += table.commit(sequence.tokens)
            start = min(start, self._note_lost(sequence, start))
            stop = self._chunk_end(start, total)
            sequence.logits = self._compute([Run(sequence, start, stop)])[0]
            start = stop

    def _catch_up(self, sequence: LiveSequence) -> None:
        """Computes the content of lost pages again, up to the last token, which the step computes."""
        table, last = sequence.table, len(sequence.tokens) - 1
        table.drop_lost()
        self._note_lost(sequence, last)
        while table.length < last:
            self._compute([Run(sequence, table.length, self._chunk_end(table.length, last))])

    def _note_lost(self, sequence: LiveSequence, length: int) -> int:
        """How many of these positions the table still has."""
        kept = min(length, sequence.table.length)
        sequence.report.recomputed_tokens += length - kept
        return kept

    def _chunk_end(self, start: int, stop: int) -> int:
        chunk = self.options.chunk_tokens
        return min(stop, (start // chunk + 1) * chunk)

    def _pick(self, sequence: LiveSequence) -> None:
        if sequence.table.length != len(sequence.tokens):
            raise InvalidArgument("sequence: its logits were used already; call step for the next ones")
        request, report = sequence.request, sequence.report
        token = pick_token(sequence.logits, temperature=request.temperature, rng=sequence.rng)
        if not sequence.generated:
            report.ttft_s = self._clock() - sequence.started_s
        sequence.tokens.append(token)
        report.stopped = token in request.stop
        sequence.is_done = report.stopped or len(sequence.generated) >= request.max_new_tokens

    def _compute(self, runs: Sequence[Run]) -> NDArray[np.float32]:
        """One pass over the tokens of all runs: float32 [runs, vocab], the logits after each run's last token."""
        for run in runs:
            run.sequence.table.grow(run.stop)
        backend = self.model.backend
        tokens = backend.ints([t for run in runs for t in run.sequence.tokens[run.start : run.stop]])
        positions = backend.ints([p for run in runs for p in range(run.start, run.stop)])
        step = Pass(runs, attention=self._attention, with_mass=self.options.measure_attention)
        hidden = self.model.hidden(tokens, positions, step.attend)
        for run in runs:
            run.sequence.table.advance(run.stop)
        if step.masses is not None:
            self._add_mass(runs, step.masses)
        return self.model.logits(hidden[backend.ints(step.last_rows)])

    def _add_mass(self, runs: Sequence[Run], masses: Sequence[NDArray[np.float64]]) -> None:
        for run, mass in zip(runs, masses, strict=True):
            known = run.sequence.mass[: len(mass)]  # mass on lost pages is lost too
            mass[: len(known)] += known
            run.sequence.mass = mass
