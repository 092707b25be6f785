"""Power failures under a real daemon: durable blocks survive, and all others are right or a miss.

The daemon's state and store are on their own ext4 file system, on a loop device. EXT4_IOC_SHUTDOWN
without a journal flush simulates a power failure: unsynced data is lost. The test then kills the
daemon, wipes its memory and remounts. It needs root, loop devices and mkfs.ext4; POWER_SEED=n sets
the seed.

An acknowledgement counts only before the failure begins. A sync during the failure may return 0
(the aborted journal reports its transaction as done) although no data reached the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.depth import count, percentile, report
from tests.system.blocks import SOON_S
from tests.system.crash_load import TOKENS, Chain, chain_of, open_all
from tests.system.warm import WarmDaemon
from tierd.client import Client
from tierd.client.values import GetResult, OpenedNamespace
from tierd.errors import TierdError
from tierd.testing import content_of, is_content

EXT4_IOC_SHUTDOWN, NOLOGFLUSH = 0x8004587D, 2
IMAGE_BYTES = 640 << 20
FAILURES_PER_DISK = 25
THREADS = 3
CHAINS_PER_LIFE = 8
"""Chains of each thread at most, so that they fit on a disk."""
MOST_ACKNOWLEDGED = 10
"""In each life, the power fails soon after at most this many chains were acknowledged."""
RECENT, SAMPLED = 60, 20
"""After each failure the test checks the newest chains and a sample of older ones; at the end all."""
TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


def config(direct: str) -> str:
    """A host tier too small for all blocks, and a store that never has to evict."""
    return f"""\
[server]
shutdown_deadline = "5 s"

[[host]]
capacity = "32 MiB"
segment = "4 MiB"

[[nvme]]
capacity = "512 MiB"
segment = "8 MiB"
direct = "{direct}"
"""


class LoopDisk:
    """An ext4 file system on a loop device, mounted at `path`; removed with the context in any case."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "disk"
        self._image = directory / "disk.img"
        self._stack = contextlib.ExitStack()
        self._device = ""

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True)
        with open(self._image, "wb") as image:
            image.truncate(IMAGE_BYTES)
        self._stack.callback(self._image.unlink)
        with self._stack:
            run("mkfs.ext4", "-q", "-F", str(self._image))
            self._device = run("losetup", "--show", "--find", str(self._image)).strip()
            self._stack.callback(run, "losetup", "--detach", self._device)
            self._mount()
            self._stack.callback(self._unmount)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def fail(self) -> None:
        """Cuts the power: no write reaches the disk, and uncommitted journal entries are lost."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NOLOGFLUSH))
        finally:
            os.close(fd)

    def come_back(self) -> None:
        """Restores the power. No process may have a file of the disk open."""
        self._unmount()
        self._mount()

    def _mount(self) -> None:
        run("mount", "-t", "ext4", self._device, str(self.path))

    def _unmount(self) -> None:
        run("umount", str(self.path))


def run(*command: str) -> str:
    """The command's output. Raises CalledProcessError with its stderr."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SOON_S).stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory for disks, if this machine allows loop devices."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(TOOLS)}; uid {os.geteuid()}, missing {missing}")
    try:
        with LoopDisk(tmp_path / "probe") as disk:
            disk.fail()
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no ext4 that can be shut down on a loop device here: {getattr(error, 'stderr', '') or error}")
    return tmp_path


