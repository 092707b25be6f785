"""The daemon's end of the hash process: it is started, asked, and started again when it has ended.

Purpose: `HashProcess`. Non-purpose: which pages, and what their sums are good for (cache/ahead.py). Invariants: nobody waits in here: a page that it does not take now is its caller's to hash, and
each one that it takes is answered, with None if it has ended or says nothing for PATIENCE_S, and then it is killed; what it is asked is bounded by its socket; memory of a segment that has ended is
let go of.
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

import structlog

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
Took = Callable[[bytes | None], None]
"""Is told the sums of a page, u8 [slices], little-endian; None: there are none to be had."""


@dataclass(slots=True)
class Asked:
    """Pages of one message that are still to be answered."""

    left: int
    took: Took


class HashProcess:
    """One process at a time. Used in the thread of one event loop, which must not end before it."""

    def __init__(self) -> None:
        self.is_ready = False
        self._numbers = itertools.count(1)
        self._asked: dict[int, Asked] = {}
        self._heard_s = 0.0
        self._patience: asyncio.TimerHandle | None = None
        self._attached: set[int] = set()
        self._ended = deque[int]()
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

    def hash(self, pages: Sequence[wire.Page], opened: Callable[[int], tuple[int, int]], took: Took) -> bool:
        """Whether it takes all of the pages. took: is told of each, in order. opened: a new descriptor of a segment's file, and its length in bytes; may raise KeyError, TierFailed."""
        if not self.is_ready or not 0 < len(pages) <= wire.PAGES_MAX:
            return False
        try:
            for segment in {page.segment for page in pages} - self._attached:
                self._attach(segment, *opened(segment))
        except (KeyError, TierFailed, OSError):
            return False
        number = next(self._numbers)
        if not self._send(wire.ask(number, pages)):
            return False
        if not self._asked:
            self._heard_s = asyncio.get_running_loop().time()
            self._wait()
        self._asked[number] = Asked(len(pages), took)
        return True

    def detach(self, segment: int) -> None:
        """The segment has ended."""
        if segment in self._attached:
            self._attached.discard(segment)
            self._ended.append(segment)
            self._let_go()

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

    def _attach(self, segment: int, descriptor: int, length_bytes: int) -> None:
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [wire.attach(segment, length_bytes)], [descriptor])
            self._attached.add(segment)
        finally:
            os.close(descriptor)

    def _let_go(self) -> None:
        """Of memory that has ended: now, or with the next answer where it is far behind."""
        while self._ended and self._send(wire.detach(self._ended[0])):
            self._ended.popleft()
        if self._ended and not self._asked:
            self.end("does not take messages")

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
            self._let_go()

    def _take(self, number: int, tables: list[bytes]) -> None:
        self._heard_s, asked = asyncio.get_running_loop().time(), self._asked[number]
        asked.left -= len(tables)
        if not asked.left:
            del self._asked[number]
        for table in tables:
            asked.took(table or None)

    def _wait(self) -> None:
        """Looks again when patience would be over."""
        if self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_at(self._heard_s + PATIENCE_S, self._look)

    def _look(self) -> None:
        self._patience = None
        if self._asked and asyncio.get_running_loop().time() >= self._heard_s + PATIENCE_S:
            self.end(f"no sums within {PATIENCE_S:g} s")
        elif self._asked:
            self._wait()

    def _closed(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket, self.is_ready = None, False
        self._attached.clear()
        self._ended.clear()
        asked, self._asked = self._asked, {}
        for each in asked.values():
            for _ in range(each.left):
                each.took(None)

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
