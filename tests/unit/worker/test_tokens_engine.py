"""The engine under token policies, over a source that stores in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.worker.conftest import TINY, StoringPages
from tests.unit.worker.test_worker_engine import PROMPT, LosingPages
from tierd.errors import InvalidArgument
from tierd.kernels import PagedBatch, paged_attention
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Attend, Llama, rope_frequencies
from tierd.worker.pages import LocalPages, PageShape, PageSource, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.sequences import LiveSequence
from tierd.worker.tokens.choice import POLICIES, TokenChoice
from tierd.worker.tokens.forced import Prompt, attention_for
from tierd.worker.tokens.streaming import SINKS
from tierd.worker.tokens.weights import turned

NewSource = Callable[..., StoringPages]
DROPPING = ("h2o", "streaming", "snapkv", "random")
CHUNK = EngineOptions(chunk_tokens=16)


def decoded(
    model: Llama, source: PageSource, request: Request, options: EngineOptions = CHUNK
) -> tuple[list[int], NDArray[np.float32], Report]:
    """Tokens, the logits after each of them but the last, and the report."""
    engine = Engine(model, source, options=options)
    sequence = engine.begin(request)
    logits = [sequence.logits]
    engine.pick([sequence])
    while not sequence.is_done:
        engine.step([sequence])
        logits.append(sequence.logits)
    return sequence.tokens, np.stack(logits), engine.end(sequence)


def forced(model: Llama, tokens: Sequence[int], prompt: int, hook: Callable[[Prompt], Attend]) -> NDArray[np.float32]:
    """Logits after the prompt's last token and each later one, without pages."""
    ids, positions = np.asarray(tokens), np.arange(len(tokens))
    exact = Prompt()
    first = model.hidden(ids[:prompt], positions[:prompt], exact.attend)[-1:]
    rest = model.hidden(ids[prompt:], positions[prompt:], hook(exact))
    return model.logits(np.concatenate([first, rest]))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_keeps_all_changes_no_bit(model: Llama, new_source: NewSource, name: str) -> None:
    """With keep=1 tokens, logits and stored blocks are those of a request without a policy, to the bit."""
    plain, source = new_source(), new_source()
    want = decoded(model, plain, Request(PROMPT, 14))
    got = decoded(model, source, Request(PROMPT, 14, token_policy=TokenChoice(name, 1.0)))
    assert got[0] == want[0]
    np.testing.assert_array_equal(got[1], want[1])
    assert contents(source) == contents(plain)
    assert got[2].stored_tokens == want[2].stored_tokens == 63
    assert got[2].dropped_tokens == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_without_a_policy_is_untouched_by_one_beside_it(model: Llama, shape: PageShape, name: str) -> None:
    """Beside a policy's sequence, another one's logits are those beside a plain sequence, to the bit."""
    plain, beside = (
        logits_beside(model, shape, Request(PROMPT, 9, token_policy=policy)) for policy in (None, TokenChoice(name))
    )
    np.testing.assert_array_equal(beside, plain)


def logits_beside(model: Llama, shape: PageShape, other: Request) -> NDArray[np.float32]:
    """A plain request's logits in a batch with another one."""
    engine = Engine(model, LocalPages(shape), options=CHUNK)
    pair = [engine.begin(other), engine.begin(Request(PROMPT[:30], 8))]
    logits = [pair[1].logits]
    engine.pick(pair)
    while not pair[1].is_done:
        engine.step(pair)
        logits.append(pair[1].logits)
    return np.stack(logits)


@pytest.mark.parametrize("tokens", [0, 15])
@pytest.mark.parametrize("name", POLICIES)
def test_decoding_over_pages_equals_evaluation_without_them(
    model: Llama, new_source: NewSource, name: str, tokens: int
) -> None:
    """Each step's logits are those of `attention_for` on the same tokens: one selection, two stores."""
    choice = TokenChoice(name, 0.3, tokens)
    said, got, report = decoded(model, new_source(), Request(PROMPT, 20, token_policy=choice))
    want = forced(
        model,
        said[:-1],
        len(PROMPT),
        lambda prompt: attention_for(choice, prompt, model.spec, tokens_per_block=4),
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)
    plain = forced(model, said[:-1], len(PROMPT), lambda prompt: attention_for(TokenChoice(name, 1.0), prompt, TINY))
    assert np.abs(want - plain).max() > 0.1
    if name in DROPPING:
        assert report.dropped_tokens == (53 if tokens and name != "snapkv" else len(PROMPT) - 15)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("shared", [4, 17, 48, 50])
def test_a_reused_prefix_changes_no_choice(model: Llama, new_source: NewSource, name: str, shared: int) -> None:
    """With stored keys of a prefix the tokens are those without, also if its queries decide."""
    request = Request(PROMPT, 12, marks=(shared,), token_policy=TokenChoice(name, 0.3))
    want = decoded(model, LocalPages(new_source().shape), request)
    source = new_source()
    decoded(model, source, Request(PROMPT[:shared], 1))
    tokens, logits, report = decoded(model, source, request)
    assert tokens == want[0]
    np.testing.assert_allclose(logits, want[1], rtol=0, atol=1e-3)
    assert report.reused_tokens == shared
    assert report.computed_tokens == (50 if name in ("h2o", "snapkv") else max(1, 50 - shared))
    assert source.held == 0


