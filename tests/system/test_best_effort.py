"""Best effort: a worker without a daemon, or between daemons, sees misses and no errors."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.system.blocks import await_true
from tests.system.sdk import HOST, SMALL, await_nothing_held, put, right
from tests.system.tcp import free_port, remote_config
from tests.system.warm import Daemon
from tierd.client import AsyncClient, Client, Group, OpenedNamespace, PutGroup, best_effort
from tierd.testing import chain

COUNT = 4
MISS_S = 0.1
SLACK = 10
"""A machine busy with other tests is slow, not wrong."""
PATIENCE_S = 30.0


def verbs(client: Client, namespace: OpenedNamespace) -> dict[str, Callable[[], Any]]:
    """Every call of a worker, as a function whose result counts its hits."""
    hashes = chain(1, COUNT)
    return {
        "open_namespace": lambda: client.open_namespace(SMALL).id,
        "lookup": lambda: client.lookup(namespace, hashes).tokens,
        "prefetch": lambda: client.prefetch(namespace, hashes),
        "acquire": lambda: len(client.acquire([Group(namespace, hashes)])),
        "get": lambda: client.get(namespace, hashes).tokens,
        "get of tokens": lambda: client.get(namespace, list(range(64))).tokens,
        "put": lambda: put(client, namespace, 1, COUNT).stored,
        "reserve": lambda: int(client.reserve(PutGroup(namespace, hashes)).id),
    }


@contextlib.contextmanager
def _nobody(kind: str, root: Path) -> Iterator[str]:
    """A target without an answering daemon."""
    with contextlib.ExitStack() as stack:
        if kind == "port":
            yield f"127.0.0.1:{free_port()}"
            return
        if kind in ("stale", "hung"):
            for name, type_ in (("session.sock", socket.SOCK_SEQPACKET), ("tierd.sock", socket.SOCK_STREAM)):
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, type_))
                listener.bind(str(root / name))
                if kind == "hung":
                    listener.listen()
                else:
                    listener.close()
        yield str(root / "none" if kind == "nothing" else root)


@pytest.mark.parametrize("kind", ["nothing", "stale", "hung", "port"])
def test_nobody_there(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """Without an answering daemon every call misses within 100 ms, and all misses share one log line."""
    took: dict[str, float] = {}
    with _nobody(kind, tmp_path) as target, Client(target, best_effort=True) as client:
        namespace = OpenedNamespace(SMALL)
        for turn in range(6):
            for name, call in verbs(client, namespace).items():
                if turn % 2 == 0:
                    client._connector._next_try = 0.0  # as if the pause before the next attempt to connect were over
                begun = time.perf_counter()
                assert call() == 0, name
                took[name] = max(took.get(name, 0.0), time.perf_counter() - begun)
    worst = max(took, key=lambda name: took[name])
    print(f"{kind}: the slowest of {6 * len(took)} misses took {took[worst] * 1000:.2f} ms ({worst})")
    assert took[worst] < SLACK * MISS_S, took
    assert len([record for record in caplog.records if record.name == "tierd.client"]) == 1


async def test_nobody_there_async(tmp_path: Path) -> None:
    """The asynchronous client misses as quickly."""
    async with AsyncClient(str(tmp_path / "none"), best_effort=True) as client:
        begun = time.perf_counter()
        namespace = await client.open_namespace(SMALL)
        assert not await client.get(namespace, chain(1, COUNT))
        assert (await client.put(namespace, chain(1, COUNT), [bytes(4096)] * COUNT)).stored == 0
        assert time.perf_counter() - begun < SLACK * MISS_S


def test_import_without_a_daemon(tmp_path: Path) -> None:
    """Without daemon, socket directory or writable home, SDK import and client creation print nothing."""
    program = "from tierd.client import Client; Client(best_effort=True); Client()"
    environ = {"TIERD_TARGET": str(tmp_path / "none"), "HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_one_line_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The client logs one failure a minute; the next line counts the unlogged ones."""
    now = 1000.0
    monkeypatch.setattr(best_effort, "time", SimpleNamespace(monotonic=lambda: now))
    with caplog.at_level(logging.WARNING, "tierd.client"), Client(str(tmp_path / "none"), best_effort=True) as client:
        namespace = client.open_namespace(SMALL)
        for second in range(121):
            now = 1000.0 + second
            client.get(namespace, chain(1, 1))
    lines = [record.getMessage() for record in caplog.records if record.name == "tierd.client"]
    assert len(lines) == 3, lines
    assert all(str(tmp_path) in line and "Unavailable" in line for line in lines)
    assert ["more since" in line for line in lines] == [False, True, True]


