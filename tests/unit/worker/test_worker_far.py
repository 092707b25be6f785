"""Decoding over far prompts: granules, the hot buffer, and what must not depend on it."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.worker.conftest import TINY, StoringPages
from tests.unit.worker.test_tokens_engine import contents, decoded
from tests.unit.worker.test_worker_engine import LosingPages
from tierd.errors import InvalidArgument
from tierd.kernels import PagedBatch, paged_attention, reference
from tierd.kernels.granules import GRANULE_TOKENS
from tierd.worker import far as far_module
from tierd.worker import sequences
from tierd.worker.backend import Backend
from tierd.worker.blocks import BlockTable
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.far import FarChoice, FarPrompt, FarReport
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageShape, page_shape
from tierd.worker.report import Request
from tierd.worker.tokens.choice import TokenChoice

SPEC = replace(TINY, max_positions=8192)
PROMPT = tuple(np.random.default_rng(1).integers(0, 64, 9 * GRANULE_TOKENS + 21).tolist())
"""Nine granules, and a rest."""
OPTIONS = EngineOptions(chunk_tokens=128)
ALL, FEW = FarChoice(None, 192), FarChoice(4, 384)


@pytest.fixture(scope="module")
def long_model() -> Llama:
    """Random weights, and positions for long prompts."""
    return Llama(random_checkpoint(SPEC, seed=3, scale=0.2))


def logits_of(model: Llama, source: LocalPages, far: FarChoice | None, tokens: int = 12) -> NDArray[np.float32]:
    """The logits of a greedy answer's steps."""
    return decoded(model, source, Request(PROMPT, tokens, far=far), OPTIONS)[1]


@pytest.mark.parametrize("hot_tokens", [64, 192, 4096])
@pytest.mark.parametrize(("page_tokens", "dtype"), [(4, "float32"), (48, "float32"), (128, "float16")])
def test_all_granules_are_exact(long_model: Llama, page_tokens: int, dtype: str, hot_tokens: int) -> None:
    """If all granules are chosen, tokens are those of dense decoding, and logits within 2e-3, with
    any room in the hot buffer."""
    shape = page_shape(long_model, tokens_per_block=page_tokens, kv_dtype=dtype)
    want = decoded(long_model, LocalPages(shape), Request(PROMPT, 12), OPTIONS)
    far = Request(PROMPT, 12, far=FarChoice(None, hot_tokens))
    got = decoded(long_model, LocalPages(shape), far, OPTIONS)
    assert got[0] == want[0]
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=2e-3)
    granules = len(PROMPT) // np.lcm(GRANULE_TOKENS, page_tokens) * np.lcm(GRANULE_TOKENS, page_tokens) // 64
    assert got[2].far.chosen == 11 * SPEC.layers * SPEC.kv_heads * granules
    assert got[2].far.hot_bytes == 2 * 2 * 2 * 8 * min(granules * 64, hot_tokens) * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_reads_far_prompts_too(dtype: str) -> None:
    """With torch all granules give the logits of dense decoding, and some give other ones."""
    pytest.importorskip("torch", reason="torch (the extra `worker`) is not installed")
    model = Llama(random_checkpoint(SPEC, seed=3, scale=0.2), Backend("torch", dtype))
    shape = page_shape(model, tokens_per_block=64, kv_dtype=dtype)
    want, exact, few = (
        decoded(model, LocalPages(shape), Request(PROMPT[:260], 4, far=far), OPTIONS)[1]
        for far in (None, FarChoice(None, 128), FarChoice(2, 128))
    )
    scale = np.abs(want).max()
    assert np.abs(exact - want).max() < (2e-3 if dtype == "float32" else 0.03 * scale)
    assert np.abs(few - want).max() > 0.05 * scale


def filled(shape: PageShape, tokens: int, rng: np.random.Generator) -> BlockTable:
    """A table of so many random tokens, whose bounds bf16 has."""
    table = BlockTable(LocalPages(shape))
    table.grow(tokens)
    for layer in range(SPEC.layers):
        kv = rng.standard_normal((2, tokens, SPEC.kv_heads, SPEC.head_dim), dtype=np.float32)
        k, v = (kv.view(np.uint32) & 0xFFFF0000).view(np.float32)
        table.write(layer, 0, k=k, v=v)
    table.advance(tokens)
    return table


