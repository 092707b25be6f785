"""The engine over a source that stores in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierd.errors import InvalidArgument
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, Page, PageShape
from tierd.worker.report import Report, Request
from tierd.worker.sampling import pick_token

NewSource = Callable[..., Any]


class LosingPages(LocalPages):
    """LocalPages whose commit loses every page, as if the daemon did not answer. losses: such
    commits of two pages or more."""

    def __init__(self, shape: PageShape, losses: int) -> None:
        super().__init__(shape)
        self.losses = losses

    def commit(self, pages: Sequence[Page], tokens: Sequence[int], *, after: Page | None) -> list[Page]:
        if self.losses and len(pages) > 1:
            self.losses -= 1
            for page in pages:
                page.become(Page(None))
        return list(pages)

    def release(self, pages: Sequence[Page]) -> None:
        self.in_use -= sum(page.is_lost for page in pages)
        super().release([page for page in pages if not page.is_lost])


PROMPT = tuple(int(t) for t in np.random.default_rng(1).integers(0, 64, 50))


def run(model: Llama, source: LocalPages, request: Request, **options: Any) -> Report:
    """Runs one request on a new engine."""
    return Engine(model, source, options=EngineOptions(**options)).generate([request])[0]


def logits_of(model: Llama, source: LocalPages, tokens: tuple[int, ...], **options: Any) -> Any:
    """Logits after a prompt."""
    engine = Engine(model, source, options=EngineOptions(**options))
    sequence = engine.begin(Request(tokens))
    engine.end(sequence)
    return sequence.logits


@pytest.mark.parametrize("chunk_tokens", [1, 3, 16, 50, 256])
def test_chunks_do_not_change_the_logits(model: Llama, shape: PageShape, chunk_tokens: int) -> None:
    """A prompt computed in pieces gives the logits of the prompt computed at once, except for rounding."""
    want = logits_of(model, LocalPages(shape), PROMPT)
    got = logits_of(model, LocalPages(shape), PROMPT, chunk_tokens=chunk_tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shared", [4, 17, 48, 49, 50])
def test_reused_keys_and_values_change_nothing(model: Llama, new_source: NewSource, dtype: str, shared: int) -> None:
    """A prompt with a prefix that another request stored gives the same tokens as without a cache."""
    want = run(model, LocalPages(new_source(dtype=dtype).shape), Request(PROMPT, 20))
    source = new_source(dtype=dtype)
    run(model, source, Request(PROMPT[:shared], 1), chunk_tokens=16)
    got = run(model, source, Request(PROMPT, 20, marks=(shared,)), chunk_tokens=16)
    assert got.reused_tokens == shared
    assert got.computed_tokens == max(1, 50 - shared)
    assert got.tokens == want.tokens


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_of_conversations_equals_no_cache(model: Llama, new_source: NewSource, data: st.DataObject) -> None:
    """After any earlier turns, each request gives the tokens of an engine without a cache."""
    source, plain = new_source(room=data.draw(st.integers(0, 40))), new_source(room=0)
    turns: list[tuple[tuple[int, ...], tuple[int, ...]]] = [(PROMPT[:5], ())]
    for _ in range(data.draw(st.integers(1, 5))):
        tokens, marks = data.draw(st.sampled_from(turns))
        longer = tokens + tuple(data.draw(st.lists(st.integers(0, 63), min_size=0, max_size=9)))
        request = Request(longer, data.draw(st.integers(1, 6)), marks=marks)
        got, want = (
            run(model, source, request, chunk_tokens=8),
            run(model, plain, replace(request, marks=()), keep_tails=False),
        )
        assert got.tokens == want.tokens
        turns.append((longer + tuple(got.tokens), (*marks, got.stored_tokens)))
        assert source.held == 0


def test_a_second_turn_reuses_the_first_to_its_last_stored_token(model: Llama, new_source: NewSource) -> None:
    """With the mark of its report, a conversation resumes at its end, in the middle of a block."""
    source = new_source()
    first = run(model, source, Request(PROMPT, 6))
    assert first.stored_tokens == 55
    second = run(model, source, Request((*PROMPT, *first.tokens, 1, 2), 4, marks=(first.stored_tokens,)))
    assert (second.reused_tokens, second.computed_tokens) == (55, 3)
    assert second.tier_tokens == {"memory.0": 55}


def test_without_tails_a_turn_is_reused_in_whole_blocks(model: Llama, new_source: NewSource) -> None:
    """keep_tails=False stores full blocks only."""
    source = new_source()
    first = run(model, source, Request(PROMPT, 6), keep_tails=False)
    assert first.stored_tokens == 52
    second = run(model, source, Request((*PROMPT, *first.tokens, 1), 4, marks=(55,)), keep_tails=False)
    assert second.reused_tokens == 52


def test_sequences_of_a_batch_do_not_touch_one_another(model: Llama, new_source: NewSource) -> None:
    """Several prompts decoded together give the tokens that each gives alone."""
    requests = [Request(PROMPT[:n], 12) for n in (1, 7, 30)] + [Request(PROMPT[20:], 5)]
    alone = [run(model, new_source(), r).tokens for r in requests]
    source = new_source()
    together = Engine(model, source, options=EngineOptions(batch_limit=3)).generate(requests)
    assert [r.tokens for r in together] == alone
    assert source.held == 0


def test_samples_share_the_prompt_and_differ_after_it(model: Llama, new_source: NewSource) -> None:
    """Samples of one request cost one prefill, draw differently, and repeat with the seed."""
    source = new_source()
    request = Request(PROMPT[:22], 10, temperature=1.5, samples=3, seed=5)
    reports = Engine(model, source).generate([request])
    assert len({tuple(r.tokens) for r in reports}) == 3
    assert [r.tokens for r in Engine(model, new_source()).generate([request])] == [r.tokens for r in reports]
    assert source.held == 0


def test_a_sample_equals_the_same_tokens_as_a_prompt(model: Llama, new_source: NewSource) -> None:
    """Decoding through forked pages gives the logits of a prefill of the same tokens."""
    engine = Engine(model, new_source())
    parent = engine.begin(Request(PROMPT[:22], 9, temperature=1.0, samples=2, seed=8))
    child = engine.fork(parent, stream=1)
    engine.pick([parent, child])
    for _ in range(8):
        engine.step([parent, child])
    for sequence in (parent, child):
        plain = LocalPages(engine.source.shape)
        want = logits_of(model, plain, tuple(sequence.tokens[: sequence.table.length]))
        np.testing.assert_allclose(sequence.logits, want, rtol=0, atol=1e-4)


def test_logits_are_picked_from_once(model: Llama, shape: PageShape) -> None:
    """A second pick without a step in between raises instead of drawing twice from the same logits."""
    engine = Engine(model, LocalPages(shape))
    sequence = engine.begin(Request(PROMPT, 5))
    engine.pick([sequence])
    with pytest.raises(InvalidArgument):
        engine.pick([sequence])


def test_a_stop_token_ends_a_sequence(model: Llama, shape: PageShape) -> None:
    """Generation ends with the stop token and reports it."""
    free = run(model, LocalPages(shape), Request(PROMPT, 10))
    stop = free.tokens[3]
    cut = run(model, LocalPages(shape), Request(PROMPT, 10, stop=(stop,)))
    assert cut.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (cut.stopped, free.stopped) == (True, False)


def test_a_failing_pass_gives_every_page_back(
    model: Llama, new_source: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the middle of a batch leaks no page."""
    source = new_source()
    engine = Engine(model, source)
    calls = iter(range(100))
    compute = model.hidden

    def break_at_fourth(*args: Any) -> Any:
        if next(calls) == 4:
            raise MemoryError
        return compute(*args)

    monkeypatch.setattr(model, "hidden", break_at_fourth)
    with pytest.raises(MemoryError):
        engine.generate([Request(PROMPT, 5), Request(PROMPT[:9], 5)])
    assert source.held == 0


