"""The engine: requests in, tokens out, keys and values in pages.

It does chunked prefill behind a stored prefix beside the decoding of other sequences, forks, and
reports figures per request. It does no scheduling across workers, no tokenizing and no HTTP.
Attention reads every key from a page, also new ones, so page rounding is equal in all runs. Chunks
of a prefill end on a fixed grid of absolute positions, so reuse changes results by rounding at
most. A step computes, picks, then commits. Contents of a lost page are computed again. Every exit
releases the pages. Its queue is in `serving.py`.

    with Engine(Llama(open_checkpoint(folder)), source) as engine:
        report = engine.generate([Request(tokens, max_new_tokens=64)])[0]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.kernels import PagedAttention
from tierd.kernels.attention import KernelAttention
from tierd.worker.attention import attention_for, name_of
from tierd.worker.blocks import BlockTable
from tierd.worker.decoding import Decoding
from tierd.worker.far import FarPrompt, check_far
from tierd.worker.model import Llama
from tierd.worker.pages import PagesMissing, PageSource
from tierd.worker.report import Report, Request
from tierd.worker.sampling import pick_token
from tierd.worker.sequences import LiveSequence, Pass, Run
from tierd.worker.serving import Queue
from tierd.worker.tokens.view import check_policy, open_view


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits and features of an engine.

    chunk_tokens: prefill computes up to its next multiple; more is faster, and others wait longer.
    step_tokens: one chunk joins each step; chunks of other prompts too while its tokens are at most
    so many. batch_limit: sequences served at once.
    keep_tails: store the tokens after the last full block.
    measure_attention: report each page's attention weight at the end; costs a sum per page. It
    counts the last 16 tokens of each chunk, and each decoded token.
    decode_graphs: with kernels, decode steps read arrays that stay on the device, and a GPU replays
    them as CUDA graphs (`decoding.py`).
    """

    chunk_tokens: int = 256
    step_tokens: int = 256
    batch_limit: int = 64
    keep_tails: bool = True
    measure_attention: bool = False
    decode_graphs: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        for name in ("chunk_tokens", "step_tokens", "batch_limit"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"engine.{name}: {getattr(self, name)} is below 1; choose a positive number")


