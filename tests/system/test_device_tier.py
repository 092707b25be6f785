"""The device tier of kind "cuda" with a real daemon and clients: shared reads, and deaths."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from tests.depth import count, report
from tests.system.blocks import await_true, connected
from tests.system.device_driver import BLIND, fake_only, use_driver
from tests.system.device_worker import CONFIG, SPEC, TOKENS, await_put, evict, gpu_process, serve
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.raw import RawClient
from tests.system.sdk import HOST, await_nothing_held, held
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import BlockStatus, Client, PutGroup
from tierd.errors import Unavailable, Unsupported
from tierd.testing import chain, content_of, is_content

BLOCKS = 6
BY_ITSELF = 3
"""After this many deaths in a row the pause before a start is too long for a test."""


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later child processes use the driver."""
    use_driver(monkeypatch)


@pytest.fixture
def daemon(driver: None) -> Iterator[Daemon]:
    with Daemon(CONFIG) as running:
        yield running


def test_one_writes_and_another_reads_in_place(daemon: Daemon) -> None:
    """A process reads another's pages in place and read-only; its write fails there and changes nothing."""
    with Elsewhere(serve, daemon.target) as writer, Elsewhere(serve, daemon.target) as reader:
        assert writer.ask(["put", [1, BLOCKS]]) == BLOCKS
        for worker in (reader, writer):
            assert worker.ask(["lease", [1, BLOCKS]]) == BLOCKS
            assert worker.ask(["right", []]) == [BLOCKS, BLOCKS]
            assert worker.ask(["marks", []]) == [True] * BLOCKS
        assert "CUDA_ERROR_" in reader.ask(["write_where_it_may_not", []])
        assert writer.ask(["right", []]) == [BLOCKS, BLOCKS]
        writer.ask(["drop", []])
        reader.kill()
        await_nothing_held(daemon, "a reader that is gone")


def test_what_is_less_than_the_best_is_said(daemon: Daemon) -> None:
    """The status has one notice if NVMe blocks go through host memory, and none if reads are direct."""
    with connected(daemon) as client:
        notices, is_direct = client.status().notices, "read directly" in client.tiers()["device.0"].place
    said = [each for each in notices if each.startswith("device.0: ") and "GPUDirect Storage is not used" in each]
    assert len(said) == (0 if is_direct else 1)


def test_down_to_nvme_and_up_again(daemon: Daemon) -> None:
    """A durable device put is on NVMe at its return, and comes back from there and the host bit by bit."""
    with Elsewhere(serve, daemon.target) as worker:
        assert worker.ask(["put", [2, BLOCKS, "durable"]]) == BLOCKS
        for tiers in (["device.0"], ["device.0", "host.0"]):
            for tier in tiers:
                evict(daemon.target, tier)
            assert worker.ask(["lease", [2, BLOCKS]]) == BLOCKS
            assert worker.ask(["right", []]) == [BLOCKS, BLOCKS]
            worker.ask(["drop", []])
        with Client(daemon.target) as client:
            names = chain(2, BLOCKS)
            got = client.get(client.open_namespace(SPEC), names)
            assert [is_content(view, name) for view, name in zip(got.views, names, strict=True)] == [True] * BLOCKS
            del got


def test_a_tier_that_is_full_passes_blocks_on(daemon: Daemon) -> None:
    """Three times the device's capacity can be put: cold blocks move to the host, and no byte is wrong."""
    chains = 3 * (16 << 20) // SPEC.block_bytes // BLOCKS // 2
    with Elsewhere(serve, daemon.target) as worker:
        for seed in range(100, 100 + chains):
            await_true(lambda seed=seed: worker.ask(["put", [seed, BLOCKS]]) == BLOCKS, "room on the device")  # type: ignore[misc]
        for seed in range(100, 100 + chains):
            found = worker.ask(["lease", [seed, BLOCKS]])
            assert worker.ask(["right", []]) == [found, found]
            worker.ask(["drop", []])