def test_times_are_those_of_the_clock(model: Llama, shape: PageShape) -> None:
    """Acquire, first token and total follow one another on the given clock."""
    ticks = iter(range(1000))
    engine = Engine(model, LocalPages(shape), clock=lambda: float(next(ticks)))
    report = engine.generate([Request(PROMPT, 4)])[0]
    assert 0 < report.acquire_s < report.ttft_s < report.total_s
    assert report.decode_s == 3.0


def test_passes_over_prompts_are_reported(model: Llama, shape: PageShape) -> None:
    """The source learns which tokens each chunk had and how long it took, and nothing of passes that
    only decode."""

    passes: list[tuple[Sequence[tuple[int, int]], float]] = []

    class Told(LocalPages):
        def computed(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
            passes.append((parts, seconds))

    ticks = iter(range(1000))
    engine = Engine(model, Told(shape), options=EngineOptions(chunk_tokens=8), clock=lambda: float(next(ticks)))
    engine.generate([Request(PROMPT[:11], 4)])
    assert passes == [([(0, 8)], 1.0), ([(8, 3)], 1.0)]


def test_attention_mass_is_reported_per_page(model: Llama, new_source: NewSource) -> None:
    """The mass over a sequence's pages adds up to one per layer and computed row."""
    source = new_source()
    run(model, source, Request(PROMPT[:10], 3), measure_attention=True)
    assert len(source.mass) == 3
    assert sum(m for _, m in source.mass) == pytest.approx(2 * 12)


@pytest.mark.parametrize("losses", [1, 3])
def test_attention_mass_outlives_lost_pages(model: Llama, shape: PageShape, losses: int) -> None:
    """A request that measures attention and loses pages recomputes them and gives the same tokens."""
    want = run(model, LocalPages(shape), Request(PROMPT, 5))
    source = LosingPages(shape, losses)
    got = run(model, source, Request(PROMPT, 5), chunk_tokens=6, measure_attention=True)
    assert got.recomputed_tokens > 0
    assert (got.tokens, source.losses, source.in_use) == (want.tokens, 0, 0)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_torch_engine_gives_what_the_numpy_engine_gives(model: Llama, shape: PageShape, kv_dtype: str) -> None:
    """The same engine on torch tensors, over pages in plain memory, gives the same logits."""
    pytest.importorskip("torch", reason="torch is not installed")
    on_torch = Llama(random_checkpoint(model.spec, seed=3, scale=0.2), Backend("torch"))
    pages = PageShape(model.spec.geometry(kv_dtype), 4, on_torch.backend)
    want = logits_of(model, LocalPages(shape), PROMPT)
    got = logits_of(on_torch, LocalPages(pages), PROMPT, chunk_tokens=16, measure_attention=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 if kv_dtype == "float32" else 0.2)


@pytest.mark.parametrize(
    "request_",
    [
        Request(()),
        Request((1,), 0),
        Request((64,), 1),
        Request((-1,), 1),
        Request((1,), 512),
        Request((1,), 1, temperature=-1.0),
        Request((1,), 1, samples=0),
    ],
)
def test_an_impossible_request_is_refused_before_anything_runs(
    model: Llama, shape: PageShape, request_: Request
) -> None:
    """Empty prompts, foreign ids, too many tokens and bad sampling values raise InvalidArgument."""
    with pytest.raises(InvalidArgument):
        Engine(model, LocalPages(shape)).generate([request_])


def test_pages_of_another_model_are_refused(model: Llama, shape: PageShape) -> None:
    """An engine refuses a source whose geometry is not its model's."""
    foreign = replace(shape, geometry=replace(shape.geometry, kv_heads=1))
    with pytest.raises(InvalidArgument):
        Engine(model, LocalPages(foreign))


def test_temperature_draws_follow_the_probabilities() -> None:
    """Ten thousand draws match the softmax; zero temperature takes the largest."""
    logits = np.log(np.array([0.5, 0.3, 0.2, 1e-30], dtype=np.float32))
    rng = np.random.default_rng(0)
    counts = np.bincount([pick_token(logits, temperature=1.0, rng=rng) for _ in range(10_000)], minlength=4) / 10_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2, 0.0], atol=0.02)
    assert pick_token(logits, temperature=0.0, rng=rng) == 0


