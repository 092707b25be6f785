"""Far prompts over a real daemon: larger than the device tier and the hot buffer together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compilers import skip_without
from tests.depth import report as note
from tests.system.lone_worker import random_model
from tests.system.test_encoded_stores import evict
from tests.system.test_worker_pages import SPEC
from tests.system.warm import Daemon
from tests.unit.worker.conftest import StoringPages
from tests.unit.worker.test_tokens_engine import decoded
from tierd.client import Client
from tierd.errors import ConfigError
from tierd.kernels import paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.library import Emulated
from tierd.worker import far as far_module
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import open_checkpoint, random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.far import FarChoice
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageSource, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.tierd_pages import TierdOptions, TierdPages
from tools.kernels import MissingTool, build_emulator

# A block of 16 tokens has 16 KiB, so the device tier has room for 512 tokens.
CONFIG = """
[server]
shutdown_deadline = "5 s"
session_share = 1.0
[[device]]
kind = "cpu"
capacity = "512 KiB"
segment = "64 KiB"
[[host]]
capacity = "{host}"
segment = "256 KiB"
[[nvme]]
capacity = "32 MiB"
segment = "1 MiB"
admission = "all"
"""
ROOMY, NARROW = CONFIG.format(host="6 MiB"), CONFIG.format(host="512 KiB")
PROMPT = tuple(np.random.default_rng(7).integers(0, 64, 3109).tolist())
DEVICE_BYTES, TOKEN_BYTES = 512 << 10, 1 << 10
ALL, FEW = FarChoice(None, 256), FarChoice(4, 256)
OPTIONS = EngineOptions(chunk_tokens=128)


@pytest.fixture(scope="module")
def model() -> Llama:
    """Random weights with clearly different logits."""
    return Llama(random_checkpoint(SPEC, seed=3, scale=0.2))


@pytest.fixture(scope="module")
def alone(model: Llama) -> dict[FarChoice | None, list[int]]:
    """The tokens without a daemon, dense ones first; some granules give others."""
    source = StoringPages(page_shape(model))
    found = {far: served(model, source, far).tokens for far in (None, ALL, FEW)}
    assert found[ALL] == found[None] != found[FEW]
    return found


def request(far: FarChoice | None) -> Request:
    """Drawn tokens, so that an answer shows small differences."""
    return Request(PROMPT, 20, temperature=1.0, seed=4, far=far)


def served(model: Llama, source: PageSource, far: FarChoice | None) -> Report:
    """One request on a new engine."""
    with Engine(model, source, options=OPTIONS) as engine:
        return engine.generate([request(far)])[0]


def far_pages(client: Client, model: Llama) -> TierdPages:
    """Pages whose stored ones lie in host memory."""
    return TierdPages(client, model, name="random", options=TierdOptions(stored_in="host"))


@pytest.fixture(scope="module")
def roomy(model: Llama) -> Iterator[Daemon]:
    """A daemon whose host memory has room for the prompt, and its store has the prompt's blocks."""
    with Daemon(ROOMY) as daemon, Client(daemon.target, timeout_s=20) as client:
        options = TierdOptions(stored_in="host", durable=True)
        served(model, TierdPages(client, model, name="random", options=options), None)
        yield daemon


@pytest.mark.parametrize("far", [ALL, FEW], ids=["all", "few"])
@pytest.mark.parametrize("place", ["nowhere", "host", "nvme"])
def test_a_prompt_larger_than_the_device_and_the_hot_buffer_is_served(
    model: Llama, roomy: Daemon, alone: dict[FarChoice | None, list[int]], far: FarChoice, place: str
) -> None:
    """A prompt three times as large as the device tier and the hot buffer together gives the tokens
    of a run without a daemon. It is computed, or lies in host memory or on NVMe. Nothing is lost,
    and nothing lies in the process's own memory."""
    if place == "nvme":
        evict(roomy)
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(ROOMY)) if place == "nowhere" else roomy
        client = stack.enter_context(Client(daemon.target, timeout_s=20))
        source = far_pages(client, model)
        report = served(model, source, far)
        assert report.tokens == alone[far]
        assert report.reused_tokens == (0 if place == "nowhere" else 3104)
        assert (report.recomputed_tokens, source._memory.in_use, source._memory._spare) == (0, 0, [])
        assert not source.faults
        assert 3 * (DEVICE_BYTES + report.far.hot_bytes) < len(PROMPT) * TOKEN_BYTES


def test_host_memory_that_is_too_small_costs_only_computing(
    model: Llama, alone: dict[FarChoice | None, list[int]]
) -> None:
    """If neither tier has room for the prompt, tokens are those of a run without a cache, twice. A
    page for which host memory has no room stays where it is; none is computed again."""
    with Daemon(NARROW) as daemon, Client(daemon.target, timeout_s=20) as client:
        source = far_pages(client, model)
        for far in (ALL, FEW):
            report = served(model, source, far)
            assert (report.tokens, report.recomputed_tokens) == (alone[far], 0)