Array = Any
"""A numpy array or a torch tensor."""


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
        self._decoding: Decoding | None = None
        by_steps = self.options.decode_graphs and not self.options.measure_attention
        if by_steps and isinstance(self._attention, KernelAttention) and Decoding.fits(model):
            self._decoding = Decoding(model, self._attention, source.shape, limit=self.options.batch_limit)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    @property
    def attention_name(self) -> str:
        """The attention in use: "reference", or kernels and whose prefill."""
        return name_of(self._attention)

    def close(self) -> None:
        """Releases spare pages."""
        self.source.close()

    def generate(self, requests: Sequence[Request]) -> list[Report]:
        """Serves all requests, batch_limit sequences at a time; one report per sample, in order.
        Raises InvalidArgument before it begins."""
        for request in requests:
            self._check(request)
        return Queue(self, requests).serve()

    def open(self, request: Request) -> LiveSequence:
        """Finds the stored prefix. Next: `compute`, until the sequence is ready."""
        self._check(request)
        total, shape, started_s = len(request.tokens), self.source.shape, self._clock()
        # Before the pages, which an error here would not release.
        view = open_view(request.token_policy, self.model.spec, prompt=total, page_tokens=shape.tokens_per_block)
        far = FarPrompt(request.far, shape, prompt=total, attention=self._attention) if request.far else None
        exact = request.tokens[: self._exact_length(request)]
        held = self.source.acquire(exact, marks=request.marks, by_layer=request.token_policy is None)
        sequence = LiveSequence(
            request=request,
            table=BlockTable(self.source, held),
            tokens=list(request.tokens),
            logits=np.zeros(0, dtype=np.float32),
            rng=np.random.default_rng([request.seed, 0]),
            report=Report(
                prompt_tokens=total,
                reused_tokens=held.tokens,
                tier_tokens=dict(held.tier_tokens),
                advised_compute_tokens=held.advised_compute_tokens,
                acquire_s=self._clock() - started_s,
            ),
            started_s=started_s,
            view=view,
            far=far,
        )
        sequence.start = min(held.tokens, sequence.first_query)
        sequence.report.computed_tokens = total - sequence.start
        return sequence

    def begin(self, request: Request) -> LiveSequence:
        """Finds the stored prefix, computes the rest. Next: `pick`, which also commits the last chunk."""
        sequence = self.open(request)
        try:
            self._finish([sequence])
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
            likeliest=sequence.likeliest,
            start=sequence.start,
            rng=np.random.default_rng([sequence.request.seed, stream]),
            report=sequence.report.fresh(),
            started_s=sequence.started_s,
            view=sequence.view.fork() if sequence.view else None,
            far=sequence.far,
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
            with self.timed(live):
                self._finish(live)
                self.pick(live)

    @contextmanager
    def timed(self, sequences: Sequence[LiveSequence]) -> Iterator[None]:
        """Adds the time within to the decode time of these sequences."""
        started_s = self._clock()
        yield
        spent_s = self._clock() - started_s
        for sequence in sequences:
            sequence.report.decode_s += spent_s

    def compute(self, sequences: Sequence[LiveSequence]) -> None:
        """One pass over the next tokens of sequences that are not ready: one token of each that
        decodes, one chunk of each other. Commits full blocks of prompts that need more passes."""
        has_prompts = not all(sequence.is_decoding for sequence in sequences)
        started_s = self._clock() if has_prompts else 0.0
        runs = [self._next_run(sequence) for sequence in sequences]
        runs.sort(key=lambda run: run.stop - run.start > 1)  # kernels take decodes and chunks apart
        try:
            self._compute(runs)
        except PagesMissing as missing:
            self._replace_table(next(s for s in sequences if s.table is missing.table))
            return
        for run in runs:
            run.sequence.start = run.stop
        for sequence in sequences:
            if not sequence.is_ready and not sequence.is_decoding:
                sequence.report.committed_blocks += sequence.table.commit(sequence.tokens)
        if has_prompts:
            parts = [(run.start, run.stop - run.start) for run in runs]
            self.source.computed(parts, self._clock() - started_s)

    def _replace_table(self, sequence: LiveSequence) -> None:
        """Begins anew with what is stored and whole, since pages of the stored prefix did not come."""
        request, report = sequence.request, sequence.report
        sequence.table.release()
        held = self.source.acquire(request.tokens[: self._exact_length(request)], marks=request.marks)
        sequence.table = BlockTable(self.source, held)
        start = min(held.tokens, sequence.first_query)
        report.recomputed_tokens += max(0, sequence.start - start)
        report.reused_tokens, report.computed_tokens = held.tokens, len(request.tokens) - start
        report.tier_tokens = dict(held.tier_tokens)
        report.advised_compute_tokens = held.advised_compute_tokens
        sequence.start = start

    def next_tokens(self, sequence: LiveSequence) -> int:
        """How many tokens of a sequence the next pass computes. Contents of lost pages come first."""
        sequence.table.drop_lost()
        kept = min(sequence.start, sequence.table.length)
        sequence.report.recomputed_tokens += sequence.start - kept
        sequence.start = kept
        return self._chunk_end(sequence) - kept

    def score(self, request: Request, following: Sequence[int]) -> NDArray[np.float64]:
        """Natural logarithms of the probabilities of these tokens after the prompt: float64 [n].

        The prompt's full blocks are stored, these tokens are not. Raises InvalidArgument.
        """
        self._check_ids("following", following)
        sequence, found = self.open(replace(request, max_new_tokens=max(1, len(following)))), []
        sequence.is_scored = True
        try:
            self._finish([sequence])
            sequence.table.commit(sequence.tokens)
            for token in following:
                logits = np.asarray(sequence.logits, np.float64)
                found.append(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
                sequence.tokens.append(token)
                self._finish([sequence])
        finally:
            sequence.table.release()
        return np.array(found)

    def end(self, sequence: LiveSequence) -> Report:
        """Commits the rest, releases the pages and returns the report."""
        report, table = sequence.report, sequence.table
        try:
            report.committed_blocks += table.commit(sequence.tokens)
            report.stored_tokens = max(report.stored_tokens, table.stored_tokens)
            if self.options.keep_tails and table.commit_tail(sequence.tokens):
                report.stored_tokens = table.length
            report.dropped_tokens = table.dropped
            table.report_attention(sequence.mass)
        finally:
            table.release()
        report.tokens = sequence.generated
        report.total_s = self._clock() - sequence.started_s
        return report

    def _check(self, request: Request) -> None:
        spec = self.model.spec
        request.checked()
        total = len(request.tokens) + request.max_new_tokens
        if request.token_policy:
            check_policy(request.token_policy, self.model, self.options.chunk_tokens)
        if request.far:
            check_far(self.source.shape)
        is_endless = request.token_policy is not None and request.token_policy.is_endless
        if total > spec.max_positions and not is_endless:
            raise InvalidArgument(
                f"request: {len(request.tokens)} tokens and {request.max_new_tokens} new ones are above the model's "
                f"{spec.max_positions} positions; shorten one of them"
            )
        self._check_ids("request.tokens", request.tokens)

    def _check_ids(self, name: str, tokens: Sequence[int]) -> None:
        last = self.model.spec.vocab_size - 1
        if tokens and not 0 <= min(tokens) <= max(tokens) <= last:
            raise InvalidArgument(f"{name}: an id is outside 0 to {last}; is this the model's tokenizer?")

    def _finish(self, sequences: Sequence[LiveSequence]) -> None:
        """Computes until all these sequences are ready, their last tokens in one pass."""
        while waiting := [s for s in sequences if not s.is_ready]:
            longer = [s for s in waiting if self.next_tokens(s) < len(s.tokens) - s.start]
            self.compute(longer or waiting)

    def _next_run(self, sequence: LiveSequence) -> Run:
        count = self.next_tokens(sequence)
        stop = sequence.start + count
        if sequence.start >= self._exact_length(sequence.request):
            sequence.drop(stop)
        return Run(sequence, sequence.start, stop)

    def _exact_length(self, request: Request) -> int:
        """Tokens of a prompt to compute exactly: all, or as many whole chunks as have positions."""
        total, limit = len(request.tokens), self.model.spec.max_positions
        return total if total <= limit else limit // self.options.chunk_tokens * self.options.chunk_tokens

    def _chunk_end(self, sequence: LiveSequence) -> int:
        """The end of the next chunk, on the grid. A generated token is computed alone."""
        chunk, total = self.options.chunk_tokens, len(sequence.tokens)
        before_last = total - 1 if sequence.is_decoding and sequence.start < total - 1 else total
        return min(before_last, (sequence.start // chunk + 1) * chunk)

    def _pick(self, sequence: LiveSequence) -> None:
        if not sequence.is_ready:
            raise InvalidArgument("sequence: its logits were used already; call step for the next ones")
        request, report = sequence.request, sequence.report
        token = sequence.likeliest
        if token is None or request.temperature > 0:
            token = pick_token(sequence.logits, temperature=request.temperature, rng=sequence.rng)
        if not sequence.is_decoding:
            report.ttft_s = self._clock() - sequence.started_s
        sequence.tokens.append(token)
        report.stopped = token in request.stop
        sequence.is_done = report.stopped or len(sequence.generated) >= request.max_new_tokens

    def _compute(self, runs: Sequence[Run]) -> None:
        """Computes the tokens of all runs, and what may follow each run's last one."""
        for run in runs:
            run.sequence.table.grow(run.stop)
        scored = self._decoding.step(runs) if self._decoding else None
        if scored is None:
            self._pass(runs)
        else:
            self._take(runs, *scored)
        for run in runs:
            run.sequence.table.advance(run.stop)
            if run.sequence.view:
                run.sequence.view.advance(run.stop)

    def _pass(self, runs: Sequence[Run]) -> None:
        """One pass over all tokens of the runs."""
        backend = self.model.backend
        tokens = backend.ints([t for run in runs for t in run.sequence.tokens[run.start : run.stop]])
        positions = backend.ints([p for run in runs for p in run.positions])
        step = Pass(runs, attention=self._attention, with_mass=self.options.measure_attention)
        hidden = self.model.hidden(tokens, positions, step.attend)
        if self.options.measure_attention:
            self._add_mass(runs, step.masses())
        for run, row in zip(runs, self.model.logits(hidden[backend.ints(step.last_rows)]), strict=True):
            run.sequence.logits, run.sequence.likeliest = row, None

    def _take(self, runs: Sequence[Run], scores: Array, likeliest: Array) -> None:
        """Takes the results of a decode step. From a GPU come only the logits that are needed."""
        backend = self.model.backend
        for run, token in zip(runs, likeliest.tolist(), strict=False):
            run.sequence.likeliest, run.sequence.logits = token, np.zeros(0, np.float32)
        sequences = [run.sequence for run in runs]
        wanted = [
            i for i, s in enumerate(sequences) if s.is_scored or s.request.temperature > 0 or not backend.is_on_gpu
        ]
        if wanted:
            for i, row in zip(wanted, backend.to_numpy(scores[backend.ints(wanted)]), strict=True):
                sequences[i].logits = row

    def _add_mass(self, runs: Sequence[Run], masses: Sequence[NDArray[np.float64]]) -> None:
        for run, mass in zip(runs, masses, strict=True):
            known = run.sequence.mass[: len(mass)]  # mass on lost pages is lost too
            mass[: len(known)] += known
            run.sequence.mass = mass
