"""Runs a test's function in its own process: another client or user, or one that forks and is killed.

    def reader(talk: Talk, target: str) -> None:      # runs there
        client = Client(target)
        talk.say("ready")
        seed = talk.hear()

    with Elsewhere(reader, daemon.target) as other:   # runs in the test
        assert other.hear() == "ready"
        other.say(7)

Values are JSON. Imports after the change of user go through descriptors that were opened before it.
So another uid needs no right to enter the folders above the code.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest

import tests.system.early
import tierd.client.aio
import tierd.client.transport.grpc_calls
from tierd.testing import content_of

ROOT = Path(__file__).resolve().parents[2]
READ = (tierd.client.transport.grpc_calls.__file__, np.__file__, os.__file__)
"""Code that another user runs: this repository's, the environment's and Python's."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


class Elsewhere:
    """The process. Leaving the context kills it."""

    def __init__(
        self, function: Callable[..., None], target: str, *, uid: int | None = None, gid: int = 0, **given: Any
    ):
        if uid is not None and (hidden := [path for path in READ if not os.stat(path).st_mode & 0o004]):
            pytest.skip(f"uid {uid} may not read {hidden[0]}; chmod -R o+rX the checkout and its environment")
        place = {"module": function.__module__, "function": function.__name__, "uid": uid, "gid": gid}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.elsewhere", json.dumps(place | {"target": target, "given": given})],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Pid of the process."""
        return self._process.pid

    def say(self, value: Any = None) -> None:
        """Sends a value to the function's next `hear`."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Receives the function's next value."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"the other process ended with status {self._process.wait()}"
        return json.loads(line)

    def ask(self, value: Any = None) -> Any:
        """Sends a value and receives the answer."""
        self.say(value)
        return self.hear()

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end."""
        self._process.kill()
        self._process.wait()

    def finish(self) -> int:
        """Closes the function's input, waits for its end and returns the exit status."""
        assert self._process.stdin
        self._process.stdin.close()
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


class Talk:
    """The function's end."""

    def say(self, value: Any = None) -> None:
        """Sends a value to the test's next `hear`."""
        os.write(1, (json.dumps(value) + "\n").encode())

    def hear(self) -> Any:
        """Receives the test's next value. Ends the process if the test has ended."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        return json.loads(line)


class Child:
    """A fork of this process that runs one function, reports its result and exits.

    work: gives the `result`; an error gives its class name. lives: waits for `end` before the exit.
    is_orphan: the child outlives its parent.
    """

    def __init__(self, work: Callable[[], Any], *, lives: bool = False, is_orphan: bool = False) -> None:
        self._answer, answer = os.pipe()
        go, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(answer)
            os.close(go)
            return
        os.close(self._answer)
        os.close(self._go)
        if not is_orphan:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            value = work()
        except BaseException as error:
            value = type(error).__name__
        os.write(answer, json.dumps(value).encode())
        os.close(answer)
        if lives:
            os.read(go, 1)
        os._exit(0)

    def result(self) -> Any:
        """The function's value; None if the function's action killed the child."""
        data = b""
        while part := os.read(self._answer, 65536):
            data += part
        os.close(self._answer)
        return json.loads(data) if data else None

    def end(self) -> int:
        """Releases the child and waits; the exit status as Popen gives it: -11 is SIGSEGV."""
        os.close(self._go)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def mapping_of(array: np.ndarray) -> tuple[str, str, int]:
    """Path, rights and file offset of the mapping at an array's start, from /proc/self/maps."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, offset, _device, _inode, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return (path or [""])[0], rights, int(offset, 16) + address - start
    raise AssertionError(f"{address:#x} is not mapped")


def main() -> None:
    """Runs the function that its arguments name."""
    place = json.loads(sys.argv[1])
    function = getattr(importlib.import_module(place["module"]), place["function"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if place["uid"] is not None:
        _hold_paths()
        os.setgroups([])
        os.setgid(place["gid"])
        os.setuid(place["uid"])
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise root owns the process's /proc/self/fd
    function(Talk(), place["target"], **place["given"])


def _hold_paths() -> None:
    """From now on Python imports packages through descriptors of their folders."""
    held = {
        path: f"/proc/self/fd/{os.open(path, os.O_PATH | os.O_DIRECTORY)}" for path in sys.path if os.path.isdir(path)
    }
    held = dict(sorted(held.items(), key=lambda pair: -len(pair[0])))  # the innermost first

    def found(path: str) -> str:
        above = next((top for top in held if path == top or path.startswith(top + "/")), None)
        return path if above is None else held[above] + path[len(above) :]

    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "__path__", None), list):
            module.__path__ = [found(path) for path in module.__path__]
    sys.path[:] = [held.get(path, path) for path in sys.path]


# Late imports happen here, before the user changes. `early` must register in a child before tierd.
assert tests.system.early
assert tierd.client.transport.grpc_calls and tierd.client.aio
assert len(content_of(bytes(32), 8)) == 8

if __name__ == "__main__":
    main()
