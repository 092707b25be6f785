"""A real `tierd serve` in its own process, for tests and for the demo.

It starts the daemon, waits until it serves, kills it, and restarts it on the same directories.
Nothing is faked. Readiness comes from the daemon over the supervisor's socket. Only the process
started here gets signals. The context manager leaves no files or processes, the arena included.
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
"""The daemon's log message for a stalled event loop."""
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
"""A configuration that starts quickly."""


class Process(Protocol):
    """The part of subprocess.Popen that a Daemon uses."""

    @property
    def pid(self) -> int:
        """The process id, valid until `wait` returns."""
        ...

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit status, negative for a signal. Raises TimeoutExpired."""
        ...

    def send_signal(self, sig: int) -> None:
        """Sends a signal. Does nothing after `wait`."""
        ...

    def kill(self) -> None:
        """Sends SIGKILL."""
        ...


class Daemon:
    """`with Daemon() as daemon: Client(daemon.target)`. A stalled event loop fails the test, unless
    a fault point stalled it.

    config: TOML; "{root}" in it becomes the daemon's directory. root: the directory of runtime and
    state; None: a temporary one, removed at the end. env: added to the environment. faults: serve a
    socket that arms fault points.
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
        """The target for clients."""
        return str(self.root / "run")

    @property
    def pid(self) -> int:
        """The process id of the running daemon."""
        assert self._process is not None, "the daemon was not started"
        return self._process.pid

    @property
    def arena(self) -> Path:
        """The directory of its memory."""
        return self._arena

    @property
    def log(self) -> str:
        """The daemon's log over all its runs."""
        path = self.root / "tierd.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def faults(self) -> Faults:
        """A connection to the fault points of the running daemon. Needs `faults=True`."""
        return Faults(self._env["TIERD_FAILPOINT_SOCKET"])

    def configure(self, config: str) -> None:
        """Sets the configuration of the next start."""
        self._config = config

    def start(self, *, wait: bool = True, failpoints: str = "") -> Daemon:
        """Starts the daemon and waits until it serves. Raises Unavailable with the log if it ends
        or takes too long. failpoints: armed from the start, as TIERD_FAILPOINTS."""
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
        """Sends SIGKILL and waits for the end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def await_end(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits for the end. Returns the exit status, negative for a signal. Raises TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process is None or self._process.poll() is not None

    def terminate(self) -> None:
        """Sends SIGTERM without waiting."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Sends SIGTERM. Returns the exit status."""
        self.terminate()
        return self.await_end()

    def wait(self) -> int:
        """Waits for a daemon that ends by itself. Returns the exit status."""
        assert self._process is not None
        return self._process.wait(STOP_TIMEOUT_S)

    def restart(self) -> Daemon:
        """Kills the daemon and starts it again."""
        self.kill()
        return self.start()

    def __enter__(self) -> Self:
        try:
            if self._process is None or self._process.poll() is not None:
                self.start()
        except BaseException:
            self.__exit__(None, None, None)  # a daemon that was not ready in time still runs
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
        text = self.log
        stalled = STALLED in text and failpoint.__file__ not in text
        shutil.rmtree(self._arena, ignore_errors=True)
        if self._own_root:
            shutil.rmtree(self.root, ignore_errors=True)
        if stalled and kind is None:
            raise AssertionError(f"the daemon's {STALLED}:\n{text[text.index(STALLED) - 200 :][:8000]}")

    def _spawn(self, arguments: Sequence[str], *, env: Mapping[str, str], log: int) -> Process:
        """Runs `tierd` with these arguments, its output to the descriptor."""
        command = [sys.executable, "-m", "tierd.cli.daemon", *arguments]
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def _with_arena(self, config: str) -> str:
        """Gives each memory tier without an arena_dir one that this daemon removes."""
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