def test_scribbled_pages_are_misses(daemon: Daemon) -> None:
    """A page changed after its commit fails the device's checksum before any lease and is a miss."""
    with Elsewhere(serve, daemon.target) as writer, Elsewhere(serve, daemon.target) as reader:
        assert writer.ask(["put", [3, BLOCKS]]) == BLOCKS
        writer.ask(["scribble", []])
        assert reader.ask(["lease", [3, BLOCKS]]) == 0
        assert writer.ask(["put", [3, BLOCKS]]) == BLOCKS, "it can be put again"
        assert reader.ask(["lease", [3, BLOCKS]]) == BLOCKS and reader.ask(["right", []]) == [BLOCKS, BLOCKS]


def test_scribbled_pages_are_not_passed_on(daemon: Daemon) -> None:
    """A demotion of a changed page gives no block to the host."""
    with Elsewhere(serve, daemon.target) as writer:
        assert writer.ask(["put", [4, BLOCKS]]) == BLOCKS
        writer.ask(["scribble", []])
        with Client(daemon.target) as client:
            assert client.get(client.open_namespace(SPEC), chain(4, BLOCKS)).tokens == 0


def test_scribbled_host_pages_are_not_promoted(daemon: Daemon) -> None:
    """A host page changed after its commit fails the checksum on the device and becomes no block there."""
    with Elsewhere(serve, daemon.target) as reader, Client(daemon.target) as client:
        space, names = client.open_namespace(SPEC), chain(12, BLOCKS)
        pages = client.reserve(PutGroup(space, names))
        buffers = pages.buffers()
        for name, page in zip(names, buffers, strict=True):
            np.copyto(page, content_of(name, SPEC.block_bytes))
        address = buffers[2].ctypes.data
        assert pages.commit().statuses.tolist() == [BlockStatus.READY] * BLOCKS
        ctypes.memset(address + SPEC.block_bytes - 1, 0x5A, 1)
        assert reader.ask(["lease", [12, BLOCKS]]) == 2
        assert reader.ask(["right", []]) == [2, 2]


def test_while_nobody_can_sum_unverified_pages_are_misses(daemon: Daemon) -> None:
    """Without a GPU process an unverified page is a miss and no error; it is a hit with the next one."""
    with Elsewhere(serve, daemon.target) as writer, Elsewhere(serve, daemon.target) as reader:
        assert writer.ask(["put", [13, BLOCKS]]) == BLOCKS
        gpu_process(daemon).kill()
        assert reader.ask(["lease", [13, BLOCKS]]) == 0
        await_true(lambda: reader.ask(["lease", [13, BLOCKS]]) == BLOCKS, "a hit again")
        assert reader.ask(["right", []]) == [BLOCKS, BLOCKS]


def test_pages_of_a_killed_worker_come_back(daemon: Daemon) -> None:
    """After SIGKILL of a worker the daemon frees all its reserved and leased pages."""
    with Elsewhere(serve, daemon.target) as worker, Elsewhere(serve, daemon.target) as other:
        assert other.ask(["put", [5, BLOCKS]]) == BLOCKS
        assert worker.ask(["lease", [5, BLOCKS]]) == BLOCKS
        assert worker.ask(["reserve", [3]]) == 3
        assert held(daemon)[1] == 1
        worker.kill()
        await_nothing_held(daemon, "a worker that was killed")
        assert other.ask(["lease", [5, BLOCKS]]) == BLOCKS and other.ask(["right", []]) == [BLOCKS, BLOCKS]


