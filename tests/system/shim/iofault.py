"""Disk faults for a live process: compiles the shim, and sets its rules in a mapped control file.

The rules end with the `IoFaults` object. `_Control` equals `struct control` in iofault.c, byte for
byte.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

CALLS = (
    "open",
    "read",
    "pread",
    "write",
    "pwrite",
    "fsync",
    "fdatasync",
    "rename",
    "unlink",
    "fallocate",
    "ftruncate",
    "accept",
    "close",
)
"""In the order of `enum call`. A name stands for all its forms: pwrite for pwritev2 too."""
SYNCS = "fsync,fdatasync"
WRITES = "write,pwrite"
READS = "read,pread"
EVERYTHING = ",".join(call for call in CALLS if call not in ("accept", "close"))
_ACTIONS = {"short": 2, "delay": 3, "hang": 4}
_RULES = 4


class _Rule(ctypes.Structure):
    _fields_ = (
        ("armed", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("action", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("first", ctypes.c_uint32),
        ("times", ctypes.c_uint32),
        ("delay_us", ctypes.c_uint32),
        ("hits", ctypes.c_uint32),
        ("fired", ctypes.c_uint32),
        ("hanging", ctypes.c_uint32),
        ("pattern", ctypes.c_char * 216),
    )


class _Control(ctypes.Structure):
    _fields_ = (
        ("loaded", ctypes.c_uint32),
        ("synced_again", ctypes.c_uint32),
        ("written_after", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("rules", _Rule * _RULES),
    )


class IoFaults:
    """The faults of processes started with `env`. directory: for the library and control file."""

    def __init__(self, directory: Path) -> None:
        path = directory / "iofault.control"
        path.write_bytes(bytes(ctypes.sizeof(_Control)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._control = _Control.from_buffer(self._memory)
        self._lives = 0
        self.env = {"LD_PRELOAD": str(compiled(directory)), "IOFAULT_CONTROL": str(path)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()

    def arm(self, calls: str, fault: str, pattern: str, *, first: int = 1, times: int = 0, rule: int = 0) -> None:
        """Sets a rule.

        Args:
            calls: Names of CALLS, separated by commas.
            fault: An errno's name, "short", "hang" or "delay:SECONDS".
            pattern: Of the file's path.
        """
        self.disarm(rule)
        row, (action, _, argument) = self._control.rules[rule], fault.partition(":")
        row.action = _ACTIONS.get(action, 1)
        row.error = 0 if action in _ACTIONS else getattr(errno, action)
        row.delay_us = int(float(argument or 0) * 1e6)
        row.calls = sum(1 << CALLS.index(call) for call in calls.split(","))
        row.first, row.times, row.pattern = first, times, pattern.encode()
        row.hits = row.fired = 0
        self._lives += 1
        row.armed = self._lives

    def disarm(self, rule: int | None = None) -> None:
        """Removes one rule, or all. Hung calls go on."""
        for i in range(_RULES) if rule is None else [rule]:
            self._control.rules[i].armed = 0

    @contextmanager
    def armed(self, calls: str, fault: str, pattern: str, *, first: int = 1, times: int = 0) -> Iterator[Self]:
        """A rule that ends with the with block."""
        self.arm(calls, fault, pattern, first=first, times=times)
        try:
            yield self
        finally:
            self.disarm(0)

    def fired(self, rule: int = 0) -> int:
        """How often the rule applied since it was set."""
        return int(self._control.rules[rule].fired)

    def hanging(self, rule: int = 0) -> int:
        """Threads that hang in the shim now."""
        return int(self._control.rules[rule].hanging)

    @property
    def loaded(self) -> int:
        """Processes that have loaded the shim so far."""
        return int(self._control.loaded)

    @property
    def synced_again(self) -> int:
        """Syncs of files after a failed sync."""
        return int(self._control.synced_again)


def compiled(directory: Path) -> Path:
    """The shim, compiled into this directory. Skips the test without gcc."""
    library = directory / "iofault.so"
    if library.exists():
        return library
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc, which builds the shim that makes calls fail, is not installed")
    source = Path(__file__).with_name("iofault.c")
    command = [compiler, "-std=gnu2x", "-O2", "-fPIC", "-shared", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library