def test_a_daemon_appears(tmp_path: Path) -> None:
    """A client made before its daemon uses it once it starts, with its existing namespace."""
    daemon = Daemon(HOST, root=tmp_path)
    with Client(daemon.target, best_effort=True) as client:
        namespace = client.open_namespace(SMALL)
        assert put(client, namespace, 1, COUNT).stored == 0
        with daemon:
            took = await_true(lambda: put(client, namespace, 1, COUNT).stored == COUNT, "the first put")
            print(f"used {took * 1000:.0f} ms after it was ready")
            got = client.get(namespace, chain(1, COUNT))
            assert right(got.views, 1) == COUNT
            del got
            await_nothing_held(daemon, "the views")


class _Worker:
    """Puts and gets in a loop without pauses, and counts hits, misses, wrong bytes and errors."""

    def __init__(self, client: Client) -> None:
        self.hits = self.misses = self.wrong = 0
        self.errors: list[BaseException] = []
        self.slowest_s = 0.0
        self._client = client
        self._is_ending = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for(self, what: str, more: int) -> None:
        """Waits for this many more."""
        with self._changed:
            wanted = getattr(self, what) + more
            assert self._changed.wait_for(lambda: getattr(self, what) >= wanted or self.errors, PATIENCE_S), vars(self)

    def end(self) -> None:
        """Stops the worker."""
        self._is_ending.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        try:
            namespace = self._client.open_namespace(SMALL)
            while not self._is_ending.is_set():
                self._turn(namespace)
        except BaseException as error:
            self.errors.append(error)

    def _turn(self, namespace: OpenedNamespace) -> None:
        begun = time.perf_counter()
        got = self._client.get(namespace, chain(7, COUNT))
        self.slowest_s = max(self.slowest_s, time.perf_counter() - begun)
        wrong = got.blocks - right(got.views, 7)
        if not got:
            put(self._client, namespace, 7, COUNT)
        with self._changed:
            self.hits, self.misses = self.hits + bool(got), self.misses + (not got)
            self.wrong += wrong
            self._changed.notify_all()


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_a_daemon_comes_and_goes(way: str) -> None:
    """A worker sees only hits and misses while its daemon is killed or stopped and started again."""
    with Daemon(HOST) as daemon, Client(daemon.target, best_effort=True) as client:
        worker = _Worker(client)
        try:
            worker.wait_for("hits", 20)
            getattr(daemon, way)()
            worker.wait_for("misses", 20)
            daemon.start()
            worker.wait_for("hits", 20)
        finally:
            worker.end()
        print(f"{worker.hits} hits, {worker.misses} misses, slowest get {worker.slowest_s * 1000:.1f} ms")
        assert (worker.errors, worker.wrong) == ([], 0)
        assert worker.slowest_s < SLACK * MISS_S


def test_wrong_use_is_a_miss(tmp_path: Path) -> None:
    """A reservation of a former daemon fails for a best-effort client, and its next calls hit."""
    with Daemon(HOST) as daemon, Client(daemon.target, best_effort=True) as client:
        namespace = client.open_namespace(SMALL)
        assert put(client, namespace, 1, COUNT)
        pages = client.reserve(PutGroup(namespace, chain(2, 1)))
        pages.buffer(0)[:] = 1
        daemon.restart()
        assert not np.isin(pages.commit().statuses, (1, 3)).any(), "READY or EXISTS"
        await_true(lambda: client.get(namespace, chain(1, COUNT)).blocks == COUNT, "a hit")
        assert client.lookup(namespace, chain(2, 1)).tokens == 0