def attended(q: Any, table: BlockTable, layer: int, granules: int, near: int) -> Any:
    """The output of one query over the best granules before token `near`, and all later tokens.

    In float64, head by head: bounds, choice and softmax from their definitions.
    """
    k, v = np.concatenate([page.array[layer] for page in table.pages], axis=1)[:, : table.length].astype(np.float64)
    outs, group = [], len(q) // SPEC.kv_heads
    for head in range(SPEC.kv_heads):
        mine, keys = q[head * group : (head + 1) * group].astype(np.float64), k[:, head]
        parts = keys[:near].reshape(-1, GRANULE_TOKENS, SPEC.head_dim)
        bound = np.maximum(mine[:, None] * parts.min(1), mine[:, None] * parts.max(1)).sum(-1).max(0)
        bound[0] = bound[-1] = np.inf
        chosen = np.sort(np.argsort(-bound)[:granules])
        seen = np.concatenate([*(np.arange(g * 64, g * 64 + 64) for g in chosen), np.arange(near, len(keys))])
        scores = mine @ keys[seen].T / np.sqrt(SPEC.head_dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(weights / weights.sum(-1, keepdims=True) @ v[seen, head])
    return np.concatenate(outs)


@pytest.mark.parametrize("hot_tokens", [64, 256, 1024])
@pytest.mark.parametrize("granules", [2, 5, 12])
def test_a_query_reads_the_best_granules_and_all_later_tokens(shape: PageShape, granules: int, hot_tokens: int) -> None:
    """The output is attention over the first and last granule, those with the greatest bounds, and
    all later tokens. Hot slots that hold NaN before use never reach it."""
    rng = np.random.default_rng(granules)
    table = filled(shape, 12 * GRANULE_TOKENS + 7, rng)
    far = FarPrompt(FarChoice(granules, hot_tokens), shape, prompt=table.length - 2, attention=paged_attention)
    for each in far._layers:
        each._hot[:] = np.nan
    for _ in range(20):
        for layer in range(SPEC.layers):
            q = rng.standard_normal((SPEC.q_heads, SPEC.head_dim), dtype=np.float32)
            got = far.attend(layer, q, table, table.length, FarReport())
            want = attended(q, table, layer, granules, 12 * GRANULE_TOKENS)
            np.testing.assert_allclose(got.out[0], want, rtol=0, atol=1e-4)
    assert table.is_exact == (granules == 12)


def test_a_result_does_not_depend_on_what_is_in_the_hot_buffer(long_model: Llama) -> None:
    """With room for many granules or only for a step's, logits are equal to the bit; hits differ."""
    shape = page_shape(long_model)
    requests = [
        Request(PROMPT, 30, temperature=2.0, far=FarChoice(4, hot_tokens)) for hot_tokens in (4 * 64, 6 * 64, 4096)
    ]
    runs = [decoded(long_model, LocalPages(shape), request, OPTIONS) for request in requests]
    for other in runs[1:]:
        np.testing.assert_array_equal(other[1], runs[0][1])
    hits = [run[2].far.hits for run in runs]
    assert 0 < hits[0] < hits[1] < hits[2] < runs[0][2].far.chosen
    for _, _, report in runs:
        granule_bytes = 2 * GRANULE_TOKENS * SPEC.head_dim * 4
        assert report.far.fetched_bytes == report.far.misses * granule_bytes


def test_an_interrupted_copy_leaves_no_granule(shape: PageShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is interrupted between two copies into the hot buffer. The next one copies them again. It
    equals one with an empty buffer, to the bit."""
    rng = np.random.default_rng(3)
    table, q = (
        filled(shape, 8 * GRANULE_TOKENS + 5, rng),
        rng.standard_normal((SPEC.q_heads, SPEC.head_dim), np.float32),
    )
    new = partial(FarPrompt, FarChoice(4, 256), shape, prompt=table.length, attention=paged_attention)
    far, pieces, calls = new(), far_module._Layer._pieces, count()

    def interrupted(layer: Any, granule: int) -> Any:
        if next(calls) == 11:  # eight for bounds, then the third of the copied granules
            raise KeyboardInterrupt
        return pieces(layer, granule)

    monkeypatch.setattr(far_module._Layer, "_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        far.attend(0, q, table, table.length, FarReport())
    got, want = (each.attend(0, q, table, table.length, FarReport()) for each in (far, new()))
    np.testing.assert_array_equal(got.out, want.out)


def test_a_hot_buffer_without_memory_holds_no_page(long_model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no memory for a hot buffer, the request fails, and its stored prefix is not held."""
    source = StoringPages(page_shape(long_model))
    decoded(long_model, source, Request(PROMPT, 1), OPTIONS)

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(far_module, "HotBuffer", full)
    with Engine(long_model, source, options=OPTIONS) as engine, pytest.raises(MemoryError):
        engine.generate([Request(PROMPT, 4, far=ALL)])
    assert source.held == 0


@pytest.mark.parametrize("far", [ALL, FEW], ids=["all", "few"])
@pytest.mark.parametrize("shared", [64, 500, len(PROMPT)])
def test_reuse_and_lost_pages_change_no_token(long_model: Llama, far: FarChoice, shared: int) -> None:
    """With a stored prefix, or after lost pages, tokens are those of a run without a cache."""
    shape = page_shape(long_model)
    request = Request(PROMPT, 12, far=far, marks=(shared,))
    want = decoded(long_model, LocalPages(shape), request, OPTIONS)
    source = StoringPages(shape)
    decoded(long_model, source, Request(PROMPT[:shared], 1), OPTIONS)
    stored = decoded(long_model, source, request, OPTIONS)
    losing = LosingPages(shape, 3)
    lost = decoded(long_model, losing, request, OPTIONS)
    assert stored[0] == lost[0] == want[0]
    np.testing.assert_allclose(stored[1], want[1], rtol=0, atol=1e-3)
    np.testing.assert_allclose(lost[1], want[1], rtol=0, atol=1e-3)
    assert (stored[2].reused_tokens, source.held, losing.in_use) == (shared, 0, 0)
    assert lost[2].recomputed_tokens > 0


def test_only_exact_tokens_are_stored(long_model: Llama) -> None:
    """With all granules a request stores what a dense one does; with some, only its prompt's blocks."""
    shape, kept = page_shape(long_model), list[dict[Any, Any]]()
    for far in (None, ALL, FEW):
        source = StoringPages(shape)
        report = decoded(long_model, source, Request(PROMPT, 30, far=far), OPTIONS)[2]
        kept.append(contents(source))
        assert report.stored_tokens == (len(PROMPT) // 16 * 16 if far is FEW else len(PROMPT) + 29)
    assert kept[0].keys() == kept[1].keys()
    assert kept[2].items() < kept[0].items()


def test_forks_share_a_hot_buffer_and_decode_as_if_alone(long_model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples over one far prompt decode what each decodes alone, and have one hot buffer. Their
    common pages are not read together, however many there are."""
    monkeypatch.setattr(sequences, "SAVED_TOKENS", 1)
    shape = page_shape(long_model)
    request = Request(PROMPT, 10, temperature=1.5, samples=3, seed=5, far=FEW)
    source = StoringPages(shape)
    together = Engine(long_model, source, options=OPTIONS).generate([request])
    assert len({tuple(report.tokens) for report in together}) == 3
    assert source.held == 0
    for stream, report in enumerate(together):
        engine = Engine(long_model, LocalPages(shape), options=OPTIONS)
        alone = engine.fork(engine.begin(replace(request, samples=1)), stream=stream)
        engine.pick([alone])
        while not alone.is_done:
            engine.step([alone])
        assert alone.generated == report.tokens
        assert alone.report.far.chosen == report.far.chosen
    assert sum(report.far.misses for report in together) < 3 * alone.report.far.misses


def test_a_plain_request_is_untouched_by_a_far_one_beside_it(long_model: Llama) -> None:
    """Beside a far prompt, another request's logits are those beside a plain one, to the bit."""
    shape, found = page_shape(long_model), []
    for far in (None, FEW):
        engine = Engine(long_model, LocalPages(shape), options=OPTIONS)
        pair = [engine.begin(Request(PROMPT, 9, far=far)), engine.begin(Request(PROMPT[:99], 8))]
        engine.pick(pair)
        while not pair[1].is_done:
            engine.step(pair)
        found.append(pair[1].logits)
    np.testing.assert_array_equal(found[0], found[1])


def test_the_share_of_attention_that_is_read_is_measured(long_model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `measure_attention` all granules have all of the mass and few have less, the mean over
    query heads. Logits and page masses are those without."""
    shape, attend, shares = page_shape(long_model), FarPrompt.attend, list[float]()

    def watched(far: FarPrompt, layer: int, q: Any, table: BlockTable, stop: int, report: FarReport) -> Any:
        pages = [page.array[layer] for page in table.pages]
        dense = paged_attention(q[None], pages, PagedBatch([0, 1], [stop], [range(len(pages))]))
        done = attend(far, layer, q, table, stop, report)
        shares.append(float(np.exp(done.lse - dense.lse).mean()))
        return done

    measured = replace(OPTIONS, measure_attention=True)
    dense = StoringPages(shape)
    decoded(long_model, dense, Request(PROMPT, 8), measured)
    for far in (ALL, FEW):
        source = StoringPages(shape)
        request = Request(PROMPT, 8, far=far)
        want = logits_of(long_model, LocalPages(shape), far, tokens=8)
        with monkeypatch.context() as patch:
            patch.setattr(FarPrompt, "attend", watched)
            _, logits, report = decoded(long_model, source, request, measured)
        np.testing.assert_array_equal(logits, want)
        assert len(report.far.masses) == 7 * SPEC.layers
        if far is ALL:
            np.testing.assert_allclose(report.far.masses, 1, atol=1e-5)
            np.testing.assert_allclose([m for _, m in source.mass], [m for _, m in dense.mass], atol=1e-4)
        else:
            assert 0.1 < report.far.chosen_mass < 0.99
            np.testing.assert_allclose(report.far.masses, shares[-len(report.far.masses) :], rtol=1e-4)


def test_memory_is_that_of_the_hot_buffer_and_bounds(long_model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing and decoding four times the prompt takes more memory only for its bounds and page
    tables. The hot buffer stays as it is."""
    monkeypatch.setattr(reference, "TOKENS_AT_ONCE", 512)  # of a step of attention, however long the prompt
    shape, peaks, hot = page_shape(long_model, tokens_per_block=64), [], set()
    for tokens in (1024, 4096):
        prompt = tuple(np.random.default_rng(1).integers(0, 64, tokens).tolist())
        source = LocalPages(shape)  # its pages are mappings, which are not counted
        tracemalloc.start()
        try:
            engine = Engine(long_model, source, options=OPTIONS)
            hot.add(engine.generate([Request(prompt, 5, far=FarChoice(6, 512))])[0].far.hot_bytes)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    bounds_bytes = (4096 - 1024) // GRANULE_TOKENS * SPEC.layers * SPEC.kv_heads * 2 * SPEC.head_dim * 4
    kv_bytes = (4096 - 1024) * SPEC.layers * SPEC.kv_heads * 2 * SPEC.head_dim * 4
    assert peaks[1] - peaks[0] < kv_bytes / 4
    assert bounds_bytes < kv_bytes / 4
    assert len(hot) == 1


def test_a_prompt_without_a_whole_granule_is_an_ordinary_one(long_model: Llama) -> None:
    """A short prompt gives the same bits as without the choice, and reads no granule."""
    shape = page_shape(long_model)
    runs = [decoded(long_model, LocalPages(shape), Request(PROMPT[:60], 12, far=far), OPTIONS) for far in (None, FEW)]
    np.testing.assert_array_equal(runs[0][1], runs[1][1])
    assert runs[1][2].far == FarReport()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(PROMPT, far=FarChoice(1)), r"far\.granules: 1 .* 2"),
        (Request(PROMPT, far=FarChoice(8, 63)), r"far\.hot_tokens: 63 .* 64"),
        (Request(PROMPT, far=FEW, token_policy=TokenChoice("quest")), r"request\.far: .*token_policy"),
    ],
)
def test_impossible_choices_are_refused(long_model: Llama, request_: Request, message: str) -> None:
    """Too few granules, too small a buffer, or a token policy beside it raise InvalidArgument."""
    with pytest.raises(InvalidArgument, match=message):
        Engine(long_model, LocalPages(page_shape(long_model))).generate([request_])


def test_pages_that_cannot_be_read_are_refused(long_model: Llama) -> None:
    """Pages of e4m3 are refused with the reason, before anything is computed."""
    shape = page_shape(long_model, kv_dtype="float8_e4m3fn")
    with pytest.raises(InvalidArgument, match="far: pages of float8_e4m3fn on cpu"):
        Engine(long_model, LocalPages(shape)).generate([Request(PROMPT, far=FEW)])
