"""Token policies of the worker: over a real daemon, by the kernels' source, and on a trained model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.compilers import skip_without
from tests.depth import count, report
from tests.system.lone_worker import OPTIONS, PROMPT, random_model
from tests.system.test_worker_pages import HOST_ONLY, ROOMY
from tests.system.warm import Daemon
from tierd.cli.conversation import BYTE_BOS
from tierd.client import Client
from tierd.kernels import PagedAttention, paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.library import Emulated
from tierd.worker.checkpoint import open_checkpoint
from tierd.worker.engine import Engine
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageSource, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.tierd_pages import TierdPages
from tierd.worker.tokens.choice import POLICIES, TokenChoice
from tierd.worker.tokens.forced import Prompt, attention_for
from tools.kernels import MissingTool, build_emulator

KEEP = 0.4
"""Of the short prompt: some pages of four are read, some tokens dropped."""
WINDOWS, PREFIX, CONTINUED, RECALLED_AFTER = 40, 768, 256, 32
"""Windows of held-out text, bytes of a prompt and of its continuation; recall is scored from the last."""
RESTORE_TOK = {"h2o": 1.7, "streaming": 1.7, "snapkv": 1.7, "quest": 0.30}
"""Greatest damage at 20 %, as `Damage.tok`, of a continuation of the text."""
RECALL_TOK, RECALL_TOP1 = 1.7, 85.6
"""Of a repeated passage, for pages that each query chooses."""


@pytest.fixture(scope="module")
def model() -> Llama:
    """A random model whose head dim the kernels support."""
    return random_model()


def served(
    model: Llama, source: PageSource, *requests: Request, attention: PagedAttention | None = None
) -> list[Report]:
    """Serves the requests together."""
    return Engine(model, source, options=OPTIONS, attention=attention).generate(requests)


def exact_blocks(model: Llama) -> list[NDArray[np.float32]]:
    """The prompt's full blocks as a worker without a policy computes them."""
    engine = Engine(model, LocalPages(page_shape(model)), options=OPTIONS)
    sequence = engine.begin(Request(PROMPT))
    return [page.array.copy() for page in sequence.table.pages[: len(PROMPT) // 16]]


@pytest.mark.parametrize("config", [ROOMY, HOST_ONLY], ids=["device", "host"])
def test_the_daemon_keeps_every_block_under_any_policy(model: Llama, config: str) -> None:
    """All policies, twice each, decode as without a daemon; it then has the exact blocks of the
    prompt, and none of their answers."""
    requests = [Request(PROMPT, 25, token_policy=TokenChoice(name, KEEP)) for name in POLICIES]
    wants = [served(model, LocalPages(page_shape(model)), request)[0].tokens for request in requests]
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=20) as client:
        source = TierdPages(client, model, name="random")
        for reused in (0, 64):
            reports = served(model, source, *requests)
            assert [one.tokens for one in reports] == wants
            assert [one.stored_tokens for one in reports] == [64] * len(requests)
            assert reports[0].reused_tokens == reused
        with Client(daemon.target, timeout_s=20) as other:
            reader = TierdPages(other, model, name="random")
            for tokens in wants:
                held = reader.acquire((*PROMPT, *tokens), marks=range(76, 100))
                assert held.tokens == 64
                for page, want in zip(held.pages, exact_blocks(model), strict=True):
                    np.testing.assert_array_equal(page.array, want)
                reader.release(held.pages)
            plain = served(model, reader, Request(PROMPT, 12))[0]
            assert not source.faults + reader.faults
    assert plain.tokens == served(model, LocalPages(page_shape(model)), Request(PROMPT, 12))[0].tokens


@pytest.mark.parametrize("name", POLICIES)
def test_kernels_and_the_reference_choose_alike(model: Llama, name: str) -> None:
    """By the kernels' source, over pages of float16, a policy's logits are those of the reference."""
    try:
        kernels = KernelAttention(Emulated(build_emulator()))
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")
    shape = page_shape(model, kv_dtype="float16")
    request = Request(PROMPT, 3, token_policy=TokenChoice(name, KEEP))
    both = []
    for attention in (paged_attention, kernels):
        engine = Engine(model, LocalPages(shape), options=OPTIONS, attention=attention)
        pair = [engine.begin(request), engine.begin(Request(PROMPT, 3))]
        engine.pick(pair)
        engine.step(pair)
        both.append(np.stack([one.logits for one in pair]))
    assert np.linalg.norm(both[1] - both[0]) < 0.01 * np.linalg.norm(both[0])


class Damage(NamedTuple):
    """Costs of a policy. tok: as the change of a perplexity of 5.68 with 4 bytes a token.

    kl: nats a byte. top1: percent of bytes that are predicted.
    """

    tok: float
    kl: float
    top1: float


@pytest.fixture(scope="module")
def trained(shared: Path) -> tuple[Llama, NDArray[np.uint8]]:
    """The trained model and text that it has not seen, or a skip."""
    place = shared / "models" / "tiny-llama"
    if not (place / "model.safetensors").exists():
        pytest.skip("../shared/models/tiny-llama (the trained model) is not beside this checkout")
    return Llama(open_checkpoint(place)), np.frombuffer((place / "eval.txt").read_bytes(), np.uint8)


def windows(text: NDArray[np.uint8], *, recalls: bool) -> list[NDArray[np.int64]]:
    """Windows of one more token than a prefix and its continuation, which may repeat the prefix."""
    length, rng, found = PREFIX + CONTINUED, np.random.default_rng(17), []
    for start in range(0, WINDOWS * ((len(text) - length) // WINDOWS), (len(text) - length) // WINDOWS):
        window = text[start : start + length].copy()
        if recalls:
            again = int(rng.integers(8, PREFIX - CONTINUED - RECALLED_AFTER))
            window[PREFIX - 1 :] = window[again : again + CONTINUED + 1]
        found.append(np.concatenate([[BYTE_BOS], window.astype(np.int64)]))
    return found[: count(test=1, nightly=4, weekly=WINDOWS)]


def damages(trained: tuple[Llama, NDArray[np.uint8]], *, recalls: bool) -> dict[str, Damage]:
    """Costs of each policy at 20 %, with exact prompts."""
    model, text = trained
    cut = slice(RECALLED_AFTER if recalls else 0, None)
    choices = {"all": TokenChoice("streaming", 1.0)} | {name: TokenChoice(name) for name in POLICIES}
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in choices}
    for tokens in windows(text, recalls=recalls):
        prompt, positions, truth = Prompt(), np.arange(len(tokens) - 1), tokens[PREFIX + 1 :]
        model.hidden(tokens[:PREFIX], positions[:PREFIX], prompt.attend)

        def told(choice: TokenChoice) -> NDArray[np.float64]:
            attend = attention_for(choice, prompt, model.spec)  # noqa: B023
            logits = model.logits(model.hidden(tokens[PREFIX:-1], positions[PREFIX:], attend))  # noqa: B023
            logs = logits.astype(np.float64) - logits.max(-1, keepdims=True)
            result: NDArray[np.float64] = logs - np.log(np.exp(logs).sum(-1, keepdims=True))
            return result

        exact = told(choices["all"])
        for name, row in rows.items():
            got = exact if name == "all" else told(choices[name])
            loss = (exact - got)[np.arange(CONTINUED), truth]
            kl = (np.exp(exact) * (exact - got)).sum(-1)
            row.append((loss[cut].mean(), kl[cut].mean(), (got.argmax(-1) == truth)[cut].mean()))
    means = {name: np.mean(row, axis=0).tolist() for name, row in rows.items()}
    return {name: Damage(5.68 * math.expm1(4 * loss), kl, 100 * top1) for name, (loss, kl, top1) in means.items()}


@pytest.mark.timeout(3600)  # forty windows, at the weekly depth
@pytest.mark.parametrize("protocol", ["restore", "recall"])
def test_a_fifth_of_the_tokens_is_worth_more_than_chance(
    trained: tuple[Llama, NDArray[np.uint8]], protocol: str
) -> None:
    """On held-out text a policy costs less than a random one, and pages chosen by queries less than
    half of random pages. On all windows costs are within their limits."""
    found = damages(trained, recalls=protocol == "recall")
    for name, damage in found.items():
        report(f"worker, tiny-llama, tokens by {name} at 20 %, {protocol}", **damage._asdict())
    if protocol == "restore":  # nothing that is dropped at the end of a prompt can be recalled
        assert max(found[name].kl for name in ("h2o", "streaming", "snapkv")) < found["random"].kl
    assert found["quest"].kl < found["random-pages"].kl / 2
    if count(test=1, nightly=4, weekly=WINDOWS) < WINDOWS:
        return
    if protocol == "restore":
        assert all(found[name].tok <= limit for name, limit in RESTORE_TOK.items())
    else:
        assert found["quest"].tok <= RECALL_TOK
        assert found["quest"].top1 >= RECALL_TOP1
