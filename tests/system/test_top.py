"""`tierctl top` in a terminal: a pty on one side, a real daemon on the other."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from click.testing import CliRunner

from tests.system.warm import Daemon
from tierd.cli.ctl import cli
from tierd.client import Client, NamespaceSpec

SOON_S = 60.0
"""The bound of every wait, never of a measurement."""
LEAVES = "\x1b[?1049l"
"""The sequence by which a full-screen program ends."""
ECHO = 3
"""The index of the local flags in termios' attributes."""


class Terminal:
    """A terminal of 80 by 24 with `tierctl top` in it; a context manager. shown: all that it got."""

    def __init__(self, target: str, *options: str) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._theirs, self.before, self.shown = theirs, termios.tcgetattr(theirs), ""
        command = [sys.executable, "-m", "tierd.cli.ctl", "top", "--interval", "50 ms", "--target", target, *options]
        environment = os.environ | {"TERM": "xterm-256color"}
        ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore it
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env=environment)
        signal.signal(signal.SIGINT, ignored)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)
        os.close(self._theirs)

    def press(self, keys: str) -> None:
        """Types these keys; what was shown before no longer counts."""
        self.shown = ""
        os.write(self._fd, keys.encode())

    def until(self, pattern: str) -> None:
        """Waits until the terminal was shown this."""
        deadline = time.monotonic() + SOON_S
        while not re.search(pattern, re.sub(r"\x1b\[[0-9;]*m", "", self.shown)):
            assert time.monotonic() < deadline, self.shown[-3000:]
            if select.select([self._fd], [], [], 1.0)[0]:
                self.shown += os.read(self._fd, 1 << 16).decode(errors="replace")

    def ended(self) -> int:
        """The exit status of the program, which must have left the terminal as it was."""
        self.until(re.escape(LEAVES))
        status = self.process.wait(SOON_S)
        assert termios.tcgetattr(self._theirs) == self.before
        return status


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon with two prompts that share their first four blocks."""
    with Daemon() as started, Client(started.target, name="the test") as client:
        space = client.open_namespace(NamespaceSpec(model="top-test", tokens_per_block=16, block_bytes=8192))
        for tail in (1, 2):
            tokens = np.concatenate((np.arange(64), np.full(32, tail))).astype(np.uint32)
            assert client.put(space, tokens, [bytes(8192)] * 6)
        yield started


def test_keys_work_while_the_daemon_is_watched(daemon: Daemon) -> None:
    """The prefix tree appears by itself. Keys focus, sort, filter and explain; q restores the terminal."""
    with Terminal(daemon.target) as terminal:
        terminal.until(r"(?s)1 tiers.*host\.0.*the test.*top-test.*├─ [0-9a-f]{12}")
        assert not termios.tcgetattr(terminal._theirs)[ECHO] & termios.ECHO
        terminal.press("3s")
        terminal.until("3 tree by tokens")
        terminal.press("1/nvme\r")
        terminal.until(r"1 tiers by order, with 'nvme': 1 of 2")
        terminal.press("?")
        terminal.until("this help")
        terminal.press("q")
        assert terminal.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_signals_leave_the_terminal_as_it_was(daemon: Daemon, number: signal.Signals) -> None:
    """SIGTERM and Ctrl-C end top at once with a restored terminal."""
    with Terminal(daemon.target) as terminal:
        terminal.until("1 tiers")
        terminal.process.send_signal(number)
        assert terminal.ended() == (143 if number == signal.SIGTERM else 0)


def test_so_many_frames(daemon: Daemon) -> None:
    """With --count top ends by itself."""
    with Terminal(daemon.target, "--count", "3") as terminal:
        assert terminal.ended() == 0


def test_a_daemon_that_vanishes_is_found_again() -> None:
    """Without a daemon top says so and obeys keys; it shows the next daemon of the same directory."""
    with Daemon() as started, Terminal(started.target) as terminal:
        terminal.until(rf"pid {started.pid} ")
        started.kill()
        terminal.until("no answer, trying again: ")
        terminal.press("4")
        terminal.until("4 rates")
        started.start()
        terminal.until(rf"pid {started.pid} ")
        terminal.press("")
        terminal.until(r"\x1b\[Htierd 0")
        terminal.press("q")
        assert terminal.ended() == 0


def test_the_tree_has_the_prefixes_that_prompts_share(daemon: Daemon) -> None:
    """The two prompts are three runs with what they have in common, and --under lists one of them."""

    def asked(*options: str) -> dict[str, Any]:
        run = CliRunner().invoke(cli, ["tree", *options, "--json", "--target", daemon.target])
        assert run.exit_code == 0, run.output
        answer: dict[str, Any] = json.loads(run.stdout)
        return answer

    tree = asked("--model", "top-test", "--sort", "tokens")
    assert [(node["parent"], node["blocks"], node["leaves"]) for node in tree["nodes"]] == [
        (-1, 4, 2),
        (0, 2, 1),
        (0, 2, 1),
    ]
    assert (tree["blocks"], tree["tokens_shared"], tree["is_cut"]) == (8, 64, False)
    assert [(row["from_tokens"], row["blocks"]) for row in tree["depths"]] == [(0, 8)]
    (node,) = asked("--under", tree["nodes"][1]["hash"][:16])["nodes"]
    assert node["hash"] == tree["nodes"][1]["hash"]