class Machine:
    """A daemon on a disk. durable: chains acknowledged as durable; seen: all chains put."""

    def __init__(self, disk: LoopDisk, direct: str, seed: int) -> None:
        self.daemon = WarmDaemon(config(direct), env={"TIERD_STATE_DIR": str(disk.path / "state")})
        self.durable: dict[int, None] = {}
        self.seen: dict[int, None] = {}
        self.figures: Counter[str] = Counter()
        self._disk, self._chance = disk, random.Random(seed)
        self._next = 1
        self._acknowledged = threading.Semaphore(0)
        self._has_power = False

    def life(self) -> None:
        """Puts chains until the power fails in the middle of some."""
        ends, self._acknowledged, self._has_power = threading.Event(), threading.Semaphore(0), True
        numbers = [
            range(self._next + i * CHAINS_PER_LIFE, self._next + (i + 1) * CHAINS_PER_LIFE) for i in range(THREADS)
        ]
        self._next += THREADS * CHAINS_PER_LIFE
        workers = [threading.Thread(target=self._put, args=(mine, ends)) for mine in numbers]
        for worker in workers:
            worker.start()
        for _ in range(self._chance.randint(1, MOST_ACKNOWLEDGED)):
            if not self._acknowledged.acquire(timeout=SOON_S):
                break
        time.sleep(self._chance.uniform(0.0, 0.05))
        self.lose_power()
        ends.set()
        for worker in workers:
            worker.join(3 * SOON_S)
        assert not any(worker.is_alive() for worker in workers)

    def lose_power(self) -> None:
        """Loses all memory, and all disk writes that were not synced."""
        self._has_power = False
        self._disk.fail()
        self.figures["failures"] += 1
        self.daemon.kill()
        shutil.rmtree(self.daemon.arena)
        self.daemon.arena.mkdir()
        self._disk.come_back()

    def start(self) -> None:
        """Starts the daemon; sometimes the power fails again during the start."""
        while self._chance.random() < 0.2:
            self.daemon.start(wait=False)
            time.sleep(self._chance.uniform(0.0, 0.4))
            self.lose_power()
        self.daemon.start()

    def check(self, *, whole: bool = False) -> None:
        """Asserts that durable chains are complete and other chains have only right bytes."""
        seen = list(self.seen)
        older = [] if whole else self._chance.sample(seen[:-RECENT], min(SAMPLED, len(seen[:-RECENT])))
        with Client(self.daemon.target, name="check", timeout_s=30.0) as client:
            spaces = open_all(client)
            for it in map(chain_of, seen if whole else older + seen[-RECENT:]):
                got = self._get(client, spaces[it.kind], it)
                wrong = [i for i, view in enumerate(got.views) if not is_content(view, it.hashes[i])]
                assert not wrong, f"chain {it.number}: blocks {wrong} have bytes that were never stored"
                assert it.number not in self.durable or got.blocks == len(it.hashes), self._lost(client, it, got.blocks)
                self.figures["blocks_checked"] += got.blocks
                self.figures["unsynced_found"] += got.blocks * (it.number not in self.durable)
                del got

    def _get(self, client: Client, space: OpenedNamespace, it: Chain) -> GetResult:
        """Retries a durable chain that is short, because memory above the store may be full briefly."""
        deadline = time.monotonic() + SOON_S
        while (got := client.get(space, it.hashes)).blocks < len(it.hashes) and it.number in self.durable:
            if client.lookup(space, it.hashes).tokens < len(it.hashes) * TOKENS or time.monotonic() > deadline:
                break
        return got

    def _lost(self, client: Client, it: Chain, blocks: int) -> str:
        held = client.lookup(open_all(client)[it.kind], it.hashes).tokens // TOKENS
        return f"chain {it.number} was durable: {held} of {len(it.hashes)} are there, {blocks} came\n{self.daemon.log[-4000:]}"

    def _put(self, numbers: range, ends: threading.Event) -> None:
        with contextlib.suppress(TierdError), Client(self.daemon.target, name="load", timeout_s=SOON_S) as client:
            spaces = open_all(client)
            for it in map(chain_of, numbers):
                if ends.is_set():
                    return
                self.seen[it.number] = None
                durable = it.number % 4 != 0
                blocks = [content_of(name, it.length) for name in it.hashes]
                is_stored = bool(client.put(spaces[it.kind], it.hashes, blocks, durable=durable))
                if is_stored and durable and self._has_power:
                    self.durable[it.number] = None
                    self.figures["chains_durable"] += 1
                    self._acknowledged.release()


def fail_again_and_again(machine: Machine, failures: int) -> list[float]:
    """Seconds of each cycle of load, failure, restart and check."""
    times_s = list[float]()
    with machine.daemon:
        for _ in range(failures):
            begun = time.monotonic()
            machine.life()
            machine.start()
            machine.check()
            times_s.append(time.monotonic() - begun)
        machine.check(whole=True)
    return times_s


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_power_fails_under_load(place: Path, direct: str) -> None:
    """After each power failure all durable blocks are intact, no byte is wrong, and the daemon serves."""
    failures = count(test=2, nightly=50, weekly=150)
    seed = int(os.environ.get("POWER_SEED", time.time_ns() % 1_000_000))
    print(f"POWER_SEED={seed}")
    figures, times_s = Counter[str](), list[float]()
    for start in range(0, failures, FAILURES_PER_DISK):
        with LoopDisk(place / f"{start}") as disk:
            machine = Machine(disk, direct, seed + start)
            times_s += fail_again_and_again(machine, min(FAILURES_PER_DISK, failures - start))
        figures += machine.figures
        assert machine.durable
    figures.update(lost=0, wrong=0)
    p50_s, p99_s = (round(percentile(times_s, share), 2) for share in (0.5, 0.99))
    report("power failures", direct=direct, seed=seed, **figures, p50_s=p50_s, p99_s=p99_s)
