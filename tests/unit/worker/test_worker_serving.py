"""The queue of the engine: prompts beside decodes, room, and memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.worker.conftest import TINY, StoringPages
from tierd.kernels import reference
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageShape
from tierd.worker.report import Request
from tierd.worker.sequences import LiveSequence

NewSource = Callable[..., StoringPages]
PROMPT = tuple(int(t) for t in np.random.default_rng(4).integers(0, 64, 400))
LONG, SHORT, OTHER = PROMPT[:160], PROMPT[200:205], PROMPT[300:309]


class Watched(Engine):
    """An engine that notes each pass: tokens per sequence, by the length of its prompt."""

    def __init__(self, model: Llama, source: LocalPages, **options: Any) -> None:
        super().__init__(model, source, options=EngineOptions(**options))
        self.passes: list[dict[int, int]] = []

    def compute(self, sequences: Sequence[LiveSequence]) -> None:
        self.passes.append({len(s.request.tokens): self.next_tokens(s) for s in sequences})
        super().compute(sequences)


def alone(model: Llama, shape: PageShape, request: Request) -> list[list[int]]:
    """Tokens of each sample, of an engine that serves nothing else."""
    return [report.tokens for report in Engine(model, LocalPages(shape)).generate([request])]


def test_a_long_prompt_stops_nobody(model: Llama, shape: PageShape) -> None:
    """While a long prompt is computed chunk by chunk, a sequence that decodes gets a token in each pass."""
    engine = Watched(model, LocalPages(shape), chunk_tokens=16, step_tokens=8)
    requests = [Request(SHORT, 6), Request(LONG, 3)]
    reports = engine.generate(requests)
    assert engine.passes == [{5: 5}, *[{5: 1, 160: 16}] * 5, *[{160: 16}] * 5, *[{160: 1}] * 2]
    assert [[report.tokens] for report in reports] == [alone(model, shape, request) for request in requests]


def test_short_prompts_share_a_pass(model: Llama, shape: PageShape) -> None:
    """Chunks of several prompts join one pass while its tokens are at most step_tokens."""
    engine = Watched(model, LocalPages(shape), chunk_tokens=16, step_tokens=16)
    engine.generate([Request(SHORT, 1), Request(OTHER, 1), Request(LONG[:16], 1)])
    assert engine.passes == [{5: 5, 9: 9}, {16: 16}]


def test_a_request_starts_when_another_one_ends(model: Llama, shape: PageShape) -> None:
    """With room for two, the third starts in the pass after the first one's end, beside the second."""
    engine = Watched(model, LocalPages(shape), batch_limit=2)
    engine.generate([Request(SHORT, 2), Request(OTHER, 6), Request(LONG[:30], 2)])
    assert engine.passes == [{5: 5, 9: 9}, {5: 1, 9: 1}, {9: 1, 30: 30}, {9: 1, 30: 1}, {9: 1}, {9: 1}]


def test_equal_prompts_wait_for_one_another(model: Llama, new_source: NewSource) -> None:
    """A request whose prompt begins as one that is being computed reuses its blocks."""
    engine = Watched(model, new_source(), chunk_tokens=16, step_tokens=500)
    reports = engine.generate([Request(LONG, 2), Request((*LONG, *OTHER), 2)])
    assert [report.reused_tokens for report in reports] == [0, 160]


REQUESTS = st.builds(
    lambda start, length, new, samples: Request(
        PROMPT[start : start + length], new, samples=samples, temperature=1.0 if samples > 1 else 0.0
    ),
    st.sampled_from([0, 0, 7]),
    st.integers(1, 70),
    st.integers(1, 7),
    st.integers(1, 3),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUESTS, min_size=1, max_size=5), st.integers(1, 40), st.integers(1, 90), st.integers(1, 5))
def test_any_queue_gives_what_each_gives_alone(
    model: Llama, new_source: NewSource, requests: list[Request], chunk: int, step: int, limit: int
) -> None:
    """Tokens are those of each request alone, with any others beside it and in any pieces."""
    source = new_source()
    options = EngineOptions(chunk_tokens=chunk, step_tokens=step, batch_limit=limit)
    reports = Engine(model, source, options=options).generate(requests)
    wanted = [tokens for request in requests for tokens in alone(model, source.shape, request)]
    assert [report.tokens for report in reports] == wanted
    assert source.held == 0


@pytest.mark.parametrize("broken", range(12))
def test_every_exit_releases_the_pages(
    model: Llama, new_source: NewSource, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """An error in any pass, of a chunk or a decode, leaves no page held."""
    source, calls, hidden = new_source(), iter(range(99)), model.hidden

    def breaking(*args: Any) -> Any:
        if next(calls) == broken:
            raise MemoryError
        return hidden(*args)

    monkeypatch.setattr(model, "hidden", breaking)
    engine = Engine(model, source, options=EngineOptions(chunk_tokens=16, step_tokens=24))
    with pytest.raises(MemoryError):
        engine.generate([Request(SHORT, 9, samples=2), Request(LONG, 3), Request(OTHER, 2)])
    assert source.held == 0


def test_memory_of_a_prefill_is_not_that_of_the_prompt(
    model: Llama, shape: PageShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 more tokens of a prompt take less memory beside their pages than their keys and values are."""
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", 4 * 64 * 32)
    peaks = [peak_bytes(model, shape, count) for count in (100, 400)]
    assert peaks[1] - peaks[0] < shape.bytes_of(300)


def peak_bytes(model: Llama, shape: PageShape, count: int) -> int:
    """Most bytes at once of arrays and objects that a prefill makes; pages are mappings, not counted."""
    engine = Engine(model, LocalPages(shape), options=EngineOptions(chunk_tokens=64))
    pages = engine.source.reserve(TINY.max_positions // 4)
    engine.source.release(pages)
    tracemalloc.start()
    try:
        engine.generate([Request(PROMPT[:count], 1)])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
