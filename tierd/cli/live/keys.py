"""Single keys from a terminal, which is restored at any exit that Python sees, SIGTERM included."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType

SPECIAL = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[Z": "backtab", "\t": "tab", "\r": "enter", "\n": "enter"}
SPECIAL |= {"\x1b": "escape", "\x7f": "erase", "\b": "erase", "\x04": "q"}
KEYS = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|.", re.DOTALL)
READ_BYTES = 256


@contextlib.contextmanager
def keyboard() -> Iterator[list[int]]:
    """Sets stdin to single keys without echo, then restores it. Gives the descriptors to wait for
    keys: none if stdin is no terminal. SIGTERM ends the program by an exception meanwhile."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        if not sys.stdin.isatty():
            yield []
            return
        fd = sys.stdin.fileno()
        saved = termios.tcgetattr(fd)
        try:
            tty.setcbreak(fd)
            yield [fd]
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, saved)
    finally:
        signal.signal(signal.SIGTERM, before)


def keys_of(text: str) -> list[str]:
    """The keys of what a terminal sent: characters, or names as in SPECIAL. Unknown sequences are dropped."""
    keys = (SPECIAL.get(found, found) for found in KEYS.findall(text))
    return [key for key in keys if not key.startswith("\x1b")]


def read_keys(fd: int) -> list[str]:
    """The keys that wait on the descriptor. A terminal that has gone is `q`."""
    given = os.read(fd, READ_BYTES)
    return keys_of(given.decode(errors="replace")) if given else ["q"]


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
