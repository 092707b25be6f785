"""The first promise: after any crash a get gives committed bytes or a miss, and durable blocks stay."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.depth import count, report
from tests.system.blocks import SOON_S, await_true
from tests.system.crash_load import TOKENS, Chain, chain_of, open_all
from tests.system.warm import WarmDaemon
from tierd.client import Client
from tierd.testing import Daemon, is_content

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 3
KILLS_PER_RUN = 100
RECENT_LIVES = 2
"""Each check after a restart covers every chain of the last lives."""
SAMPLED_OLDER = 8
"""Number of older chains in each check."""


def store_bytes(kills: int) -> int:
    """A store that never evicts: each of six threads fills at most 1/12, as slots are up to 1/3 larger."""
    return 512 + 64 * kills << 20


def config(kills: int) -> str:
    """A host tier under pressure, and a store that never has to evict."""
    return f"""\
[server]
shutdown_deadline = "5 s"

[[host]]
capacity = "64 MiB"
segment = "4 MiB"
high_watermark = 0.8
low_watermark = 0.6

[[nvme]]
capacity = "{store_bytes(kills) >> 20} MiB"
segment = "8 MiB"
"""


class Oracle:
    """The acknowledgements in the workers' logs. The oracle never asks the daemon."""

    def __init__(self, directory: Path) -> None:
        self.logs = [directory / f"worker-{i}.log" for i in range(WORKERS)]
        self.lives: list[dict[int, None]] = [{}]
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._read = dict.fromkeys(self.logs, 0)

    def listen(self) -> None:
        """Reads the logs' new lines. An unfinished line waits for the next time."""
        for path in self.logs:
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[path])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] += len(whole)
            for line in whole.splitlines():
                self._take(json.loads(line))

    def begin_life(self) -> None:
        """Later acknowledgements belong to the next daemon."""
        self.listen()
        self.lives.append({})

    def to_check(self, chance: random.Random) -> list[Chain]:
        """Durable chains to check: all of the newest, and a sample of the others."""
        recent = [n for life in self.lives[-RECENT_LIVES:] for n in life]
        older = [n for life in self.lives[:-RECENT_LIVES] for n in life]
        return [chain_of(n) for n in dict.fromkeys(recent + chance.sample(older, min(SAMPLED_OLDER, len(older))))]

    def everything(self) -> list[Chain]:
        """Every chain that was ever acknowledged as durable."""
        return [chain_of(n) for n in dict.fromkeys(n for life in self.lives for n in life)]

    def count_blocks(self) -> int:
        """Blocks that were ever acknowledged as durable, by the logs so far."""
        self.listen()
        return sum(len(it.hashes) for it in self.everything())

    def _take(self, record: dict[str, object]) -> None:
        if "stored" in record:
            self.counts["stored chains"] += 1
            if record["durable"]:
                self.counts["durable chains"] += 1
                self.lives[-1][int(str(record["stored"]))] = None
        elif "wrong" in record or "fault" in record:
            self.complaints.append(str(record))
        else:
            self.counts.update({key: int(str(value)) for key, value in record.items()})


