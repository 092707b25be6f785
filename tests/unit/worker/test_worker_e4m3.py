"""A worker with pages of e4m3: scales from weights, the engine over them, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.worker.conftest import TINY, StoringPages
from tierd.errors import ConfigError, Unsupported
from tierd.kernels.e4m3 import E4M3, E4M3_MOST
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageShape, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.scales import Scales, scales_for
from tierd.worker.tierd_pages import namespace_spec

PROMPT = tuple(int(t) for t in np.random.default_rng(1).integers(0, 64, 50))


@pytest.fixture
def shape(model: Llama) -> PageShape:
    """Pages of four tokens of the tiny model in e4m3."""
    return page_shape(model, tokens_per_block=4, kv_dtype=E4M3)


def run(model: Llama, source: LocalPages, request: Request, **options: Any) -> list[Report]:
    """Runs one request on a new engine."""
    return Engine(model, source, options=EngineOptions(**options)).generate([request])


def logits_of(model: Llama, shape: PageShape, **options: Any) -> Any:
    """Logits after the prompt."""
    engine = Engine(model, LocalPages(shape), options=EngineOptions(**options))
    sequence = engine.begin(Request(PROMPT))
    engine.end(sequence)
    return sequence.logits


def keys_and_values(model: Llama) -> np.ndarray[Any, Any]:
    """Largest keys and values over all tokens, per layer, kind and head: [layers, 2, kv_heads]."""
    found = []

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        found.append([np.abs(k).max((0, 2)), np.abs(v).max((0, 2))])
        return np.repeat(v, q.shape[1] // v.shape[1], axis=1)

    model.hidden(np.arange(64), np.arange(64), attend)
    return np.array(found)


@pytest.mark.parametrize("seed", range(5))
def test_no_key_or_value_passes_its_bound(seed: int) -> None:
    """Weights alone bound keys and values: none is greater, and each maximum is above 1/16 of its bound."""
    model = Llama(random_checkpoint(TINY, seed=seed, scale=0.2))
    model.layers[0].norm[:5] = 7.0
    most, bounds = keys_and_values(model), model.kv_bounds()
    assert bounds.shape == (TINY.layers, 2, TINY.kv_heads)
    assert (most <= bounds).all()
    assert (most > bounds / 16).all()


def test_a_bound_is_reached() -> None:
    """A token along the weights' rows reaches the bound: its value, and its key at an eighth of a turn."""
    model = Llama(random_checkpoint(TINY, seed=1, scale=0.2))
    along = model._embedding[0]
    keys = TINY.q_heads * TINY.head_dim
    model.layers[0].qkv[keys:] = 3 * along
    found = []

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        found.append([np.abs(k).max((0, 2)), np.abs(v).max((0, 2))])
        return np.zeros_like(q)

    model.hidden(np.zeros(64, np.int64), np.arange(64), attend)
    np.testing.assert_allclose(np.array(found)[0] / model.kv_bounds()[0], 1.0, atol=2e-3)


def test_scales_are_the_least_powers_of_two_that_fit() -> None:
    """A bound of exactly 448 takes scale 1, the next float 2; an infinite or zero bound takes 1."""
    bounds = np.array([448, np.nextafter(np.float32(448), np.float32(1e9)), 224, 100, 1e-9, 0, np.inf], np.float32)
    scales = scales_for(bounds).values
    np.testing.assert_array_equal(scales[:4], [1, 2, 0.5, 0.25])
    np.testing.assert_array_equal(scales[5:], 1)
    assert 0.5 < bounds[4] / (scales[4] * E4M3_MOST) <= 1
    np.testing.assert_array_equal(np.frexp(scales)[0], 0.5)


def test_a_token_takes_half_the_bytes_of_bfloat16(model: Llama) -> None:
    """Pages, blocks and short blocks take half the bytes; scales are not among them."""
    of = {name: PageShape(TINY.geometry(name), 16, Backend()).bytes_of for name in ("bfloat16", "float32")}
    pages = page_shape(model, kv_dtype=E4M3)
    for tokens in (1, 7, 16):
        assert (2 * pages.bytes_of(tokens), 4 * pages.bytes_of(tokens)) == (
            of["bfloat16"](tokens),
            of["float32"](tokens),
        )
    assert pages.view(bytearray(pages.block_bytes)).nbytes == pages.block_bytes == 16 * pages.bytes_of(1)


@pytest.mark.parametrize("chunk_tokens", [3, 16, 256])
@pytest.mark.parametrize("shared", [4, 17, 48, 49, 50])
def test_reused_pages_change_nothing(model: Llama, shape: PageShape, shared: int, chunk_tokens: int) -> None:
    """A stored prefix, in whole blocks and a short one, gives the same tokens as no cache."""
    want = run(model, LocalPages(shape), Request(PROMPT, 20), chunk_tokens=chunk_tokens)[0]
    source = StoringPages(shape)
    run(model, source, Request(PROMPT[:shared], 1), chunk_tokens=chunk_tokens)
    source.close()  # a private page is unused from here on
    got = run(model, source, Request(PROMPT, 20, marks=(shared,)), chunk_tokens=chunk_tokens)[0]
    assert (got.reused_tokens, got.tokens) == (shared, want.tokens)