@pytest.mark.parametrize("chunk_tokens", [4, 16, 256])
def test_scores_are_those_of_the_logits_and_store_the_prompt(
    model: Llama, new_source: NewSource, chunk_tokens: int
) -> None:
    """A score is the logarithm of a token's probability. The prompt's full blocks are stored, also
    those of its last chunk, and nothing else."""
    source = new_source()
    with Engine(model, source, options=EngineOptions(chunk_tokens=chunk_tokens)) as engine:
        found = engine.score(Request(PROMPT), [3, 1])
        assert (len(source.store), source.held) == (len(PROMPT) // 4, 0)
    for said, score in zip((PROMPT, (*PROMPT, 3)), found, strict=True):
        logits = logits_of(model, LocalPages(source.shape), said).astype(np.float64)
        token = 3 if said is PROMPT else 1
        assert score == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-4)


@pytest.mark.parametrize(
    ("following", "message"), [([3, -1], "outside 0 to 63"), ([64], "outside"), ([1] * 463, "463 new ones")]
)
def test_impossible_scores_are_refused(model: Llama, new_source: NewSource, following: list[int], message: str) -> None:
    """A token that the model lacks, or more tokens than it has positions, is an error, and nothing is
    computed."""
    source = new_source()
    with pytest.raises(InvalidArgument, match=message):
        Engine(model, source).score(Request(PROMPT), following)
    assert not source.store
