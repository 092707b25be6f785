"""A daemon with a GPU tier dies at random moments and fault points, its successor during recovery.

Durable chains stay, no page is ever wrong, and workers with mapped slabs live on. Device memory is
freed with its last descriptor and mapping: the daemon's at its death, a worker's at its unmap.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.depth import count, report
from tests.system.blocks import await_true
from tests.system.device_driver import fake_only, use_driver
from tests.system.device_worker import DEVICE, SPEC, blocks_of, gpu_process, serve
from tests.system.elsewhere import Elsewhere
from tests.system.warm import Daemon, WarmDaemon
from tierd.client import Client
from tierd.failpoint import POINTS
from tierd.testing import chain, is_content
from tierd.tiers.arena import writers

CONFIG = (
    f'[server]\nshutdown_deadline = "5 s"\n{DEVICE}'
    '[[host]]\ncapacity = "32 MiB"\nsegment = "4 MiB"\n[[nvme]]\ncapacity = "512 MiB"\nsegment = "8 MiB"\n'
)
AT_START = ("cuda.open.before_gpu", "cuda.slab.before_spare")
"""Every start passes these."""
AFTER_A_GPU_PROCESS = ("cuda.probe.before_gpu",)
"""Passed after a GPU process's death."""
AFTER_A_CHANGE_OF_HANDS = ("cuda.slab.before_drop",)
"""Passed when a slab that one worker maps writable is to go to another."""
OFTEN = ("cache.commit.before_publish", "mover.publish.before_catalogue")
"""Among the others, those that every put passes."""
ON_THE_WAY = [
    *sorted(name for name in POINTS if name.startswith(("cuda.", "mover.device.")) and "direct" not in name),
    *OFTEN,
    "session.map.before_reply",
]
"""Passed by workers that put and read while their device pages are evicted."""
WORKERS = 2
ROUNDS = 300
"""A fault point must be passed within this many rounds."""
STEP = 10_000
"""Between the seeds of two workers, and of two lives."""
RECENT, OLDER = 12, 6
"""Chains that each check reads: the newest, and a sample of the others."""


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU processes and workers use the driver."""
    use_driver(monkeypatch)


class Lives:
    """A daemon that dies again and again under its workers, and the chains that it acknowledged."""

    def __init__(self, daemon: Daemon, workers: list[Elsewhere], *, seed: int) -> None:
        self.daemon, self.workers, self.chance = daemon, workers, random.Random(seed)
        self.durable: list[int] = []
        self.checked = self.deaths = self.in_recovery = 0
        self._seeds = iter(range(STEP, 1 << 40, STEP))

    def die(self, end: Callable[[], None]) -> None:
        """Ends the daemon under load, perhaps its successor too, and checks the next one."""
        gpus = [gpu_process(self.daemon)]
        for worker in self.workers:
            worker.say(["live", [next(self._seeds), ROUNDS]])
        end()
        told = [worker.hear() for worker in self.workers]
        assert self.daemon.await_end() == -9, f"it lives; its workers: {told}"
        self.durable += [seed for each in told for seed in each["durable"]]
        assert not any(each["wrong"] for each in told), told
        self.recover(gpus)

    def kill_soon(self) -> None:
        """Sends SIGKILL at a random moment."""
        time.sleep(self.chance.uniform(0.1, 1.0))
        self.daemon.kill()

    def recover(self, gpus: list[psutil.Process]) -> None:
        """Starts the daemon, perhaps after a killed start, and checks it. gpus: GPU processes of
        the last life."""
        self.deaths += 1
        if self.chance.random() < 0.5:
            self.start_dying(self.chance.choice(AT_START))
            self.in_recovery += 1
        self.daemon.start()
        assert not any(gpu.is_running() and gpu.status() != psutil.STATUS_ZOMBIE for gpu in gpus)
        self.check(self.durable[-RECENT:] + self.chance.sample(self.durable, min(OLDER, len(self.durable))))

    def start_dying(self, point: str) -> None:
        """A start that dies at a point."""
        self.daemon.start(wait=False, failpoints=f"{point}=kill")
        assert self.daemon.await_end() == -9, f"{point} was not passed by a start"

    def check(self, seeds: list[int]) -> None:
        """Workers' pages of dead daemons are unchanged; chains are whole, in host memory and on the device."""
        for worker in self.workers:
            assert worker.ask(["wrong", []]) == 0, "a page changed under a worker that had it"
        with Client(self.daemon.target, timeout_s=30.0) as client:
            space = client.open_namespace(SPEC)
            for seed in seeds:
                names = chain(seed, blocks_of(seed))
                await_true(lambda: client.lookup(space, names).tokens == 16 * len(names), f"chain {seed}, lost")  # noqa: B023
                views = client.get(space, names).views
                assert all(is_content(view, name) for view, name in zip(views, names, strict=False)), seed
                del views
        for seed in seeds[-2:]:
            self.workers[0].ask(["drop_few", []])
            await_true(lambda: self.workers[0].ask(["lease", [seed, blocks_of(seed)]]) == blocks_of(seed), "it there")  # noqa: B023
            assert self.workers[0].ask(["wrong", []]) == 0
        self.checked += sum(map(blocks_of, seeds))

    def report(self, what: str, *, seed: int, begun: float) -> None:
        """Reports the run, even a failed one."""
        report(
            f"daemon with a GPU's tier, {what}",
            seed=seed,
            deaths=self.deaths,
            in_recovery=self.in_recovery,
            chains_durable=len(self.durable),
            blocks_checked=self.checked,
            seconds=round(time.monotonic() - begun),
        )


