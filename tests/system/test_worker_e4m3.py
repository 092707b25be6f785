"""A worker with KV in e4m3: on a real daemon, by the reference and the kernels' source, and trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.compilers import skip_without
from tests.depth import report
from tests.system.lone_worker import OPTIONS, PROMPT, random_model
from tests.system.test_worker_pages import HOST_ONLY, ROOMY
from tests.system.warm import Daemon
from tierd.cli.conversation import BYTE_BOS
from tierd.client import Client
from tierd.kernels import PagedAttention, paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.e4m3 import E4M3
from tierd.kernels.library import Emulated
from tierd.worker.checkpoint import open_checkpoint
from tierd.worker.engine import Engine
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageShape, PageSource, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.scales import Scales
from tierd.worker.sequences import Pass, Run
from tierd.worker.tierd_pages import TierdPages, namespace_spec
from tools.kernels import MissingTool, build_emulator

WINDOWS, WINDOW_BYTES, BETWEEN_BYTES = 3, 500, 40_000
"""The windows of held-out text: their number, their size and their distance."""
SAMPLED = Request(PROMPT, 12, temperature=1.0, samples=3)


@pytest.fixture(scope="module", params=["reference", "kernels"])
def attention(request: pytest.FixtureRequest) -> PagedAttention:
    """The attention implementation."""
    if request.param == "reference":
        return paged_attention
    try:
        return KernelAttention(Emulated(build_emulator()))
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")


@pytest.fixture(scope="module")
def model() -> Llama:
    """A random model whose head dim the kernels support."""
    return random_model()


@pytest.fixture(scope="module")
def shape(model: Llama) -> PageShape:
    """The model's page shape."""
    return page_shape(model, kv_dtype=E4M3)


def served(model: Llama, source: PageSource, request: Request, attention: PagedAttention) -> list[Report]:
    """Serves the request with a new engine."""
    with Engine(model, source, attention=attention, options=OPTIONS) as engine:
        return engine.generate([request])


def from_daemon(
    daemon: Daemon, model: Llama, shape: PageShape, request: Request, *, attention: PagedAttention
) -> list[Report]:
    """Serves the request with a new session; asserts that the daemon never failed."""
    with Client(daemon.target, timeout_s=20) as client:
        source = TierdPages(client, model, name="random", shape=shape)
        reports = served(model, source, request, attention)
        assert not source.faults
    return reports


@pytest.mark.parametrize("config", [ROOMY, HOST_ONLY], ids=["device", "host"])
def test_tokens_do_not_depend_on_whose_pages_they_are(
    model: Llama, shape: PageShape, attention: PagedAttention, config: str
) -> None:
    """Tokens are the same over local, daemon, other workers' and restored pages, short last block too."""
    first = Request(PROMPT, 12)
    want = served(model, LocalPages(shape), first, attention)[0]
    with Daemon(config) as daemon:
        told = [from_daemon(daemon, model, shape, first, attention=attention)[0] for _ in range(2)]
        longer = Request((*PROMPT, *want.tokens, 1, 2), 8, marks=(told[0].stored_tokens,))
        want_longer = served(model, LocalPages(shape), longer, attention)[0]
        told_longer = [from_daemon(daemon, model, shape, longer, attention=attention)[0]]
        daemon.restart()
        told.append(from_daemon(daemon, model, shape, first, attention=attention)[0])
        told_longer.append(from_daemon(daemon, model, shape, longer, attention=attention)[0])
    assert [one.tokens for one in told] == [want.tokens] * 3
    assert [one.tokens for one in told_longer] == [want_longer.tokens] * 2
    assert told[0].stored_tokens == 86
    assert [one.reused_tokens for one in (*told, *told_longer)][:4] == [0, 64, 64, 86]
    assert told_longer[1].reused_tokens >= 64


def test_samples_fork_in_the_daemons_pages(model: Llama, shape: PageShape, attention: PagedAttention) -> None:
    """Samples that fork in the daemon's pages, cold or stored, draw the same tokens as without a daemon."""
    want = [one.tokens for one in served(model, LocalPages(shape), SAMPLED, attention)]
    assert want[0] == served(model, LocalPages(shape), replace(SAMPLED, samples=1), attention)[0].tokens
    with Daemon(HOST_ONLY) as daemon:
        for reused in (0, 64):
            told = from_daemon(daemon, model, shape, SAMPLED, attention=attention)
            assert ([one.tokens for one in told], told[0].reused_tokens) == (want, reused)
    assert len({tuple(tokens) for tokens in want}) == 3


