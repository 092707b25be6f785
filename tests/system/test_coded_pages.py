"""The worker over encoded blocks: pages in its own memory, decoded from a real daemon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import pytest

from tests.codecs import USABLE
from tests.system.warm import Daemon
from tierd.client import Client, Lease, NamespaceSpec, PutGroup
from tierd.codecs.coding import coding_of
from tierd.errors import ConfigError
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.coded_pages import CodedPages
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageShape, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.spec import LlamaSpec

SPEC = LlamaSpec(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=48,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    max_positions=4096,
    tied=True,
)
OPTIONS = EngineOptions(chunk_tokens=32)
RNG = np.random.default_rng(7)
PLAIN = [codec.name for codec in USABLE]
TOKENS = 16


def prompt(count: int) -> tuple[int, ...]:
    return tuple(int(t) for t in RNG.integers(0, 64, count))


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(random_checkpoint(SPEC, seed=3, scale=0.2))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


class Worker:
    """An engine with a separate session."""

    def __init__(self, daemon: Daemon, model: Llama, codec: str) -> None:
        self.client = Client(daemon.target, name="worker", timeout_s=20)
        self.source = source_of(self.client, page_shape(model, kv_dtype="float16"), codec)
        self.engine = Engine(model, self.source, options=OPTIONS)

    def serve(self, *requests: Request) -> list[Report]:
        return self.engine.generate(requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.client.close()


def source_of(client: Client, shape: PageShape, codec: str) -> CodedPages:
    coding = coding_of(codec, "", geometry=shape.geometry, tokens_per_block=TOKENS)
    spec = NamespaceSpec(model="random", tokens_per_block=TOKENS, block_bytes=shape.block_bytes)
    return CodedPages(client, spec, shape=shape, coding=coding)


def own_pages(model: Llama, tokens: Sequence[int]) -> list[np.ndarray]:
    """The pages of a prompt, computed without a daemon."""

    class Kept(LocalPages):
        def commit(self, pages: Any, tokens: Any, *, after: Any) -> Any:
            made[:] = [page.array.copy() for page in pages]  # all so far: none gets a name
            return super().commit(pages, tokens, after=after)

    made: list[np.ndarray] = []
    Engine(model, Kept(page_shape(model, kv_dtype="float16")), options=OPTIONS).generate([Request(tuple(tokens), 2)])
    return made


@pytest.mark.parametrize("codec", PLAIN)
def test_a_second_worker_continues_from_decoded_pages(daemon: Daemon, model: Llama, codec: str) -> None:
    """Another session gets the prefix near its values, the first page exactly, and computes the
    rest. With an exact codec all pages and the tokens are those without a cache."""
    said = prompt(100)
    with Worker(daemon, model, codec) as one, Worker(daemon, model, codec) as two:
        one.serve(Request(said, 2))
        held = two.source.acquire(said[:99])
        second = two.serve(Request(said, 2))[0]
        assert (second.reused_tokens, second.computed_tokens, second.tier_tokens) == (96, 4, {"host.0": 96})
        wanted = own_pages(model, said)
        assert held.tokens == 96 and (held.pages[0].array == wanted[0]).all()
        for page, exact in zip(held.pages, wanted, strict=True):
            off = np.abs(page.array.astype(np.float32) - exact.astype(np.float32))
            assert off.max() < (1e-9 if two.source.coding.codec.is_exact else 0.7 * np.abs(exact).max())
        two.source.release(held.pages)
        if two.source.coding.codec.is_exact:
            plain = Engine(model, LocalPages(page_shape(model, kv_dtype="float16")), options=OPTIONS)
            assert second.tokens == plain.generate([Request(said, 2)])[0].tokens
        assert not one.source.faults + two.source.faults


@pytest.mark.parametrize("codec", PLAIN)
def test_a_short_conversation_is_exact(daemon: Daemon, model: Llama, codec: str) -> None:
    """First and short blocks are exact. A turn that reuses only these has the tokens of one without
    a cache."""
    said, plain = prompt(TOKENS + 5), Engine(model, LocalPages(page_shape(model, kv_dtype="float16")), options=OPTIONS)
    with Worker(daemon, model, codec) as one, Worker(daemon, model, codec) as two:
        first = one.serve(Request(said, 4))[0]
        longer = (*said, *first.tokens, 3, 1, 4)
        second = two.serve(Request(longer, 8, marks=(first.stored_tokens,)))[0]
    assert second.reused_tokens == first.stored_tokens == TOKENS + 8
    assert second.tokens == plain.generate([Request(longer, 8)])[0].tokens


def test_pages_that_have_names_are_not_stored_again(daemon: Daemon, model: Llama) -> None:
    """A commit after a fork leaves named pages and stores the others; released pages lose their names."""
    said = prompt(3 * TOKENS)
    with Worker(daemon, model, "int8") as worker:
        source = worker.source
        pages = source.reserve(3)
        for page in pages:
            page.array[:] = 1
        source.commit(pages[:1], said[:TOKENS], after=None)
        named = pages[0].hash
        assert source.commit(pages, said, after=None) == pages
        assert pages[0].hash == named and [page.position for page in pages] == [0, 1, 2]
        assert source.acquire(said).tokens == 3 * TOKENS
        source.release(pages)
        assert [page.hash for page in source.reserve(3)] == [b""] * 3


def test_a_block_that_cannot_be_decoded_ends_the_prefix(daemon: Daemon, model: Llama) -> None:
    """Such a block is computed again, and counts as a fault."""
    said = prompt(4 * TOKENS)
    with Worker(daemon, model, "int8") as worker:
        space = worker.source._namespace
        hashes, coding = space.hash(said), worker.source.coding
        blocks = [coding.encode(np.ones(coding.full.block_bytes, np.uint8), tokens=TOKENS, number=i) for i in range(4)]
        blocks[2][100] ^= 1
        with worker.client.reserve(PutGroup(space, hashes, lengths=list(map(len, blocks)))) as pages:
            for page, block in zip(pages.buffers(), blocks, strict=True):
                page[:] = block
            pages.commit()
        assert worker.source.acquire(said).tokens == 2 * TOKENS
        assert worker.source.faults == {"CorruptRecord": 1}


def test_a_page_taken_away_during_the_copy_is_not_decoded(
    daemon: Daemon, model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix ends before a block whose page the daemon gave to another one."""
    said = prompt(3 * TOKENS)
    with Worker(daemon, model, "int8") as worker:
        worker.serve(Request(said, 2))
        monkeypatch.setattr(Lease, "check", lambda _: 1)
        assert worker.source.acquire(said).tokens == TOKENS


def test_pages_without_a_daemon(daemon: Daemon, model: Llama) -> None:
    """While the daemon is gone, pages stay private and requests are computed."""
    with Daemon() as other, Worker(other, model, "int8") as worker:
        other.stop()
        report = worker.serve(Request(prompt(40), 4))[0]
    assert report.reused_tokens == 0 and len(report.tokens) == 4 and worker.source.faults


def test_what_is_refused(daemon: Daemon, model: Llama) -> None:
    """A type of pages or a place that codecs do not take is an error with the remedy."""
    geometry = page_shape(model, kv_dtype="float16").geometry
    with Client(daemon.target) as client:
        with pytest.raises(ConfigError, match="float32"):
            source_of(client, page_shape(model), "int8")
        with pytest.raises(ConfigError, match=r"codec int8: pages lie on cuda:0; choose device='cpu'"):
            source_of(client, PageShape(geometry, TOKENS, Backend("numpy", "float32", "cuda:0")), "int8")
