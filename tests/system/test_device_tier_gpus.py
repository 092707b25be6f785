"""Several GPUs in one daemon: each has a tier, a process, slabs and accounts, and workers name theirs."""

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
"""The first tier has the second GPU, so that mixed-up numbers show."""
FIRST, SECOND = "device.0", "device.1"
ORDINALS = {FIRST: 1, SECOND: 0}
BLOCKS = 6


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs for every later child process."""
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
    """Each GPU has its own process, slabs and counts; a worker maps slabs of both and reads both in place."""
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
    """Blocks of one GPU reach another through the host, bit by bit; both hold them then."""
    assert worker.ask(["put", [3, BLOCKS, "", FIRST]]) == BLOCKS
    assert worker.ask(["lease", [3, BLOCKS, SECOND]]) == BLOCKS
    assert worker.ask(["lease", [3, BLOCKS, FIRST]]) == BLOCKS
    assert worker.ask(["places", []]) == [[tier, ORDINALS[tier]] for tier in (SECOND, FIRST) for _ in range(BLOCKS)]
    assert worker.ask(["right", []]) == [2 * BLOCKS, 2 * BLOCKS]


def test_a_dead_gpu_costs_only_its_own_tier(daemon: Daemon, worker: Elsewhere) -> None:
    """Repeated deaths of one GPU process cost no round or page of the other GPU; the log names the
    dead one."""
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
    """A device without its number, or an absent number, is refused with the names that exist."""
    for ask in (["lease", [6, 1]], ["put", [6, 1]]):
        assert worker.ask(ask).startswith(
            "InvalidArgument: tier: device may be any of several GPUs; name one of device.0, device.1"
        )
    for name in ("device.7", "device.x", "nvme.0", "host.1"):
        assert worker.ask(["lease", [6, 1, name]]).startswith("InvalidArgument: tier: ")
    assert "this daemon has device.0, device.1" in worker.ask(["lease", [6, 1, "device.7"]])


def test_a_worker_may_see_one_gpu_alone(daemon: Daemon, worker: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees one GPU works on its tier, and is refused on the other before it holds a page."""
    assert worker.ask(["put", [7, BLOCKS, "", FIRST]]) == BLOCKS
    monkeypatch.setenv("TIERD_FAKE_CUDA_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    with Elsewhere(serve, daemon.target) as half_blind:
        assert half_blind.ask(["lease", [7, BLOCKS, SECOND]]) == BLOCKS
        assert half_blind.ask(["right", []]) == [BLOCKS, BLOCKS]
        told = half_blind.ask(["lease", [7, BLOCKS, FIRST]])
        assert told.startswith("Unsupported: ") and f"number {ORDINALS[FIRST]} there" in told


def test_errors_name_the_gpu() -> None:
    """An absent GPU stops the daemon's start, and the error has its number."""
    daemon = Daemon(TWO.replace("ordinal = 1", "ordinal = 99"))
    with pytest.raises(Unavailable, match="cuda:99.*no GPU of this number"), daemon:
        pass


def attending(talk: Talk, target: str, *, gpu: int, tier: str) -> None:
    """A worker on this GPU that answers the same prompt on every request."""
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
    """Kernels for the GPUs; emulated GPUs cannot run them."""
    try:
        use_fatbins(monkeypatch)
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")
    monkeypatch.delenv("TIERD_KERNELS", raising=False)


def test_two_workers_on_two_gpus_answer_one_prompt(kernels: None, daemon: Daemon) -> None:
    """A worker's GPU gets the blocks of another GPU's worker, even in the middle of an answer."""
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
    """A worker that names no tier; says its error."""
    model = random_model(Backend("numpy", "float32", "cuda:0"))
    with Client(target) as client, pytest.raises(ConfigError) as raised:
        TierdPages(client, model, name="random", shape=page_shape(model, kv_dtype="float16"))
    talk.hear()
    talk.say(str(raised.value))


def test_a_worker_must_say_which_gpus_memory(kernels: None, daemon: Daemon) -> None:
    """With several GPUs a worker that names no tier gets an error, not silent misses."""
    with Elsewhere(refused, daemon.target) as worker:
        assert "(device.0, device.1); name one" in worker.ask()