def test_other_pages_and_other_scales_are_never_mixed(model: Llama, shape: PageShape) -> None:
    """Workers with float16, e4m3 or other scales hit only their own blocks, in one namespace too."""
    others = replace(shape, scales=Scales(shape.scales.values * 2)) if shape.scales else shape
    shapes = [page_shape(model, kv_dtype="float16"), shape, others]
    wants = [served(model, LocalPages(one), Request(PROMPT, 4), paged_attention)[0].tokens for one in shapes]
    own = replace(namespace_spec(model, shapes[0], name="own"), block_bytes=shape.block_bytes, geometry=shape.geometry)
    with Daemon(HOST_ONLY) as daemon, Client(daemon.target, timeout_s=20) as client:
        for reused in (0, 64):
            for one, want in zip(shapes, wants, strict=True):
                told = served(
                    model, TierdPages(client, model, name="random", shape=one), Request(PROMPT, 4), paged_attention
                )
                assert (told[0].reused_tokens, told[0].tokens) == (reused, want)
            for one in (shape, others):
                told = served(model, TierdPages(client, own, shape=one), Request(PROMPT, 4), paged_attention)
                assert told[0].reused_tokens == reused


def test_kernels_and_the_reference_agree_and_read_each_others_pages(model: Llama, shape: PageShape) -> None:
    """Kernels and reference read each other's pages: logits differ by a small part of e4m3's own cost."""
    try:
        both = [paged_attention, KernelAttention(Emulated(build_emulator()))]
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")
    wide = logits_of(model, LocalPages(page_shape(model)), paged_attention)
    with Daemon(HOST_ONLY) as daemon, Client(daemon.target, timeout_s=20) as client:
        source = TierdPages(client, model, name="random", shape=shape)
        wrote, read = [logits_of(model, source, attention) for attention in both]
        assert source.acquire(PROMPT).tokens == 64
    own = logits_of(model, LocalPages(shape), both[1])
    cost = np.linalg.norm(wrote - wide)
    assert np.linalg.norm(read - wrote) < cost / 20
    assert np.linalg.norm(own - wrote) < cost / 5


def logits_of(model: Llama, source: PageSource, attention: PagedAttention) -> NDArray[np.float32]:
    """The logits after the prompt."""
    engine = Engine(model, source, attention=attention, options=OPTIONS)
    sequence = engine.begin(Request(PROMPT))
    engine.end(sequence)
    return sequence.logits


@pytest.fixture(scope="module")
def trained(shared: Path) -> tuple[Llama, str]:
    """The trained model and text that it has not seen, or a skip."""
    place = shared / "models" / "tiny-llama"
    if not (place / "model.safetensors").exists():
        pytest.skip("../shared/models/tiny-llama (the trained model) is not beside this checkout")
    return Llama(open_checkpoint(place)), (place / "eval.txt").read_text(encoding="utf-8")


def predictions(model: Llama, shape: PageShape, tokens: tuple[int, ...]) -> NDArray[np.float64]:
    """Log-probabilities after each token, [tokens, vocab], with all keys and values read from pages."""
    engine = Engine(model, LocalPages(shape))
    sequence = engine.begin(Request(tokens))
    step = Pass([Run(sequence, 0, len(tokens))], attention=paged_attention, with_mass=False)
    ids = model.backend.ints(tokens), model.backend.ints(range(len(tokens)))
    logits = model.logits(model.hidden(*ids, step.attend)).astype(np.float64)
    engine.end(sequence)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_a_trained_model_loses_little(trained: tuple[Llama, str]) -> None:
    """On held-out text e4m3 costs at most 0.01 nat a byte over float32; 95 % of the best bytes agree."""
    model, text = trained
    shapes = [page_shape(model, kv_dtype=kv_dtype) for kv_dtype in ("float32", E4M3)]
    costs, likeliest = [], []
    for start in range(0, WINDOWS * BETWEEN_BYTES, BETWEEN_BYTES):
        tokens = (BYTE_BOS, *text[start : start + WINDOW_BYTES].encode())
        told = np.stack([predictions(model, shape, tokens) for shape in shapes])
        costs.append(-told[:, np.arange(len(tokens) - 1), tokens[1:]])
        likeliest.append(told.argmax(-1))
    wide, narrow = np.concatenate(costs, axis=1).mean(axis=1).tolist()
    same = float(np.equal(*np.concatenate(likeliest, axis=1)).mean())
    figures = {"float32": round(wide, 4), "e4m3": round(narrow, 4), "same_likeliest": round(same, 3)}
    report("worker, tiny-llama over e4m3 pages, nats a byte", **figures)
    assert narrow - wide < 0.01
    assert same > 0.95