class Workers:
    """Worker processes on a daemon, until the context ends."""

    def __init__(self, daemon: Daemon, oracle: Oracle, *, put_bytes: int) -> None:
        self._commands = [
            [sys.executable, "-m", "tests.system.crash_load", daemon.target, str(i), str(log), str(put_bytes)]
            for i, log in enumerate(oracle.logs)
        ]
        self._processes = [self._start(command) for command in self._commands]

    def replace(self, i: int) -> None:
        """Kills a worker during its work and starts another."""
        self._end(self._processes[i])
        self._processes[i] = self._start(self._commands[i])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        statuses = [process.poll() for process in self._processes]
        for process in self._processes:
            self._end(process)
        assert error or statuses == [None] * WORKERS, "a worker died of its daemon"

    @staticmethod
    def _start(command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        assert process.stdin
        process.stdin.close()


def check(daemon: Daemon, chains: list[Chain], oracle: Oracle) -> None:
    """Compares every byte of these chains. Lost and wrong blocks become the oracle's complaints."""
    with Client(daemon.target, name="check", timeout_s=30.0) as client:
        spaces = open_all(client)
        for it in chains:
            deadline = time.monotonic() + SOON_S
            while True:
                got = client.get(spaces[it.kind], it.hashes)
                oracle.counts["blocks checked"] += got.blocks
                wrong = [i for i, view in enumerate(got.views) if not is_content(view, it.hashes[i])]
                blocks = got.blocks
                del got
                if wrong:
                    oracle.complaints.append(f"wrong: blocks {wrong} of chain {it.number}")
                if blocks == len(it.hashes):
                    break
                held = client.lookup(spaces[it.kind], it.hashes).tokens // TOKENS
                if held < len(it.hashes) or time.monotonic() > deadline:  # room may be short for a moment
                    oracle.complaints.append(
                        f"lost: chain {it.number} has {held} of {len(it.hashes)} blocks, {blocks} came"
                    )
                    oracle.counts["lost"] += 1
                    break


def kill_and_restart(daemon: Daemon, chance: random.Random, *, start_s: float) -> int:
    """Kills the daemon and some recovering successors, then starts one; the number of killed starts."""
    daemon.kill()
    starts_killed = 0
    while chance.random() < 0.35:
        daemon.start(wait=False)
        time.sleep(chance.uniform(0.4, 1.1) * start_s)
        daemon.kill()
        starts_killed += 1
    daemon.start()
    return starts_killed


def crash(kills: int, *, seed: int, directory: Path, kind: type[Daemon] = Daemon) -> None:
    """A run: `kills` kills under load, with a check after each."""
    chance, oracle, begun = random.Random(seed), Oracle(directory), time.monotonic()
    with kind(config(kills)) as daemon:
        before = time.monotonic()
        daemon.restart()
        start_s, done, starts_killed = time.monotonic() - before, 0, 0
        with Workers(daemon, oracle, put_bytes=store_bytes(kills) // 12) as workers:
            while done < kills:
                time.sleep(chance.uniform(0.05, 0.6))
                if chance.random() < 0.2:
                    workers.replace(chance.randrange(WORKERS))
                    oracle.counts["workers killed"] += 1
                killed = kill_and_restart(daemon, chance, start_s=start_s)
                done, starts_killed = done + 1 + killed, starts_killed + killed
                oracle.begin_life()
                check(daemon, oracle.to_check(chance), oracle)
                assert not oracle.complaints, f"seed {seed}, kill {done}: {oracle.complaints}\n{daemon.log[-6000:]}"
            await_true(lambda: oracle.count_blocks() > kills, "more blocks are durable than there were kills")
        oracle.listen()
        daemon.restart()
        check(daemon, oracle.everything(), oracle)
        blocks = oracle.count_blocks()
        report(
            "daemon SIGKILL under load",
            seed=seed,
            kills=done,
            during_start=starts_killed,
            seconds=round(time.monotonic() - begun),
            blocks_durable=blocks,
            blocks_checked=oracle.counts["blocks checked"],
            lost=oracle.counts["lost"],
            wrong=sum("wrong" in text for text in oracle.complaints),
            workers=dict(oracle.counts),
        )
        assert not oracle.complaints, f"seed {seed}: {oracle.complaints}"
        assert blocks > kills
        assert "Traceback" not in daemon.log, daemon.log


def _seed() -> int:
    return int(os.environ.get("CRASH_SEED", time.time_ns() % 1_000_000))


@pytest.mark.timeout(300)
def test_killed_again_and_again(tmp_path: Path) -> None:
    """After each of ten kills under load the daemon serves, no durable block is lost and no byte is wrong."""
    crash(count(test=10, nightly=20, weekly=20), seed=_seed(), directory=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_hundreds_of_times(tmp_path: Path) -> None:
    """The same holds for hundreds of kills, mostly of daemons that start warm."""
    kills, seed = count(test=20, nightly=300, weekly=1000), _seed()
    for i, start in enumerate(range(0, kills, KILLS_PER_RUN)):
        directory = tmp_path / str(i)
        directory.mkdir()
        kind = WarmDaemon if i else Daemon
        crash(min(KILLS_PER_RUN, kills - start), seed=seed + i, directory=directory, kind=kind)
