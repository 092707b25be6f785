"""Several GPUs in one daemon: a tier, a process, slabs and books for each, and a worker that says which one it means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tests.compilers import skip_without
from tests.system.blocks import connected
from tests.system.device_driver import use_fatbins, use_gpus
from tests.system.device_worker import CONFIG, DEVICE, await_put, gpu_process, serve
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.lone_worker import OPTIONS, PROMPT, random_model
from tests.system.warm import Daemon
from tierd.client import Client
from tierd.errors import ConfigError, Unavailable
from tierd.worker.backend import Backend
from tierd.worker.engine import Engine
from tierd.worker.pages import page_shape
from tierd.worker.report import Request
from tierd.worker.tierd_pages import TierdOptions, TierdPages
from tools.kernels import MissingTool

TWO = DEVICE.replace("capacity", "ordinal = 1\ncapacity", 1) + CONFIG
"""The first tier is that of the second GPU: what is counted as what shows."""
FIRST, SECOND = "device.0", "device.1"
ORDINALS = {FIRST: 1, SECOND: 0}
BLOCKS = 6


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, for every process that is started here."""
    use_gpus(monkeypatch, 2)


@pytest.fixture
def daemon(driver: None) -> Iterator[Daemon]:
    with Daemon(TWO) as running:
        yield running


@pytest.fixture
def worker(daemon: Daemon) -> Iterator[Elsewhere]:
    with Elsewhere(serve, daemon.target) as one:
        yield one


def test_each_has_its_process_slabs_and_books(daemon: Daemon, worker: Elsewhere) -> None:
    """What is put on one GPU lies in slabs of that GPU alone and counts there alone; a worker maps slabs of both and reads both in place."""
    for seed, tier in ((1, FIRST), (2, SECOND)):
        assert worker.ask(["put", [seed, BLOCKS, "", tier]]) == BLOCKS
        assert worker.ask(["lease", [seed, BLOCKS, tier]]) == BLOCKS
    assert worker.ask(["places", []]) == [[tier, ORDINALS[tier]] for tier in (FIRST, SECOND) for _ in range(BLOCKS)]
    assert worker.ask(["right", []]) == [2 * BLOCKS, 2 * BLOCKS]
    with connected(daemon) as client:
        assert [client.tiers()[tier].pages_pinned for tier in (FIRST, SECOND)] == [BLOCKS, BLOCKS]
    pids = {gpu_process(daemon, ordinal).pid for ordinal in (0, 1)}
    own = [child.pid for child in psutil.Process(daemon.pid).children() if "tierd.gpu" in child.cmdline()]
    assert len(pids) == 2 and pids == set(own)


def test_blocks_go_from_one_gpu_to_another(daemon: Daemon, worker: Elsewhere) -> None:
    """What one GPU has the other gets, over the host, to the bit; both have it then."""
    assert worker.ask(["put", [3, BLOCKS, "", FIRST]]) == BLOCKS
    assert worker.ask(["lease", [3, BLOCKS, SECOND]]) == BLOCKS
    assert worker.ask(["lease", [3, BLOCKS, FIRST]]) == BLOCKS
    assert worker.ask(["places", []]) == [[tier, ORDINALS[tier]] for tier in (SECOND, FIRST) for _ in range(BLOCKS)]
    assert worker.ask(["right", []]) == [2 * BLOCKS, 2 * BLOCKS]


def test_a_dead_gpu_costs_only_its_own_tier(daemon: Daemon, worker: Elsewhere) -> None:
    """While one GPU's process is killed again and again every round on the other goes well, and pages of both stay; the log names the one that died."""
    for seed, tier in ((4, FIRST), (5, SECOND)):
        assert worker.ask(["put", [seed, BLOCKS, "", tier]]) == BLOCKS
        assert worker.ask(["lease", [seed, BLOCKS, tier]]) == BLOCKS
    living = gpu_process(daemon, ORDINALS[FIRST])
    for turn in range(3):
        with Elsewhere(serve, daemon.target) as other:
            other.say(["work", [100 * (turn + 1), 10, FIRST]])
            with suppress(psutil.NoSuchProcess):
                gpu_process(daemon, ORDINALS[SECOND]).kill()
            assert other.hear() == [10, 0]
            assert worker.ask(["right", []]) == [2 * BLOCKS, 2 * BLOCKS]
            await_put(other, 10_000 * (turn + 1), SECOND)
    assert living.is_running() and living.pid == gpu_process(daemon, ORDINALS[FIRST]).pid
    assert f"cuda:{ORDINALS[SECOND]}: ended" in daemon.log and f"cuda:{ORDINALS[FIRST]}: ended" not in daemon.log


