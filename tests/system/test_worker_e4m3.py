"""A worker that keeps its KV in e4m3: over a real daemon, by the reference and by the kernels' own source, and on a trained model."""

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
"""Of held-out text."""
SAMPLED = Request(PROMPT, 12, temperature=1.0, samples=3)


@pytest.fixture(scope="module", params=["reference", "kernels"])
def attention(request: pytest.FixtureRequest) -> PagedAttention:
    """What attends."""
    if request.param == "reference":
        return paged_attention
    try:
        return KernelAttention(Emulated(build_emulator()))
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")


@pytest.fixture(scope="module")
def model() -> Llama:
    """Random, with a head dim that there are kernels for."""
    return random_model()


@pytest.fixture(scope="module")
def shape(model: Llama) -> PageShape:
    """Its pages."""
    return page_shape(model, kv_dtype=E4M3)


def served(model: Llama, source: PageSource, request: Request, attention: PagedAttention) -> list[Report]:
    """The request, by an engine of its own."""
    with Engine(model, source, attention=attention, options=OPTIONS) as engine:
        return engine.generate([request])


def from_daemon(
    daemon: Daemon, model: Llama, shape: PageShape, request: Request, *, attention: PagedAttention
) -> list[Report]:
    """The same by a worker with a session of its own, of whom the daemon never failed."""
    with Client(daemon.target, timeout_s=20) as client:
        source = TierdPages(client, model, name="random", shape=shape)
        reports = served(model, source, request, attention)
        assert not source.faults
    return reports


@pytest.mark.parametrize("config", [ROOMY, HOST_ONLY], ids=["device", "host"])
def test_tokens_do_not_depend_on_whose_pages_they_are(
    model: Llama, shape: PageShape, attention: PagedAttention, config: str
) -> None:
    """A worker's own pages, the daemon's, those that another worker stored, and those that outlived a killed daemon, the short last block too, give the same tokens."""
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
    """Continuations of one prompt that copy its last page, cold and over stored pages, draw the tokens that they draw without a daemon."""
    want = [one.tokens for one in served(model, LocalPages(shape), SAMPLED, attention)]
    assert want[0] == served(model, LocalPages(shape), replace(SAMPLED, samples=1), attention)[0].tokens
    with Daemon(HOST_ONLY) as daemon:
        for reused in (0, 64):
            told = from_daemon(daemon, model, shape, SAMPLED, attention=attention)
            assert ([one.tokens for one in told], told[0].reused_tokens) == (want, reused)
    assert len({tuple(tokens) for tokens in want}) == 3


def test_other_pages_and_other_scales_are_never_mixed(model: Llama, shape: PageShape) -> None:
    """Workers of one model with float16 pages, e4m3 ones and e4m3 ones of other scales find their own blocks alone, also where they bring one namespace of their own."""
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
    """What one has written the other goes on from: logits differ by a small part of what e4m3 itself costs."""
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
    """After the prompt."""
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
    """On held-out text a byte costs at most a hundredth of a nat more than over float32 pages, and 95 % of the likeliest bytes are the same."""
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
