"""A worker that computes with the first layers of a stored prefix while the daemon reads the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.system.test_by_layer import FIRST_HIT, NOTE, flip
from tests.system.test_encoded_stores import evict
from tests.system.warm import Daemon
from tierd.client import Client
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.spec import LlamaSpec
from tierd.worker.tierd_pages import TierdOptions, TierdPages

SPEC = LlamaSpec(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    layers=4,
    q_heads=8,
    kv_heads=8,
    head_dim=64,
    max_positions=4096,
    tied=True,
)
TOKENS = 128
"""Of a block of 2 MiB, in four layers."""
PROMPT = tuple(np.random.default_rng(1).integers(0, 64, 8 * TOKENS + 40).tolist())
REQUEST = Request(PROMPT, max_new_tokens=6)
OPTIONS = EngineOptions(chunk_tokens=256)


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(random_checkpoint(SPEC, seed=3))


@pytest.fixture(scope="module")
def alone(model: Llama) -> list[int]:
    """The tokens without a cache."""
    shape = page_shape(model, tokens_per_block=TOKENS)
    with Engine(model, LocalPages(shape), options=OPTIONS) as engine:
        return list(engine.generate([REQUEST])[0].tokens)


@pytest.fixture
def daemon(model: Llama) -> Iterator[Daemon]:
    """A daemon whose store alone has the prompt's blocks, and its short last one."""
    with Daemon(FIRST_HIT, faults=True) as daemon:
        serve(daemon, model, durable=True)
        evict(daemon)
        yield daemon


def serve(daemon: Daemon, model: Llama, request: Request = REQUEST, *, durable: bool = False) -> Report:
    shape = page_shape(model, tokens_per_block=TOKENS)
    with Client(daemon.target) as client:
        source = TierdPages(client, model, name="m", shape=shape, options=TierdOptions(durable=durable, advisor=False))
        with Engine(model, source, options=OPTIONS) as engine:
            return engine.generate([request])[0]


def test_tokens_are_those_without_a_cache(daemon: Daemon, model: Llama, alone: list[int]) -> None:
    """Computing while layers come gives the tokens of a run without a cache, and reuses all blocks."""
    report = serve(daemon, model)
    assert list(report.tokens) == alone
    assert report.reused_tokens == 8 * TOKENS and report.tier_tokens["nvme.0"] == 8 * TOKENS


def test_it_computes_before_the_last_layer_is_there(daemon: Daemon, model: Llama, alone: list[int]) -> None:
    """While the daemon is stuck before the second part, the worker holds the first layer's keys."""
    seen = list[bool]()
    hidden = model.hidden

    def watched(tokens: object, positions: object, attend: object) -> object:
        def note(layer: int, *qkv: object) -> object:
            out = attend(layer, *qkv)  # type: ignore[operator]
            if layer == 0 and not seen:
                seen.append(faults.hits()[NOTE] < 3)
            return out

        return hidden(tokens, positions, note)  # type: ignore[arg-type]

    with daemon.faults() as faults:
        faults.arm(NOTE, "delay:1@3x1")
        model.hidden = watched  # type: ignore[method-assign, assignment]
        try:
            assert list(serve(daemon, model).tokens) == alone
        finally:
            model.hidden = hidden  # type: ignore[method-assign]


def test_a_layer_that_is_damaged_is_computed(daemon: Daemon, model: Llama, alone: list[int]) -> None:
    """If the store's bytes of a late layer are wrong, the worker computes what is missing: same tokens."""
    with Client(daemon.target) as client:
        source = TierdPages(client, model, name="m", shape=page_shape(model, tokens_per_block=TOKENS))
        held = source.acquire(PROMPT)
        block = np.array(held.pages[5].array).reshape(-1).view(np.uint8)
        source.release(held.pages)
        del held
        source.close()
    evict(daemon)
    flip(daemon, block, at=len(block) - 100)
    report = serve(daemon, model)
    assert list(report.tokens) == alone
    assert report.reused_tokens == 5 * TOKENS and report.recomputed_tokens == 3 * TOKENS


def test_a_short_last_block_comes_by_layer_too(daemon: Daemon, model: Llama) -> None:
    """The next turn of a conversation reuses the short block at its mark, with the same tokens."""
    first = serve(daemon, model, durable=True)
    mark = first.stored_tokens
    evict(daemon)
    turn = Request((*PROMPT, *first.tokens, 1, 2, 3), max_new_tokens=5, marks=(mark,))
    report = serve(daemon, model, turn)
    shape = page_shape(model, tokens_per_block=TOKENS)
    with Engine(model, LocalPages(shape), options=OPTIONS) as engine:
        assert list(report.tokens) == list(engine.generate([turn])[0].tokens)
    assert report.reused_tokens == mark