def test_the_gpu_process_dies_under_load(daemon: Daemon) -> None:
    """After each SIGKILL of the GPU process the host tier serves, and no byte is wrong. The device
    returns with its blocks by itself, or by command once the pauses have grown."""
    kills, chance = count(test=3, nightly=12, weekly=60), random.Random(3)
    with (
        Elsewhere(serve, daemon.target) as worker,
        Elsewhere(serve, daemon.target) as reader,
        RawClient(daemon.target) as operator,
    ):
        assert reader.ask(["put", [6, BLOCKS]]) == BLOCKS
        assert reader.ask(["lease", [6, BLOCKS]]) == BLOCKS
        good = []
        for turn in range(kills):
            worker.say(["work", [1000 * (turn + 1), 30]])
            child = gpu_process(daemon)
            time.sleep(chance.uniform(0, 0.2))
            child.kill()
            with Client(daemon.target) as client:
                space, names = client.open_namespace(SPEC), chain(10_000 + turn, 1)
                content = content_of(names[0], SPEC.block_bytes)
                assert client.put(space, names, [content]).stored == 1
                assert np.array_equal(client.get(space, names).views[0], content)
            done, wrong = worker.hear()
            good.append(done)
            assert wrong == 0
            assert reader.ask(["right", []]) == [BLOCKS, BLOCKS]
            if turn >= BY_ITSELF:
                operator.call(operator.admin.Resume, apb.ResumeRequest(tier="device.0"))
            await_put(worker, 2_000_000 + 10_000 * turn)
            assert gpu_process(daemon).pid != child.pid
        reader.ask(["drop", []])
        assert worker.ask(["lease", [6, BLOCKS]]) == BLOCKS and worker.ask(["right", []]) == [BLOCKS, BLOCKS]
        report("device tier, GPU process killed", kills=kills, rounds_of_30=good)
        assert any(good)
    assert "tier out of service" in daemon.log and "tier back in service" in daemon.log


def test_the_daemon_dies(daemon: Daemon) -> None:
    """The daemon's GPU process dies with it; workers keep mapped pages; the next device tier is empty."""
    with Elsewhere(serve, daemon.target) as worker:
        assert worker.ask(["put", [7, BLOCKS]]) == BLOCKS
        assert worker.ask(["lease", [7, BLOCKS]]) == BLOCKS
        child = gpu_process(daemon)
        daemon.restart()
        await_true(lambda: not child.is_running(), "the end of the GPU process")
        assert worker.ask(["right", []]) == [BLOCKS, BLOCKS]
        assert "device memory does not outlive the daemon" in daemon.log
        with Elsewhere(serve, daemon.target) as other:
            assert other.ask(["lease", [7, BLOCKS]]) == 0
            assert other.ask(["put", [7, BLOCKS]]) == BLOCKS
            assert other.ask(["lease", [7, BLOCKS]]) == BLOCKS and other.ask(["right", []]) == [BLOCKS, BLOCKS]
        assert worker.ask(["right", []]) == [BLOCKS, BLOCKS]


def test_what_is_pinned_makes_no_room(daemon: Daemon) -> None:
    """A worker that wants more than its share of the device gets a part and an answer for the rest."""
    with Elsewhere(serve, daemon.target) as worker:
        share = (16 << 20) // SPEC.block_bytes // 2
        assert 0 < worker.ask(["reserve", [2 * share]]) <= share
        assert worker.ask(["put", [8, 2]]) == 0


def see_nothing(talk: Talk, target: str) -> None:
    """Runs in a worker without a GPU: says its errors, the GPU tiers, and its right blocks from the host."""
    with Client(target) as client:
        space, names, told = client.open_namespace(SPEC), chain(9, BLOCKS), list[str]()
        for ask in (
            lambda: client.acquire(space, names, tier="device"),
            lambda: client.reserve(PutGroup.private(space, 1), tier="device"),
        ):
            with pytest.raises(Unsupported) as error:
                ask()
            told.append(str(error.value))
        talk.say([told, client.gpu_tiers])
        talk.hear()
        views = client.get(space, names).views
        talk.say([is_content(view, name) for view, name in zip(views, names, strict=True)])
        talk.hear()


