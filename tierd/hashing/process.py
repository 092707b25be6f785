"""The daemon's end of the hash process: it is started, asked, and started again when it has ended.

Purpose: `HashProcess`. Non-purpose: which pages, and what their sums are good for (cache/ahead.py). Invariants: nobody waits in here: a page that it does not take now is its caller's to hash, and
each one that it takes is answered, with None if it has ended; one that owes sums, or is to hear of an end, and for PATIENCE_S says and takes nothing is killed; what it is asked is bounded by its
socket; it hears of all that is dropped and of all memory that has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from tierd import children
from tierd.errors import TierFailed
from tierd.hashing import wire

log = structlog.get_logger(__name__)

PAUSE_S, PAUSE_LIMIT_S = 1.0, 60.0
"""Before another takes the place of one that ended; doubled each time that one has lived for less than the limit."""
STOP_S = 5.0
"""So long it may take to end by itself."""
PATIENCE_S = 5.0
"""With a process that is asked for sums and says nothing."""
PAGE = np.dtype([(name, f"<u{size}") for name, size in zip(wire.Page._fields, wire.PAGE_SIZES, strict=True)])
"""`wire.Page`, as it is sent."""
Opened = Callable[[int], tuple[int, int]]
Took = Callable[[Sequence[bytes | None]], None]
"""Is told the sums of the next pages, u8 [slices] of each, little-endian; None: there are none to be had."""


@dataclass(slots=True)
class Asked:
    """Pages of one message that are still to be answered. is_due: all of them are written."""

    left: int
    took: Took
    is_due: bool


class HashProcess:
    """One process at a time. Used in the thread of one event loop, which must not end before it."""

    def __init__(self) -> None:
        self.is_ready = False
        self._numbers = itertools.count(1)
        self._asked: dict[int, Asked] = {}
        self._heard_s = 0.0
        self._patience: asyncio.TimerHandle | None = None
        self._attached: set[int] = set()
        self._unheard = deque[bytes]()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pidfd = -1
        self._begun_s, self._pause_s = 0.0, PAUSE_S
        self._next: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0: there is none."""
        return self._child.pid if self._child else 0

    def start(self) -> None:
        """Starts it; until it is ready it takes nothing. One that cannot be started is tried again later."""
        loop = asyncio.get_running_loop()
        self._next, self._begun_s = None, loop.time()
        try:
            self._child, self._socket = children.start("tierd.hashing", kind=socket.SOCK_SEQPACKET)
            self._pidfd = os.pidfd_open(self._child.pid)
        except OSError as error:
            log.warning("no hash process: commits hash by themselves", error=str(error))
            if self._socket is not None:
                self._socket.close()
            self._child = self._socket = None
            self._again()
            return
        loop.add_reader(self._socket, self._read)
        loop.add_reader(self._pidfd, self._buried)

    def hash(self, pages: NDArray[np.void], opened: Opened, took: Took, *, where: wire.Word = wire.NOWHERE) -> int:
        """A number for all of the pages, PAGE [n], if it takes them; 0: it does not. took: is told of all, in order. opened: a new descriptor of a segment's or a board's file, and its length
        in bytes; may raise KeyError, TierFailed."""
        if not self.is_ready or not 0 < len(pages) <= wire.PAGES_MAX:
            return 0
        try:
            for memory in {where.board, *pages["segment"].tolist()} - {0} - self._attached:
                self._attach(memory, *opened(memory))
        except (KeyError, TierFailed, OSError):
            return 0
        number = next(self._numbers)
        if not self._send(wire.ask(number, pages.tobytes(), where=where)):
            return 0
        self._asked[number] = Asked(len(pages), took, is_due=False)
        if where == wire.NOWHERE:
            self._due(number)
        return number

    def tell_written(self, number: int) -> None:
        """All pages of a number are; what it does not hear of it does not do."""
        if number in self._asked:
            if self._send(wire.written(number)):
                self._due(number)
            else:
                self.drop(number)

    def drop(self, number: int) -> None:
        """Nobody wants the sums of a number any more: its caller is told that there are none."""
        if asked := self._asked.pop(number, None):
            self._tell(wire.drop(number))
            asked.took([None] * asked.left)

    def detach(self, memory: int) -> None:
        """The segment, or the board, has ended."""
        if memory in self._attached:
            self._attached.discard(memory)
            self._tell(wire.detach(memory))

    def end(self, why: str) -> None:
        """Kills it; another takes its place."""
        if self._child is not None and self._socket is not None:
            log.warning("hash process ended: commits hash by themselves meanwhile", pid=self.pid, reason=why)
            self._child.kill()
            self._closed()

    async def stop(self) -> None:
        """Ends it for good."""
        if self._next is not None:
            self._next.cancel()
        if self._patience is not None:
            self._patience.cancel()
        child, self._pause_s = self._child, 0.0
        if self._socket is not None:
            self._closed()
        if child is not None:
            try:
                await asyncio.wait_for(asyncio.to_thread(child.wait), STOP_S)
            except TimeoutError:
                child.kill()
        if self._pidfd >= 0:
            self._buried()

    def _attach(self, memory: int, descriptor: int, length_bytes: int) -> None:
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [wire.attach(memory, length_bytes)], [descriptor])
            self._attached.add(memory)
        finally:
            os.close(descriptor)

    def _tell(self, message: bytes) -> None:
        """What it must hear: now, or when it takes messages again."""
        if not self._unheard and self._send(message):
            return
        assert self._socket is not None
        self._expect()
        self._unheard.append(message)
        asyncio.get_running_loop().add_writer(self._socket, self._tell_on)

    def _tell_on(self) -> None:
        assert self._socket is not None
        while self._unheard and self._send(self._unheard[0]):
            self._unheard.popleft()
            self._heard_s = asyncio.get_running_loop().time()
        if not self._unheard:
            asyncio.get_running_loop().remove_writer(self._socket)

    def _send(self, message: bytes) -> bool:
        assert self._socket is not None
        try:
            return self._socket.send(message) == len(message)
        except OSError:  # it is far behind, or has ended
            return False

    def _read(self) -> None:
        assert self._socket is not None
        try:
            message = self._socket.recv(wire.ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.end("ended by itself")
        elif message == wire.READY:
            self.is_ready = True
        else:
            self._take(*wire.answered(message))

    def _take(self, number: int, tables: list[bytes]) -> None:
        self._heard_s, asked = asyncio.get_running_loop().time(), self._asked.get(number)
        if asked is None:  # it was dropped
            return
        asked.left -= len(tables)
        if not asked.left:
            del self._asked[number]
        asked.took([table or None for table in tables])

    def _due(self, number: int) -> None:
        self._expect()
        self._asked[number].is_due = True

    def _expect(self) -> None:
        """From now on it is to say something, or to take what it is told."""
        if not self._owes:
            self._heard_s = asyncio.get_running_loop().time()
            self._wait()

    @property
    def _owes(self) -> bool:
        """Whether there are pages that it could have hashed, or messages that it could have taken."""
        return bool(self._unheard) or any(asked.is_due for asked in self._asked.values())

    def _wait(self) -> None:
        """Looks again when patience would be over."""
        if self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_at(self._heard_s + PATIENCE_S, self._look)

    def _look(self) -> None:
        self._patience = None
        if self._owes and asyncio.get_running_loop().time() >= self._heard_s + PATIENCE_S:
            self.end(f"says nothing, and takes nothing, within {PATIENCE_S:g} s")
        elif self._owes:
            self._wait()

    def _closed(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)
        asyncio.get_running_loop().remove_writer(self._socket)
        self._socket.close()
        self._socket, self.is_ready = None, False
        self._attached.clear()
        self._unheard.clear()
        asked, self._asked = self._asked, {}
        for each in asked.values():
            each.took([None] * each.left)

    def _buried(self) -> None:
        """It is gone."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._socket is not None:
            self.end("ended by itself")
        if self._child is not None:
            self._child.poll()  # its status, without a wait for one that a driver or a disk holds
        self._child = None
        self._again()

    def _again(self) -> None:
        """Unless it was stopped."""
        if not self._pause_s:
            return
        loop = asyncio.get_running_loop()
        has_lived = loop.time() - self._begun_s > PAUSE_LIMIT_S
        pause_s = PAUSE_S if has_lived else self._pause_s
        self._pause_s = min(2 * pause_s, PAUSE_LIMIT_S)
        self._next = loop.call_later(pause_s, self.start)