def test_samples_share_pages_until_they_write(model: Llama, shape: PageShape) -> None:
    """Forks in mid-page copy it; each gives the tokens that it gives alone, over stored pages too."""
    request = Request(PROMPT, 20, temperature=1.0, samples=3)
    want = [report.tokens for report in run(model, LocalPages(shape), request)]
    source = StoringPages(shape)
    for _ in range(2):
        assert [report.tokens for report in run(model, source, request)] == want
    assert len({tuple(tokens) for tokens in want}) == 3
    assert source.held == 0


def test_it_is_near_the_answer_of_wide_pages(model: Llama, shape: PageShape) -> None:
    """Logits differ by the rounding of keys and values, and by no more."""
    want = logits_of(model, PageShape(TINY.geometry("float32"), 4, Backend()))
    got = logits_of(model, shape)
    assert 1e-4 < np.abs(got - want).max() / np.abs(want).max() < 0.1


def test_what_is_beyond_the_range_saturates(model: Llama, shape: PageShape) -> None:
    """With scales that are too small, values saturate; no page holds NaN, and logits are finite."""
    small = replace(shape, scales=Scales(shape.scales.values / np.float32(1 << 12)))
    source = LocalPages(small)
    engine = Engine(model, source)
    sequence = engine.begin(Request(PROMPT))
    pages = np.stack([page.array for page in sequence.table.pages])
    assert np.isfinite(sequence.logits).all()
    assert not np.isin(pages, [0x7F, 0xFF]).any()
    assert np.isin(pages, [0x7E, 0xFE]).mean() > 0.5
    engine.end(sequence)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_gives_what_numpy_gives(model: Llama, shape: PageShape, dtype: str) -> None:
    """Torch gives the same scales and logits as numpy, except that rounded weights may change a
    scale by a power of two."""
    pytest.importorskip("torch", reason="torch is not installed")
    on_torch = Llama(random_checkpoint(TINY, seed=3, scale=0.2), Backend("torch", dtype))
    pages = page_shape(on_torch, tokens_per_block=4, kv_dtype=E4M3)
    assert pages.scales and shape.scales
    ratios = set((pages.scales.values / shape.scales.values).ravel().tolist())
    assert ratios == {1.0} if dtype == "float32" else ratios <= {0.5, 1.0, 2.0}
    want = logits_of(model, shape)
    got = logits_of(on_torch, pages, chunk_tokens=16, measure_attention=True)
    assert np.abs(got - want).max() / np.abs(want).max() < (0.02 if dtype == "float32" else 0.1)


def test_namespaces_tell_pages_and_scales_apart(model: Llama, shape: PageShape) -> None:
    """Other dtypes and other scales have other namespaces; equal scales, computed twice, share one."""
    shapes = [
        shape,
        replace(shape, scales=Scales(2 * shape.scales.values)),
        page_shape(model, tokens_per_block=4, kv_dtype="float16"),
    ]
    specs = {namespace_spec(model, one, name="tiny") for one in shapes}
    assert len(specs) == 3
    assert namespace_spec(model, page_shape(model, tokens_per_block=4, kv_dtype=E4M3), name="tiny") in specs


def test_what_is_not_to_be_had_is_named(model: Llama) -> None:
    """Unknown types, types that numpy lacks, and missing or wrong scales are refused with the choices."""
    with pytest.raises(
        ConfigError, match=r"kv dtype: 'fp8' is none of \['bfloat16', 'float16', 'float32', 'float8_e4m3fn'\]"
    ):
        page_shape(model, kv_dtype="fp8")
    with pytest.raises(
        Unsupported, match="numpy has no bfloat16; choose float32, float16 or float8_e4m3fn, or the torch"
    ):
        LocalPages(page_shape(model, kv_dtype="bfloat16")).reserve(1)
    with pytest.raises(
        ConfigError,
        match=r"'float8_e4m3fn' with scales of shape None, they take \[2, 2, 2\].*page_shape\(model, kv_dtype=",
    ):
        PageShape(TINY.geometry(E4M3), 4, Backend())
    with pytest.raises(ConfigError, match=r"'float16' with scales of shape \[2, 2, 2\], they take None"):
        PageShape(TINY.geometry("float16"), 4, Backend(), Scales(np.ones((2, 2, 2), np.float32)))
    with pytest.raises(ConfigError, match=r"scales of shape \[3, 2, 2\], they take \[2, 2, 2\]"):
        PageShape(TINY.geometry(E4M3), 4, Backend(), Scales(np.ones((3, 2, 2), np.float32)))