@pytest.mark.parametrize("answer", [2, 30])
@pytest.mark.parametrize("name", POLICIES)
def test_stored_blocks_are_complete_and_untouched(model: Llama, new_source: NewSource, name: str, answer: int) -> None:
    """A policy's request stores the exact blocks of its prompt and no other; it changes none."""
    source, plain = new_source(), new_source()
    decoded(model, plain, Request(PROMPT, 1), EngineOptions(chunk_tokens=16, keep_tails=False))
    exact = contents(plain)
    request = Request(PROMPT, answer, token_policy=TokenChoice(name))
    for _ in range(2):
        tokens, _, report = decoded(model, source, request)
        assert contents(source) == exact
        assert report.stored_tokens == 48
        assert source.held == 0
    again = decoded(model, source, Request(tuple(tokens), 3))
    assert again[2].reused_tokens == 48
    assert again[0] == decoded(model, new_source(), Request(tuple(tokens), 3))[0]


@pytest.mark.parametrize("name", POLICIES)
def test_samples_of_a_policy_do_not_touch_one_another(model: Llama, new_source: NewSource, name: str) -> None:
    """Forks under a policy decode, side by side, what each decodes alone."""
    request = Request(PROMPT, 10, temperature=1.5, samples=3, seed=5, token_policy=TokenChoice(name))
    source = new_source()
    together = Engine(model, source, options=CHUNK).generate([request])
    assert len({tuple(report.tokens) for report in together}) == 3
    assert source.held == 0
    for stream, report in enumerate(together):
        engine = Engine(model, new_source(), options=CHUNK)
        alone = engine.fork(engine.begin(replace(request, samples=1)), stream=stream)
        engine.pick([alone])
        while not alone.is_done:
            engine.step([alone])
        assert alone.generated == report.tokens


@pytest.mark.parametrize("name", POLICIES)
def test_a_fork_in_the_middle_of_an_answer_goes_on_alike(model: Llama, new_source: NewSource, name: str) -> None:
    """A copy made after some tokens decodes what its parent does, and neither stores its answer."""
    source = new_source()
    engine = Engine(model, source, options=CHUNK)
    parent = engine.begin(Request(PROMPT, 20, token_policy=TokenChoice(name)))
    engine.pick([parent])
    for _ in range(6):
        engine.step([parent])
    stored = contents(source)
    child = engine.fork(parent, stream=1)
    while not parent.is_done:
        engine.step([parent])
    while not child.is_done:
        engine.step([child])
    assert child.generated == parent.generated
    np.testing.assert_allclose(child.logits, parent.logits, rtol=0, atol=1e-4)
    engine.end(parent)
    assert engine.end(child).stored_tokens == 48
    assert contents(source) == stored
    assert source.held == 0


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("losses", [1, 3])
def test_lost_pages_change_no_choice(model: Llama, shape: PageShape, name: str, losses: int) -> None:
    """If prompt pages are lost, they are computed again, nothing is noted twice, and the tokens
    are the same."""
    request = Request(PROMPT, 8, token_policy=TokenChoice(name, 0.3))
    options = EngineOptions(chunk_tokens=12, measure_attention=True)
    want = decoded(model, LocalPages(shape), request, options)
    source = LosingPages(shape, losses)
    got = decoded(model, source, request, options)
    assert got[2].recomputed_tokens > 0
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-3)
    assert (got[0], source.losses, source.in_use) == (want[0], 0, 0)


@pytest.mark.parametrize("name", ["h2o", "streaming", "random"])
def test_memory_is_constant_with_a_number_of_tokens(model: Llama, shape: PageShape, name: str) -> None:
    """While decoding goes on, a sequence holds the pages of its constant number and one token more."""
    source = LocalPages(shape)
    engine = Engine(model, source, options=CHUNK)
    sequence = engine.begin(Request(PROMPT, 100, token_policy=TokenChoice(name, tokens=16)))
    pages = set()
    engine.pick([sequence])
    while not sequence.is_done:
        engine.step([sequence])
        pages.add((source.in_use, len(sequence.table.pages)))
    assert pages == {(5, 5)}


def test_a_stream_may_be_endless(model: Llama, shape: PageShape) -> None:
    """A prompt and an answer several times as long as the model's positions take constant pages."""
    source = LocalPages(shape)
    engine = Engine(model, source, options=CHUNK)
    prompt = tuple(np.random.default_rng(0).integers(0, 64, 1500).tolist())
    sequence = engine.begin(Request(prompt, 1000, token_policy=TokenChoice("streaming", tokens=40)))
    assert source.in_use <= 14
    engine.pick([sequence])
    positions, pages = [], set()
    while not sequence.is_done:
        engine.step([sequence])
        positions.append(sequence.table.length - 1 - shift_of(sequence))
        pages.add(source.in_use)
    assert pages == {11}
    assert min(positions) >= 40
    assert max(positions) < TINY.max_positions
    report = engine.end(sequence)
    assert (len(report.tokens), report.dropped_tokens, source.in_use) == (1000, 2499 - 41, 0)