@pytest.mark.parametrize("timeout_s", [0.001, 0.003, None])
def test_short_timeouts_connect(timeout_s: float | None) -> None:
    """A client with timeouts of milliseconds connects after some calls, and fast calls hit."""
    with Daemon(HOST) as daemon, Client(daemon.target) as writer, Client(daemon.target, best_effort=True) as client:
        assert put(writer, writer.open_namespace(SMALL), 1, COUNT)
        namespace, slowest_s = OpenedNamespace(SMALL), 0.0

        def hits() -> bool:
            nonlocal slowest_s
            begun = time.perf_counter()
            found = client.lookup(namespace, chain(1, COUNT), timeout_s=timeout_s).tokens
            slowest_s = max(slowest_s, time.perf_counter() - begun)
            return found == 16 * COUNT

        await_true(hits, "a hit", within_s=PATIENCE_S)
        assert slowest_s < SLACK * MISS_S


@pytest.mark.parametrize("when", ["between calls", "while it is asked"])
def test_stopped_daemon(when: str) -> None:
    """A stopped daemon costs each call under a second, whatever its timeout, and serves again later."""
    with Daemon(HOST) as daemon, Client(daemon.target, best_effort=True, timeout_s=60) as client:
        namespace = client.open_namespace(SMALL)
        await_true(lambda: put(client, namespace, 1, COUNT).stored == COUNT, "a put", within_s=PATIENCE_S)
        lease = client.acquire(namespace, chain(1, COUNT))
        stopping = threading.Timer(0.0 if when == "between calls" else 0.02, os.kill, (daemon.pid, signal.SIGSTOP))
        stopping.start()
        if when == "between calls":
            stopping.join()
        took: dict[str, float] = {}
        try:
            for turn in range(3):
                for name, call in verbs(client, namespace).items():
                    begun = time.perf_counter()
                    call()
                    took[f"{name} {turn}"] = time.perf_counter() - begun
            begun = time.perf_counter()
            lease.release()
            took["release"] = time.perf_counter() - begun
        finally:
            stopping.join()
            os.kill(daemon.pid, signal.SIGCONT)
        assert max(took.values()) < SLACK * MISS_S, took
        await_true(lambda: client.lookup(namespace, chain(1, COUNT)).tokens == 16 * COUNT, "a hit", within_s=PATIENCE_S)


def test_stopped_daemon_over_tcp(tmp_path: Path) -> None:
    """Over TCP too, a stopped daemon delays neither new nor served clients, and serves both again later."""
    port = free_port()
    place = {"target": f"127.0.0.1:{port}", "credential_file": str(tmp_path / "secret"), "timeout_s": 60}
    with (
        Daemon("nvme = []\n" + remote_config(tmp_path, port)) as daemon,
        Client(**place, best_effort=True) as served,
        Client(**place, best_effort=True) as new,
    ):
        namespace = served.open_namespace(SMALL)
        await_true(lambda: put(served, namespace, 1, COUNT).stored == COUNT, "a put", within_s=PATIENCE_S)
        os.kill(daemon.pid, signal.SIGSTOP)
        took = []
        try:
            for client in (served, new):
                for call in (
                    lambda its=client: its.get(OpenedNamespace(SMALL), chain(1, COUNT)).tokens,
                    lambda its=client: its.lookup(namespace, chain(1, COUNT)).tokens,
                    lambda its=client: put(its, namespace, 2, COUNT).stored,
                ):
                    begun = time.perf_counter()
                    assert call() == 0
                    took.append(time.perf_counter() - begun)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert max(took) < SLACK * MISS_S, took
        for client in (served, new):
            again = OpenedNamespace(SMALL)
            await_true(
                lambda its=client, it=again: its.get(it, chain(1, COUNT)).blocks == COUNT, "a hit", within_s=PATIENCE_S
            )
