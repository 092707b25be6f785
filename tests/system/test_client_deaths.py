"""Hundreds of killed clients: the daemon notices each death at once, frees all holds and loses
nothing."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.depth import count, percentile, report
from tests.still import stand_still
from tests.system.blocks import BlockClient, await_emptied, await_true, connected
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.nursery import Nursery, Ward
from tests.system.sdk import HOST_BYTES, MIB, SMALL, await_nothing_held, churn, held, put, right
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.client import Client
from tierd.testing import chain
from tierd.testing.faults import Faults
from tierd.tiers.arena import holds

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """\
[server]
shutdown_deadline = "2 s"

[[host]]
capacity = "64 MiB"
segment = "4 MiB"

[[nvme]]
capacity = "256 MiB"
segment = "8 MiB"
"""
HELD = 16
"""Blocks that each client leases, and as many that it reserves."""
SHARED = 7
"""The chain that all clients lease."""
NOTICED = "cache.end.before_return"
"""The fault point of every process's end, before the daemon frees any of its holds."""
WAYS = ("plain", "forked", "stopped", "stopped and forked")
IDLE_S, LOADED_S, BACK_S = 0.020, 0.100, 1.0
"""Promised limits at the 99th percentile. The tests assert ten times these."""
WORKERS_S = 60.0
"""Ten times the workers' start time on a busy machine."""
FOREIGN = 0xEE
"""The byte that the other tenant stores."""
SEED = int(os.environ.get("DEATHS_SEED", "1"))


@dataclass
class Times:
    """Seconds since SIGKILL. noticed: until the daemon noticed; back: until it had freed all holds."""

    noticed: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)

    def tell(self, what: str, *, limit_s: float) -> None:
        """Reports the times and asserts ten times the limits."""
        noticed, back = percentile(self.noticed, 0.99), percentile(self.back, 0.99)
        report(
            f"client deaths, {what}",
            seed=SEED,
            deaths=len(self.noticed),
            noticed_p50_ms=round(1000 * percentile(self.noticed, 0.5), 1),
            noticed_p99_ms=round(1000 * noticed, 1),
            back_p50_ms=round(1000 * percentile(self.back, 0.5), 1),
            back_p99_ms=round(1000 * back, 1),
        )
        assert noticed < 10 * limit_s and back < 10 * BACK_S


@contextmanager
def load(daemon: Daemon, directory: Path) -> Iterator[None]:
    """Runs two workers that put and get without pause and check every byte."""
    logs = [directory / f"load-{i}.log" for i in range(2)]
    command = [sys.executable, "-m", "tests.system.crash_load", daemon.target]
    workers = [
        subprocess.Popen([*command, str(i), str(log)], cwd=ROOT, stdin=subprocess.PIPE) for i, log in enumerate(logs)
    ]
    try:
        deadline = time.monotonic() + WORKERS_S
        while not all(log.exists() and log.stat().st_size > 0 for log in logs):
            assert time.monotonic() < deadline, "the workers did not begin"
            time.sleep(0.01)
        yield
        assert [worker.poll() for worker in workers] == [None, None]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            assert worker.stdin
            worker.stdin.close()
    said = "".join(log.read_text() for log in logs)
    assert '"wrong"' not in said and '"fault"' not in said, said[-4000:]