def test_new_positions_change_nothing(model: Llama, new_source: NewSource) -> None:
    """A stream that begins its positions anew many times equals one whose positions never end."""
    request = Request(PROMPT, 80, token_policy=TokenChoice("streaming", tokens=20))
    short, long = (
        Llama(random_checkpoint(replace(TINY, max_positions=limit), seed=3, scale=0.2)) for limit in (50, 5000)
    )
    want = decoded(long, LocalPages(new_source().shape), request)
    got = decoded(short, LocalPages(new_source().shape), request)
    assert got[0] == want[0]
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-3)


def test_streaming_positions_are_those_inside_the_cache(model: Llama, new_source: NewSource) -> None:
    """The logits are those of keys rotated anew, in each step, by their places in the cache."""
    tokens, got, _ = decoded(model, new_source(), Request(PROMPT, 15, token_policy=TokenChoice("streaming", tokens=12)))
    want = forced(model, tokens[:-1], len(PROMPT), lambda prompt: rotated_anew(prompt, 12))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)


def rotated_anew(prompt: Prompt, count: int) -> Attend:
    """StreamingLLM as its paper describes it: unrotated keys, rotated by their places in the cache."""

    def moved(rows: Any, to: int, since: int) -> Any:
        return np.stack([turned(row, to + i - (since + i), rope_frequencies(TINY)) for i, row in enumerate(rows)])

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        keys, values = np.concatenate([prompt.k[layer], k]), np.concatenate([prompt.v[layer], v])
        out = []
        for i, query in enumerate(q):
            seen = len(prompt.k[layer]) + i
            window = slice(seen - (count - SINKS), seen + 1)
            cached = np.concatenate([keys[:SINKS], moved(keys[window], SINKS, window.start)])
            pages = [np.stack([cached, np.concatenate([values[:SINKS], values[window]])])]
            row = turned(query[None], count - seen, rope_frequencies(TINY))
            out.append(paged_attention(row, pages, PagedBatch([0, 1], [count + 1], [[0]])).out[0])
        return np.stack(out)

    return attend


@pytest.mark.parametrize("name", ["h2o", "streaming"])
def test_policies_work_on_pages_of_e4m3(model: Llama, name: str) -> None:
    """Over pages of a byte a value, logits stay near those over float32 pages."""
    request = Request(PROMPT, 2, token_policy=TokenChoice(name, tokens=40))
    shapes = [page_shape(model, tokens_per_block=4, kv_dtype=dtype) for dtype in ("float32", "float8_e4m3fn")]
    wide, narrow = (decoded(model, LocalPages(shape), request)[1] for shape in shapes)
    assert np.linalg.norm(narrow - wide) < 0.4 * np.linalg.norm(wide)


def test_attention_is_reported_before_pages_are_released(model: Llama, new_source: NewSource) -> None:
    """The prompt's stored pages get the mass that they had until the first drop."""
    source = new_source()
    decoded(model, source, Request(PROMPT, 5, token_policy=TokenChoice("h2o")), replace(CHUNK, measure_attention=True))
    named = [mass for name, mass in source.mass if name]
    assert len(named) == 12
    assert sum(mass for _, mass in source.mass) == pytest.approx(2 * (50 + 4))


def test_impossible_policies_are_refused_before_anything_runs(model: Llama, shape: PageShape) -> None:
    """Too long requests, windows beyond the positions and foreign backends raise InvalidArgument."""
    engine = Engine(model, LocalPages(shape))
    with pytest.raises(InvalidArgument, match="positions; shorten"):
        engine.generate([Request(PROMPT, 500, token_policy=TokenChoice("h2o", tokens=16))])
    with pytest.raises(InvalidArgument, match=r"token_policy\.tokens: 300 and a chunk of 256"):
        engine.generate([Request(PROMPT, 500, token_policy=TokenChoice("streaming", tokens=300))])
    with pytest.raises(InvalidArgument, match=r"token_policy\.name"):
        engine.generate([Request(PROMPT, 5, token_policy=TokenChoice("lru"))])


def test_a_gpu_refuses_policies(model: Llama, shape: PageShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another backend than numpy's on the host, a policy is refused with the remedy."""
    monkeypatch.setattr(model, "backend", Backend("numpy", "float32", "cuda:0"))
    with pytest.raises(InvalidArgument, match=r"token_policy: h2o .*cuda:0; use Backend\('numpy'\)"):
        Engine(model, LocalPages(shape), attention=paged_attention).generate(
            [Request(PROMPT, 5, token_policy=TokenChoice("h2o"))]
        )


def contents(source: StoringPages) -> dict[bytes, bytes]:
    """The bytes of every stored block by its name."""
    return {name: page.array.tobytes() for name, page in source.store.items()}


def shift_of(sequence: LiveSequence) -> int:
    """Tokens between a token's number and its position."""
    assert sequence.view is not None
    return sequence.view.shift