def test_without_cuda_there_is_the_host(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without a driver is refused before it holds a page, and hits the blocks in the host tier."""
    with Elsewhere(serve, daemon.target) as worker:
        assert worker.ask(["put", [9, BLOCKS]]) == BLOCKS
        for name, value in BLIND.items():
            monkeypatch.setenv(name, value)
        with Elsewhere(see_nothing, daemon.target) as blind:
            told, tiers = blind.hear()
            assert ['tier="host"' in each for each in told] == [True, True] and tiers == ["device.0"]
            assert held(daemon) == (0, 0, 0, 0)
            assert blind.ask() == [True] * BLOCKS


class Late:
    """Like a torch event: its work is done at the third query."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self.asked, self._happens = 0, happens

    def query(self) -> bool:
        self.asked += 1
        if self.asked == 3:
            self._happens()
        return self.asked >= 3


def test_commit_and_release_wait_for_the_workers_kernels() -> None:
    """A commit and a release wait for the work given to `after`; the block has a late kernel's bytes."""
    with Daemon(HOST) as daemon, Client(daemon.target) as client:
        space, names = client.open_namespace(SPEC), chain(11, 1)
        pages = client.reserve(PutGroup(space, names))
        page = pages.buffer(0)
        late = Late(lambda: np.copyto(page, content_of(names[0], SPEC.block_bytes)))
        assert pages.after(late).commit().statuses.tolist() == [BlockStatus.READY]
        lease = client.acquire(space, names)
        assert lease.tokens == TOKENS and is_content(lease.view(0), names[0])
        reading = Late(lambda: None)
        lease.after(reading).release()
        assert (late.asked, reading.asked) == (3, 3)
        assert held(daemon) == (0, 0, 0, 0)


def test_descriptors_stay_as_many(daemon: Daemon) -> None:
    """Rounds of put, evict and promotion leak no descriptor in daemon, GPU process or worker."""
    with Elsewhere(serve, daemon.target) as worker, RawClient(daemon.target) as admin:

        def go_round(turn: int) -> None:
            assert worker.ask(["put", [50 + turn, BLOCKS]]) == BLOCKS
            assert worker.ask(["lease", [50, BLOCKS]]) == BLOCKS
            assert worker.ask(["right", []]) == [BLOCKS, BLOCKS]
            worker.ask(["drop", []])
            admin.call(admin.admin.Evict, apb.EvictRequest(tier="device.0"))

        def descriptors() -> list[int]:
            return [psutil.Process(pid).num_fds() for pid in (daemon.pid, gpu_process(daemon).pid, worker.pid)]

        assert worker.ask(["put", [50, BLOCKS, "durable"]]) == BLOCKS
        most = np.max([(go_round(turn), descriptors())[1] for turn in range(1, 9)], axis=0)
        last = np.max([(go_round(turn), descriptors())[1] for turn in range(9, 17)], axis=0)
        report("device tier, descriptors after rounds", daemon=last[0], gpu_process=last[1], worker=last[2])
        assert (last <= most).all()


@pytest.mark.parametrize(
    ("config", "environment", "words"),
    [
        (CONFIG.replace("capacity", "ordinal = 99\ncapacity", 1), {}, "cuda:99.*no GPU of this number"),
        (CONFIG, BLIND, "no NVIDIA driver|the driver sees no GPU"),
        pytest.param(
            CONFIG,
            {"TIERD_FAKE_CUDA_WITHOUT": "vmm"},
            "cuda:0: the driver cannot share memory by descriptors",
            marks=fake_only("it can be without that"),
        ),
        (CONFIG.replace("16 MiB", "1 TiB", 1), {}, "lower it"),
    ],
)
def test_no_start_without_the_gpu(config: str, environment: dict[str, str], words: str) -> None:
    """Without the GPU, driver, feature or memory the daemon does not start, and its error says the remedy."""
    daemon = Daemon(config, env=environment)
    with pytest.raises(Unavailable, match=words), daemon:
        pass