def test_which_gpu_must_be_said(worker: Elsewhere) -> None:
    """A device without its number, and a number that there is not, are refused with the names that there are."""
    for ask in (["lease", [6, 1]], ["put", [6, 1]]):
        assert worker.ask(ask).startswith(
            "InvalidArgument: tier: device may be any of several GPUs; name one of device.0, device.1"
        )
    for name in ("device.7", "device.x", "nvme.0", "host.1"):
        assert worker.ask(["lease", [6, 1, name]]).startswith("InvalidArgument: tier: ")
    assert "this daemon has device.0, device.1" in worker.ask(["lease", [6, 1, "device.7"]])


def test_a_worker_may_see_one_gpu_alone(daemon: Daemon, worker: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees one of the GPUs works on its tier; on the other it is told so before anything is taken for it."""
    assert worker.ask(["put", [7, BLOCKS, "", FIRST]]) == BLOCKS
    monkeypatch.setenv("TIERD_FAKE_CUDA_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    with Elsewhere(serve, daemon.target) as half_blind:
        assert half_blind.ask(["lease", [7, BLOCKS, SECOND]]) == BLOCKS
        assert half_blind.ask(["right", []]) == [BLOCKS, BLOCKS]
        told = half_blind.ask(["lease", [7, BLOCKS, FIRST]])
        assert told.startswith("Unsupported: ") and f"number {ORDINALS[FIRST]} there" in told


def test_errors_name_the_gpu() -> None:
    """A GPU that is not there is told by its number, and keeps the daemon from starting."""
    daemon = Daemon(TWO.replace("ordinal = 1", "ordinal = 99"))
    with pytest.raises(Unavailable, match="cuda:99.*no GPU of this number"), daemon:
        pass


def attending(talk: Talk, target: str, *, gpu: int, tier: str) -> None:
    """A worker on this GPU that answers the same prompt as often as it is told."""
    model = random_model(Backend("numpy", "float32", f"cuda:{gpu}"))
    with Client(target) as client:
        shape, options = page_shape(model, kv_dtype="float16"), TierdOptions(tier=tier, reserve_pages=4)
        source = TierdPages(client, model, name="random", options=options, shape=shape)
        engine = Engine(model, source, options=OPTIONS)
        while talk.hear() == "answer":
            report = engine.generate([Request(PROMPT, 8)])[0]
            talk.say([report.tokens, report.reused_tokens, dict(source.faults)])
        engine.close()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPUs, of which emulated ones know nothing."""
    try:
        use_fatbins(monkeypatch)
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")
    monkeypatch.delenv("TIERD_KERNELS", raising=False)


def test_two_workers_on_two_gpus_answer_one_prompt(kernels: None, daemon: Daemon) -> None:
    """What another worker has committed on another GPU is brought to one's own, where a block is found in the midst of an answer too."""
    with (
        Elsewhere(attending, daemon.target, gpu=1, tier=FIRST) as first,
        Elsewhere(attending, daemon.target, gpu=0, tier=SECOND) as second,
    ):
        tokens, reused, faults = first.ask("answer")
        assert (reused, faults) == (0, {})
        for _ in range(2):
            again, reused, faults = second.ask("answer")
            assert again == tokens and reused > 0 and faults == {}


def refused(talk: Talk, target: str) -> None:
    """A worker that does not say in which GPU's memory its pages are to lie; what it is told."""
    model = random_model(Backend("numpy", "float32", "cuda:0"))
    with Client(target) as client, pytest.raises(ConfigError) as raised:
        TierdPages(client, model, name="random", shape=page_shape(model, kv_dtype="float16"))
    talk.hear()
    talk.say(str(raised.value))


def test_a_worker_must_say_which_gpus_memory(kernels: None, daemon: Daemon) -> None:
    """Where the daemon has memory of several GPUs, a worker that names no tier is told so, and does not just find nothing."""
    with Elsewhere(refused, daemon.target) as worker:
        assert "(device.0, device.1); name one" in worker.ask()
