"""A real `tierd serve` in a process of its own, for tests and for the demo.

Purpose: start it, know when it serves, kill it, start it again on the same directories. Non-purpose: faking any part of it.
Invariants: readiness is what the daemon says over the supervisor's socket, not a guess; only the process that was started here is
ever signalled; nothing outlives the context manager, the arena included.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tierd import failpoint
from tierd.errors import Unavailable
from tierd.testing.faults import Faults

READY_TIMEOUT_S = 60.0
STALLED = "event loop not turning"
"""What the daemon's log says then."""
STOP_TIMEOUT_S = 30.0

SMALL = """\
[server]
shutdown_deadline = "5 s"

[[host]]
capacity = "32 MiB"
segment = "2 MiB"

[[nvme]]
capacity = "64 MiB"
segment = "4 MiB"
"""
"""A configuration that starts in no time."""


class Process(Protocol):
    """What a Daemon needs of subprocess.Popen."""

    @property
    def pid(self) -> int:
        """Its own until it has been waited for."""
        ...

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal. Raises TimeoutExpired."""
        ...

    def send_signal(self, sig: int) -> None:
        """Nothing if it has been waited for."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...


class Daemon:
    """`with Daemon() as daemon: Client(daemon.target)`. A daemon whose event loop stood still fails the test, unless at a fault point.

    config: TOML; "{root}" in it becomes the daemon's directory. root: where runtime, state and arena go (None: a temporary
    directory, removed in the end). env: added to the environment. faults: it serves a socket on which its fault points can be armed.
    """

    def __init__(
        self,
        config: str = SMALL,
        *,
        root: Path | None = None,
        env: dict[str, str] | None = None,
        args: tuple[str, ...] = (),
        faults: bool = False,
    ) -> None:
        self._own_root = root is None
        self.root = Path(tempfile.mkdtemp(prefix="tierd-")) if root is None else root
        self._arena = Path(tempfile.mkdtemp(prefix="tierd-test-", dir=_shared_memory()))
        self._config = config
        self._args = args
        self._env = (
            os.environ | {"TIERD_RUNTIME_DIR": self.target, "TIERD_STATE_DIR": str(self.root / "state")} | (env or {})
        )
        if faults:
            self._env["TIERD_FAILPOINT_SOCKET"] = str(self.root / "faults.sock")
        self._process: Process | None = None

    @property
    def target(self) -> str:
        """What a client connects to."""
        return str(self.root / "run")

    @property
    def pid(self) -> int:
        """Of the running daemon."""
        assert self._process is not None, "the daemon was not started"
        return self._process.pid

    @property
    def arena(self) -> Path:
        """Directory below which its memory lies."""
        return self._arena

    @property
    def log(self) -> str:
        """What the daemon has written so far, over all its lives."""
        path = self.root / "tierd.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def faults(self) -> Faults:
        """A connection to the fault points of the running daemon; it was made with `faults=True`."""
        return Faults(self._env["TIERD_FAILPOINT_SOCKET"])

    def configure(self, config: str) -> None:
        """For the next life."""
        self._config = config

    def start(self, *, wait: bool = True, failpoints: str = "") -> Daemon:
        """Starts a life and waits until it serves. failpoints: armed from the first line on, as TIERD_FAILPOINTS.

        Raises Unavailable with the log if it ends or takes too long.
        """
        (self.root / "tierd.toml").write_text(self._with_arena(self._config).replace("{root}", str(self.root)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, open(self.root / "tierd.log", "ab") as log:
            address = f"\0tierd-test-{os.getpid()}-{time.monotonic_ns()}"
            notify.bind(address)
            serve = ["serve", "--config", str(self.root / "tierd.toml"), *self._args]
            env = self._env | {"NOTIFY_SOCKET": "@" + address[1:], "TIERD_FAILPOINTS": failpoints}
            self._process = self._spawn(serve, env=env, log=log.fileno())
            if wait:
                self._await_ready(notify)
        return self

    def kill(self) -> None:
        """SIGKILL, and gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def await_end(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits until it has ended, whatever ends it; the exit status, negative for a signal. Raises TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process is None or self._process.poll() is not None

    def terminate(self) -> None:
        """SIGTERM, not waited for."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM; gives the exit status."""
        self.terminate()
        return self.await_end()

    def wait(self) -> int:
        """Waits for a daemon that ends by itself; gives the exit status."""
        assert self._process is not None
        return self._process.wait(STOP_TIMEOUT_S)

    def restart(self) -> Daemon:
        """Kills it and starts it again."""
        self.kill()
        return self.start()

    def __enter__(self) -> Self:
        try:
            if self._process is None or self._process.poll() is not None:
                self.start()
        except BaseException:
            self.__exit__(None, None, None)  # a daemon that was too slow to be ready is running still
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
            if self._process.poll() is None:
                self.kill()
        told = self.log
        stalled = STALLED in told and failpoint.__file__ not in told
        shutil.rmtree(self._arena, ignore_errors=True)
        if self._own_root:
            shutil.rmtree(self.root, ignore_errors=True)
        if stalled and kind is None:
            raise AssertionError(f"the daemon's {STALLED}:\n{told[told.index(STALLED) - 200 :][:8000]}")

    def _spawn(self, arguments: Sequence[str], *, env: Mapping[str, str], log: int) -> Process:
        """`tierd` with these arguments, its output to the descriptor."""
        command = [sys.executable, "-m", "tierd.cli.daemon", *arguments]
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def _with_arena(self, config: str) -> str:
        """Gives each tier of memory without an arena_dir one below this daemon's own, so that nothing is left behind."""
        for table in ("[[host]]", "[[device]]"):
            first, *rest = config.split(table)
            parts = (
                part if "arena_dir" in part.split("\n[")[0] else f'\narena_dir = "{self._arena}"{part}' for part in rest
            )
            config = table.join([first, *parts])
        return config

    def _await_ready(self, notify: socket.socket) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        pidfd = os.pidfd_open(self._process.pid)
        try:
            while (left := deadline - time.monotonic()) > 0:
                ready, _, _ = select.select([notify.fileno(), pidfd], [], [], left)
                if notify.fileno() in ready and b"READY=1" in notify.recv(4096):
                    return
                if pidfd in ready:
                    break
        finally:
            os.close(pidfd)
        status = self._process.poll()
        raise Unavailable(f"tierd serve: not ready (exit status {status}); its log:\n{self.log[-4000:]}")


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