def kept(daemon: Daemon) -> tuple[int, int]:
    """Sessions and pages in the session table's file, independent of the daemon's replies."""
    (path,) = daemon.arena.rglob("sessions.tbl")
    words = np.fromfile(path, dtype="<u8")
    rows_at = holds._ROWS_AT // 8
    records = words[4096 // 8 : rows_at].reshape(-1, holds.HOLDER.itemsize // 8)
    rows = words[rows_at:]
    rows = rows[: len(rows) // 6 * 6].reshape(-1, 6)
    return int(np.count_nonzero(records[:, -1])), int(np.count_nonzero(rows[:, -1]))


def in_books(client: BlockClient) -> tuple[int, ...]:
    """Counts that a death must not change: leases, reservations, pinned, reserved, retiring pages,
    used bytes."""
    status, host = client.status(), client.tiers()["host.0"]
    pages = (host.pages_pinned, host.pages_reserved, host.pages_retiring)
    return (status.leases, status.reservations, *pages, host.used_bytes)


def session_is_there(client: BlockClient, ward: Ward) -> bool:
    """Whether the daemon still knows the session; it frees the holds in the same step."""
    return ward.session in [s.id for s in client.call(client.admin.Sessions, apb.SessionsRequest()).sessions]


def kill(ward: Ward, faults: Faults, client: BlockClient, times: Times) -> None:
    """Kills one client and times it."""
    hits = faults.hits()[NOTICED]
    begun = time.monotonic()
    ward.kill()
    assert faults.await_hits(NOTICED, hits + 1), "its end was not noticed"
    times.noticed.append(time.monotonic() - begun)
    await_true(lambda: not session_is_there(client, ward), "the dead client's session")
    times.back.append(time.monotonic() - begun)


@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_deaths(tmp_path: Path) -> None:
    """After SIGKILL of a client in any state, idle or under load, the daemon frees all its holds at once."""
    deaths, chance, numbers = count(test=12, nightly=300, weekly=2000), random.Random(SEED), itertools.count(10_000)
    with Daemon(CONFIG, faults=True) as daemon, daemon.faults() as faults, Nursery(daemon.target) as nursery:
        faults.arm(NOTICED, "count")
        with connected(daemon) as client:
            namespace, names = client.open_namespace(), chain(SHARED, HELD)
            assert client.put(namespace, names) == HELD
            shared = client.acquire(namespace, names)  # so that no load evicts the shared blocks
            assert len(shared.pages) == HELD
            before, rows = in_books(client), kept(daemon)

            def one(turn: int, times: Times) -> None:
                way = WAYS[turn % len(WAYS)]
                reserved = next(numbers)
                ward = nursery.bear(leased=SHARED, reserved=reserved, count=HELD, forks="forked" in way)
                assert ward.pages == 2 * HELD
                if "stopped" in way:
                    ward.stop()
                kill(ward, faults, client, times)
                if chance.random() < 0.5:
                    ward.end_child()

            idle, loaded = Times(), Times()
            for turn in range(deaths // 2):
                one(turn, idle)
                await_true(lambda: (in_books(client), kept(daemon)) == (before, rows), "the books as they were")
            idle.tell("idle", limit_s=IDLE_S)
            with load(daemon, tmp_path):
                for turn in range(deaths // 2, deaths):
                    one(turn, loaded)
            loaded.tell("under load", limit_s=LOADED_S)
            await_true(
                lambda: in_books(client)[:5] == before[:5],
                "nothing held after the load",
            )
            await_true(lambda: kept(daemon) == rows, "the session table as it was")
            client.call(client.cache.Release, pb.ReleaseRequest(leases=[shared.lease]))
            await_emptied(client)
        assert "Traceback" not in daemon.log, daemon.log[-4000:]


# -- clients that are not dead


def reader(talk: Talk, target: str) -> None:
    """Keeps views throughout; on request it says how many are right."""
    client = Client(target)
    namespace = client.open_namespace(SMALL)
    assert put(client, namespace, SHARED, HELD)
    views = client.get(namespace, chain(SHARED, HELD)).views
    talk.say(len(views))
    while True:
        talk.hear()
        talk.say(right(views, SHARED))


@pytest.mark.timeout(600)
def test_stopped_reader() -> None:
    """A stopped client's views keep their bytes through churn and through killed and stopped daemons."""
    lives = count(test=2, nightly=10, weekly=50)
    with Daemon(CONFIG) as daemon, Elsewhere(reader, daemon.target) as other:
        assert other.hear() == HELD
        stand_still(other.pid)
        for life in range(lives):
            daemon.kill() if life % 2 else daemon.stop()
            daemon.start()
            with Client(daemon.target) as client:
                assert churn(client, seed=100 + life, total=2 * HOST_BYTES) > 0
            # Transfers after the churn pin pages for a moment, too.
            await_true(lambda: held(daemon)[2] == HELD, "what the stopped client holds, and nothing else")
        os.kill(other.pid, signal.SIGCONT)
        assert other.ask() == HELD
        other.kill()
        await_nothing_held(daemon, "the reader's end")
        report("stopped reader", lives=lives, views=HELD, wrong=0)


def writer(talk: Talk, target: str, *, credential_file: str) -> None:
    """Stores blocks for other clients of its tenant."""
    client = Client(target, credential_file=credential_file)
    talk.say(bool(put(client, client.open_namespace(SMALL), SHARED, HELD)))
    talk.hear()


def bereaved(talk: Talk, target: str, *, credential_file: str) -> None:
    """Maps another process's blocks. Its forked child keeps mappings and socket, and counts foreign bytes."""
    talk.hear()
    client = Client(target, credential_file=credential_file)
    views = client.get(client.open_namespace(SMALL), chain(SHARED, HELD)).views
    if not ctypes.PyDLL(None).fork():
        os.read(0, 100)
        talk.say(sum(bool((np.asarray(view) == FOREIGN).all()) for view in views))
        os._exit(0)
    talk.say(len(views))
    signal.pause()


@pytest.mark.timeout(120)
def test_orphan_that_maps(tmp_path: Path) -> None:
    """A fork that outlives its parent never sees another tenant's later blocks in its mappings."""
    secrets = {tenant: tenant * 32 for tenant in "ab"}
    for tenant, secret in secrets.items():
        (tmp_path / tenant).write_text(secret)
    (tmp_path / "all").write_text("".join(f"{tenant} {secret}\n" for tenant, secret in secrets.items()))
    config = f'{CONFIG}[identity]\ncredential_file = "{tmp_path}/all"\n'
    (tmp_path / "all").chmod(0o600)
    ours = {"credential_file": str(tmp_path / "a")}
    with (
        Daemon(config) as daemon,
        Elsewhere(writer, daemon.target, **ours) as first,
        Elsewhere(bereaved, daemon.target, **ours) as other,
    ):
        assert first.hear()
        assert other.ask() == HELD
        first.kill()
        other.kill()
        await_nothing_held(daemon, "the parent")
        with Client(daemon.target, credential_file=str(tmp_path / "b")) as stranger:
            assert churn(stranger, seed=9, total=4 * 64 * MIB, byte=FOREIGN) > 0
        assert other.ask() == 0


def test_a_call_that_ends_after_its_session() -> None:
    """A call whose session ends while the daemon stores its namespace fails with SessionLost."""
    point = "instance.namespaces.before_replace"
    request = pb.OpenNamespaceRequest(model="late", tokens_per_block=16, block_bytes=4096)
    with (
        Daemon(CONFIG, faults=True) as daemon,
        daemon.faults() as faults,
        ThreadPoolExecutor() as pool,
        BlockClient(daemon.target) as client,
    ):
        faults.arm(point, "delay:1x1")
        lost = pool.submit(client.error_of, client.cache.OpenNamespace, request)
        assert faults.await_hits(point)
        client.socket.close()
        assert lost.result() == "SessionLost"