class Interrupted:
    """Does something once, between two pieces of a granule that is being copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: Callable[[], None]) -> None:
        self.is_armed, pieces = False, far_module._Layer._pieces

        def watched(layer: Any, granule: int) -> Iterator[Any]:
            for i, piece in enumerate(pieces(layer, granule)):
                if i == 2 and self.is_armed:
                    self.is_armed = False
                    what()
                yield piece

        monkeypatch.setattr(far_module._Layer, "_pieces", watched)


@pytest.mark.parametrize("back", [True, False], ids=["restarted", "gone"])
def test_a_daemon_killed_while_a_granule_is_copied_changes_no_token(
    model: Llama, alone: dict[FarChoice | None, list[int]], monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """A daemon that is killed in the middle of a copy changes no token, also if it comes back and
    serves others."""
    with Daemon(ROOMY) as daemon, Client(daemon.target, timeout_s=20) as client:
        source = far_pages(client, model)
        served(model, source, None)

        def trouble() -> None:
            daemon.kill()
            if back:
                daemon.start()
                with Client(daemon.target, timeout_s=20) as other:
                    overwrite(other, model)

        interrupted = Interrupted(monkeypatch, trouble)
        with Engine(model, source, options=OPTIONS) as engine:
            sequence = engine.begin(request(FEW))
            engine.pick([sequence])
            engine.step([sequence])
            interrupted.is_armed, before = True, sequence.report.far.misses
            while not sequence.is_done:
                engine.step([sequence])
            report = engine.end(sequence)
            assert not interrupted.is_armed and report.far.misses > before
            assert report.tokens == alone[FEW]
            assert report.reused_tokens == 3104
            again = engine.generate([request(FEW)])[0]
            assert again.tokens == alone[FEW]


def overwrite(client: Client, model: Llama) -> None:
    """Another worker's prompts, several times as many as fit host memory."""
    source = far_pages(client, model)
    with Engine(model, source, options=OPTIONS) as engine:
        for seed in range(6):
            other = np.random.default_rng(100 + seed).integers(0, 64, 1500)
            engine.generate([Request(tuple(other.tolist()), 1)])


def test_stored_pages_where_none_can_lie_are_refused(model: Llama, roomy: Daemon) -> None:
    """Stored pages are refused in another tier than host memory, and there if attention is on a GPU."""
    with Client(roomy.target) as client, pytest.raises(ConfigError, match=r"stored_in: is 'nvme'"):
        TierdPages(client, model, name="n", options=TierdOptions(stored_in="nvme"))
    shape = page_shape(model, kv_dtype="float16")
    on_gpu = replace(shape, backend=Backend("numpy", "float32", "cuda:0"))
    with Client(roomy.target) as client, pytest.raises(ConfigError, match=r"stored_in: .*cuda:0"):
        TierdPages(client, model, name="g", shape=on_gpu, options=TierdOptions(stored_in="host"))


def test_kernels_and_the_reference_read_far_prompts_alike() -> None:
    """By the kernels' attention, over pages and hot slots of float16, logits are those of the
    reference."""
    try:
        kernels = KernelAttention(Emulated(build_emulator()))
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")
    model, found = random_model(), []
    for attention in (paged_attention, kernels):
        source = LocalPages(page_shape(model, kv_dtype="float16"))
        engine = Engine(model, source, options=OPTIONS, attention=attention)
        pair = [engine.begin(Request(PROMPT[:200], 3, far=FarChoice(2, 64))), engine.begin(Request(PROMPT[:20], 3))]
        engine.pick(pair)
        engine.step(pair)
        found.append(np.stack([one.logits for one in pair]))
    assert np.linalg.norm(found[1] - found[0]) < 0.01 * np.linalg.norm(found[0])


@pytest.fixture(scope="module")
def trained(shared: Path) -> tuple[Llama, bytes]:
    """The trained model and text that it has not seen, or a skip."""
    place = shared / "models" / "tiny-llama"
    if not (place / "model.safetensors").exists():
        pytest.skip("../shared/models/tiny-llama (the trained model) is not beside this checkout")
    return Llama(open_checkpoint(place)), (place / "eval.txt").read_bytes()


def test_a_quarter_of_the_granules_has_most_of_the_attention(
    trained: tuple[Llama, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On text a quarter of the granules has at least 0.95 of the attention in the median. In the
    mean it misses less than as many random ones. All of them give the tokens of dense decoding."""
    model, text = trained
    prompt, rng, source = (256, *text[20_000:20_959]), np.random.default_rng(3), StoringPages(page_shape(model))
    options = EngineOptions(measure_attention=True)

    def run(far: FarChoice | None) -> tuple[list[int], Any, Report]:
        return decoded(model, source, Request(prompt, 30, far=far), options)

    dense, exact = run(None), run(FarChoice(None, 256))
    assert exact[0] == dense[0]
    np.testing.assert_allclose(exact[1], dense[1], rtol=0, atol=2e-3)
    quarter = run(FarChoice(4, 512))[2].far
    monkeypatch.setattr(far_module, "scores", lambda q, bounds: rng.random((bounds.shape[1], bounds.shape[0])))
    chance = run(FarChoice(4, 512))[2].far
    hit_rate, mean = quarter.hits / quarter.chosen, float(np.mean(quarter.masses))
    note("worker, tiny-llama, a quarter of the granules", median=quarter.chosen_mass, mean=mean, hits=hit_rate)
    assert quarter.chosen_mass >= 0.95
    assert 1 - mean < 0.7 * (1 - np.mean(chance.masses))