@contextlib.contextmanager
def lives(what: str, *, seed: int) -> Iterator[Lives]:
    """A daemon and its workers. At the end all durable chains are whole, and the log has no traceback."""
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(WarmDaemon(CONFIG, faults=True))
        workers = [stack.enter_context(Elsewhere(serve, daemon.target)) for _ in range(WORKERS)]
        assert [worker.ask(["wrong", []]) for worker in workers] == [0] * WORKERS, "they are there"
        run = Lives(daemon, workers, seed=seed)
        try:
            yield run
            run.check(run.durable)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{daemon.log[-6000:]}") from error
        finally:
            run.report(what, seed=seed, begun=begun)
        at = daemon.log.find("Traceback")
        assert run.durable and at < 0, f"seed {seed}: {daemon.log[max(0, at - 500) : at + 5000]}"


def die_at(run: Lives, point: str) -> None:
    """A life that ends at the point."""
    if point in AT_START:
        gpus = [gpu_process(run.daemon)]
        run.daemon.kill()
        run.start_dying(point)
        run.recover(gpus)
        return
    with run.daemon.faults() as faults:
        is_often = point.startswith(("cuda.load", "cuda.store", "mover.")) or point in OFTEN
        faults.arm(point, f"kill@{run.chance.randint(1, 4) if is_often else 1}")
    if point in AFTER_A_CHANGE_OF_HANDS:
        with Elsewhere(serve, run.daemon.target) as another:
            run.die(lambda: _take_in_turns(run, another))
        return
    run.die(gpu_process(run.daemon).kill if point in AFTER_A_GPU_PROCESS else lambda: None)


def _take_in_turns(run: Lives, another: Elsewhere) -> None:
    """Slabs go from the workers to another one and back, until the daemon dies."""
    for _ in range(ROUNDS):
        another.ask(["pass_on", [8]])
        if run.daemon.has_ended:
            return


def _seed() -> int:
    return int(os.environ.get("CRASH_SEED", time.time_ns() % 1_000_000))


@pytest.mark.timeout(900)
def test_killed_at_random() -> None:
    """The module's promises hold after SIGKILL of the daemon at random moments under load."""
    seed = _seed()
    with lives("SIGKILL at random", seed=seed) as run:
        while run.deaths < count(test=2, nightly=4, weekly=60) or not run.durable:
            assert run.deaths < count(test=20, nightly=20, weekly=60), "no chain was durable before a death"
            run.die(run.kill_soon)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_death_at_each_fault_point() -> None:
    """The module's promises hold after a death at every fault point of the tier."""
    seed = _seed()
    with lives("death at each fault point", seed=seed) as run:
        points = ON_THE_WAY * count(nightly=1, weekly=5)
        run.chance.shuffle(points)
        for point in points:
            die_at(run, point)


@fake_only("its device memory has inodes")
def test_device_memory_goes_with_its_last_descriptor_and_mapping() -> None:
    """A killed daemon's slabs stay unchanged for a worker's pages, and are freed once it unmaps them."""
    with WarmDaemon(CONFIG) as daemon, Elsewhere(serve, daemon.target) as worker:
        assert worker.ask(["put", [1, 4]]) == 4 and worker.ask(["lease", [1, 4]]) == 4
        former = set(worker.ask(["slabs", []]))
        assert former
        daemon.restart()
        for process in (psutil.Process(daemon.pid), gpu_process(daemon)):
            assert not former & slabs_of(process.pid)
        assert worker.ask(["put", [2, 4]]) == 4
        assert former & set(worker.ask(["slabs", []])) and worker.ask(["right", []]) == [4, 4]
        worker.ask(["drop", []])
        assert worker.ask(["put", [3, 4]]) == 4 and worker.ask(["lease", [3, 4]]) == 4
        await_true(
            lambda: maps_anew(worker) and not former & set(worker.ask(["slabs", []])), "the former slabs unmapped"
        )


def test_the_next_daemon_knows_who_may_still_write() -> None:
    """Before a GPU process writes host memory, its pid is recorded there, so the next daemon waits
    for its end."""
    with WarmDaemon(CONFIG) as daemon, Elsewhere(serve, daemon.target) as worker:
        assert not list(daemon.arena.rglob(writers.NAME))
        assert worker.ask(["put", [1, 4, "durable"]]) == 4
        (path,) = daemon.arena.rglob(writers.NAME)
        assert path.read_text().split()[0] == str(gpu_process(daemon).pid) and path.parent.name == "host.0"


def maps_anew(worker: Elsewhere) -> bool:
    """Maps another segment; the client unmaps former ones at that time."""
    return bool(worker.ask(["reserve", [8]]))


def slabs_of(pid: int) -> set[int]:
    """Inodes of the device memory that a process has open."""
    folder, found = f"/proc/{pid}/fd", set()
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if "tierd-fake-gpu" in os.readlink(f"{folder}/{name}"):
                found.add(os.stat(f"{folder}/{name}").st_ino)
    return found
