"""Daemons forked from a process with all of tierd imported. Imports take 0.6 s of CPU a start.

Purpose: `Daemon`, for tests of a daemon's work and not of its start; `WarmDaemon`, for hundreds of
lives in a night. Non-purpose: tests of a start or of memory's content; they use
`tierd.testing.Daemon`. Invariants: from `main` on a fork runs the code of
`python -m tierd.cli.daemon`, in its own process with the given environment and output. The forking
process has one thread, has never used gRPC or a daemon's socket, and ends with the tests.
"""

from __future__ import annotations

import atexit
import os
import random
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache

import msgpack

from tests.depth import DEPTH
from tierd import testing
from tierd.testing.daemon import Process

MESSAGE_BYTES = 1 << 18
"""An environment may be long."""
ANSWER_S = 60.0
LOADED_BY = ("LD_PRELOAD", "PYTHONPATH")
"""Environment variables that select the code of a process."""


class WarmDaemon(testing.Daemon):
    """A daemon whose lives are forked."""

    def _spawn(self, arguments: Sequence[str], *, env: Mapping[str, str], log: int) -> Process:
        return nest().fork(arguments, env=env, log=log)


class Daemon(testing.Daemon):
    """Forks its lives in `make test`, unless they need other code; at night starts them as a user does."""

    def _spawn(self, arguments: Sequence[str], *, env: Mapping[str, str], log: int) -> Process:
        if DEPTH == "test" and all(env.get(name) == os.environ.get(name) for name in LOADED_BY):
            return nest().fork(arguments, env=env, log=log)
        return super()._spawn(arguments, env=env, log=log)


class Nest:
    """The process that forks: the tests' end."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        with theirs:
            command = [sys.executable, "-m", "tests.system.warm", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    def fork(self, arguments: Sequence[str], *, env: Mapping[str, str], log: int) -> Forked:
        """Starts `tierd` with these arguments."""
        with self._turn:
            socket.send_fds(self._socket, [msgpack.packb({"run": list(arguments), "env": dict(env)})], [log])
            pid = int(self._socket.recv(64))
        return Forked(self, pid)

    def reap(self, pid: int) -> int:
        """The exit status of an ended fork, negative for a signal."""
        with self._turn:
            self._socket.send(msgpack.packb({"reap": pid}))
            return int(self._socket.recv(64))

    def close(self) -> None:
        """Ends the forking process."""
        self._socket.close()
        self._process.wait(ANSWER_S)


class Forked:
    """A fork with Popen's interface. It stays a zombie until `wait`, so no other process gets its pid."""

    def __init__(self, nest: Nest, pid: int) -> None:
        self.pid = pid
        self._nest, self._status, self._turn = nest, None, threading.Lock()
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises TimeoutExpired."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"daemon {self.pid}", timeout or 0)
        return status

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the process was waited for."""
        with self._turn:
            if self._status is None:
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(9)

    def _ended(self, timeout_s: float | None) -> int | None:
        with self._turn:
            if self._status is None and select.select([self._pidfd], [], [], timeout_s)[0]:
                self._status = self._nest.reap(self.pid)
                os.close(self._pidfd)
            return self._status


@cache
def nest() -> Nest:
    """One forking process for all tests of this process."""
    return Nest()


def _await_turn(told: socket.socket) -> list[str] | None:
    """In the forking process: serves until its socket ends; None. In a fork: its daemon's arguments."""
    while True:
        data, fds, _, _ = socket.recv_fds(told, MESSAGE_BYTES, 1)
        if not data:
            return None
        request = msgpack.unpackb(data)
        if "reap" in request:
            told.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1]))
            continue
        pid = os.fork()
        if not pid:
            _become(fds[0], request["env"])
            return list(request["run"])
        os.close(fds[0])
        told.send(b"%d" % pid)


def _become(log: int, env: Mapping[str, str]) -> None:
    """Sets a fork's environment, random seed and standard streams."""
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    from tierd.cli import daemon
    from tierd.server import lifecycle  # noqa: F401 -- all that a start imports

    with socket.socket(fileno=int(sys.argv[1])) as end:
        arguments = _await_turn(end)
    if arguments is not None:
        daemon.cli.main(arguments, prog_name="tierd")
