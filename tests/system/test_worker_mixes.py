"""Mixes of all kinds of requests: whatever meets in a batch, tokens are those of plain runs alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest

from tests.compilers import skip_without
from tests.system.lone_worker import SPEC
from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tests.unit.worker.conftest import StoringPages
from tierd._proto import admin_pb2 as apb
from tierd.client import Client
from tierd.kernels import PagedAttention, paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.library import Emulated
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.far import FarChoice
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageSource, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.tierd_pages import TierdOptions, TierdPages
from tierd.worker.tokens.choice import TokenChoice
from tools.kernels import MissingTool, build_emulator

# A block of 16 tokens has 16 or 32 KiB. The device tier has room for the prompts of one batch, or
# less.
CONFIG = """
[server]
shutdown_deadline = "5 s"
session_share = 1.0
[[device]]
kind = "cpu"
capacity = "1 MiB"
segment = "64 KiB"
[[host]]
capacity = "1 MiB"
segment = "256 KiB"
verify = "first_hit"
[[nvme]]
capacity = "16 MiB"
segment = "1 MiB"
admission = "all"
"""
TEXTS = [tuple(np.random.default_rng(i).integers(0, 64, 400).tolist()) for i in range(2)]
LENGTHS = (1, 15, 16, 33, 64, 100, 129, 200, 256, 323)
SHORT = LENGTHS[:7]
"""For kernels, which are slow when emulated."""
FAR = (FarChoice(None, 64), FarChoice(None, 4096), FarChoice(2, 64), FarChoice(3, 192))
POLICIES = (TokenChoice("h2o"), TokenChoice("streaming", tokens=40), TokenChoice("snapkv", 0.4), TokenChoice("quest"))
CASES = 34


@cache
def model() -> Llama:
    """Random weights with clearly different logits."""
    return Llama(random_checkpoint(replace(SPEC, max_positions=1024), seed=3, scale=0.2))


@cache
def kernels() -> KernelAttention:
    """The kernels, built for the CPU."""
    try:
        return KernelAttention(Emulated(build_emulator()))
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")


def attention(dtype: str) -> PagedAttention:
    """Kernels for pages of 16 bits."""
    return paged_attention if dtype == "float32" else kernels()


def plain(request: Request) -> Request:
    """One with the same tokens: all granules of a far prompt are as good as its pages in place."""
    is_exact = request.far is not None and request.far.granules is None
    return replace(request, marks=(), far=None if is_exact else request.far)


@cache
def alone(request: Request, chunk: int, dtype: str) -> list[list[int]]:
    """Tokens of a request's samples in passes of its own, without a daemon."""
    options = EngineOptions(chunk_tokens=chunk, decode_graphs=False)
    source = LocalPages(page_shape(model(), kv_dtype=dtype))
    with Engine(model(), source, options=options, attention=attention(dtype)) as engine:
        return [report.tokens for report in engine.generate([request])]


def any_request(random: Random, dtype: str) -> Request:
    """A prompt that begins as others do, read in any way. Draws show a rounding of 16 bits."""
    text = random.choice(TEXTS)
    request = Request(
        text[: random.choice(LENGTHS if dtype == "float32" else SHORT)],
        random.choice((1, 3, 9, 20)),
        temperature=random.choice((0.0, 0.0, 1.0)) if dtype == "float32" else 0.0,
        seed=random.randrange(3),
        samples=random.choice((1, 1, 1, 2, 3)),
        marks=tuple(n + random.randrange(20) for n in random.sample(LENGTHS, 2)),
    )
    how = random.choice(("dense", "dense", "far", "policy"))
    if how == "far":
        return replace(request, far=random.choice(FAR))
    return replace(request, token_policy=random.choice(POLICIES)) if how == "policy" else request


def any_source(random: Random, client: Client, dtype: str) -> PageSource:
    """Pages over the daemon, sometimes of this process."""
    shape = page_shape(model(), kv_dtype=dtype)
    kind = random.choice(("daemon",) * 6 + ("local", "storing"))
    if kind != "daemon":
        return LocalPages(shape) if kind == "local" else StoringPages(shape)
    options = TierdOptions(
        tier=random.choice(("", "", "host")),
        stored_in=random.choice(("", "host")),
        reserve_pages=random.choice((1, 4, 16)),
        durable=random.random() < 0.5,
        keeps_copies=random.random() < 0.2,
        load_s=random.choice((0.0, 5.0)),
        advisor=random.random() < 0.7,
    )
    source = TierdPages(client, model(), name="m", shape=shape, options=options)
    pass_s = random.choice((0.0, 1e-7, 10.0))
    for _ in range(4 if pass_s else 0):  # of a fast or a slow GPU
        source.computed([(0, 64)], pass_s)
        source.computed([(64, 128)], pass_s)
    return source


def leave_to_the_store(daemon: Daemon) -> None:
    """No block that nobody reads is near."""
    with RawClient(daemon.target) as client:
        client.call(client.admin.Quiesce, apb.QuiesceRequest(deadline_s=30))
        for tier in ("device.0", "host.0"):
            client.call(client.admin.Evict, apb.EvictRequest(tier=tier))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(CONFIG) as daemon:
        yield daemon


def served(random: Random, daemon: Daemon) -> tuple[list[Request], list[Report], EngineOptions, str, PageSource]:
    """A batch on an engine and a source of any kind."""
    dtype = random.choice(("float32",) * 4 + ("float16",))
    options = EngineOptions(
        chunk_tokens=random.choice((16, 32, 64, 128)),
        step_tokens=random.choice((32, 256)),
        batch_limit=random.choice((2, 3, 64)),
        keep_tails=random.random() < 0.7,
        measure_attention=random.random() < 0.2,
        decode_graphs=random.random() < 0.8,
    )
    requests = [any_request(random, dtype) for _ in range(random.randint(1, 5))]
    if random.random() < 0.6:
        leave_to_the_store(daemon)
    with Client(daemon.target, timeout_s=20) as client:
        source = any_source(random, client, dtype)
        with Engine(model(), source, options=options, attention=attention(dtype)) as engine:
            reports = engine.generate(requests)
    return requests, reports, options, dtype, source


@pytest.mark.parametrize("case", range(CASES))
def test_tokens_are_those_of_plain_runs(daemon: Daemon, case: int) -> None:
    """Far prompts, token policies, samples and plain requests share a batch, blocks, forks and
    decode steps. Each sample has the tokens of its request alone, and nothing stays held."""
    requests, reports, options, dtype, source = served(Random(case), daemon)
    wanted = [tokens for request in requests for tokens in alone(plain(request), options.chunk_tokens, dtype)]
    assert [report.tokens for report in reports] == wanted
    for report in reports:
        assert report.reused_tokens + report.computed_tokens >= report.prompt_tokens
        assert sum(report.tier_tokens.values()) == report.reused_tokens
    if isinstance(source, TierdPages):
        assert source._memory.in_use == 0
    elif isinstance(source, StoringPages):
        assert source.held == 0
