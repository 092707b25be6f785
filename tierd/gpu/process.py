"""The daemon's end of a GPU process: start, calls, and a kill if it hangs.

The owner decides what to copy, and what follows a death. No CUDA call is made here. Every call
ends, with an answer or with the death of the process. A call that exceeds its patience kills the
process. A cancelled call ends no sooner, since the GPU may still write to its memory. For that
reason the calls of a dying process end when it is gone, not when its socket ends: the GPU's copies
may stop later. If the process cannot be killed, callers of copies keep waiting, and their memory is
not reused. A death is reported once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tierd import errors
from tierd.core.formats.model import StructArray
from tierd.errors import Overloaded, TierdError, TierFailed
from tierd.gpu.protocol import (
    READ,
    CodedSums,
    Coding,
    GpuFacts,
    Inbox,
    Message,
    SliceTable,
    frame,
    pack_pieces,
    unpack_sums,
)
from tierd.linux import children

START_PATIENCE_S = 60.0
"""Limit of the driver's start, which takes seconds on machines with many GPUs."""
STOP_S = 5.0
"""Limit of a voluntary end, after `stop`."""
REAP_S = 5.0
"""Limit of the end of a killed process; one that a driver holds in the kernel may never end."""
CALLS_MAX = 32
"""In flight at one time, with patience running. Other calls wait for a turn."""
WAITING_MAX = 1024
COPIES = {"load", "store", "load_coded", "store_coded", "read"}
"""Verbs that write to memory that the caller reads afterwards."""
NO_SLABS: Mapping[int, tuple[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Pending:
    """A call in flight: its answer, the timer of its patience, and whether it is a copy."""

    answer: asyncio.Future[Message]
    deadline: asyncio.TimerHandle
    is_copy: bool


class GpuProcess:
    """One GPU process, never restarted, used in the thread of one event loop, which must outlive it.

    facts: from its start, with later notices.
    on_death: called once with the reason, if it dies between its start and `stop`.
    """

    def __init__(
        self,
        ordinal: int,
        *,
        patience_s: float,
        on_death: Callable[[str], None],
        start_patience_s: float = START_PATIENCE_S,
    ) -> None:
        self.facts = GpuFacts()
        self.hung = ""
        """The verb that exceeded its patience, so that the process was killed."""
        self._name, self._ordinal = f"GPU process of cuda:{ordinal}", ordinal
        self._patience_s, self._start_patience_s = patience_s, start_patience_s
        self._on_death = on_death
        self._turns, self._waiting = asyncio.Semaphore(CALLS_MAX), 0
        self._pending: dict[int, Pending] = {}
        self._next_id = 0
        self._inbox, self._outbox = Inbox(), deque[tuple[memoryview, Sequence[int]]]()
        self._reason = f"{self._name}: not started"
        """Why no call is possible; empty if calls are."""
        self._last_words = ""
        self._is_missed = False
        """Whether to report its death to its owner."""
        self._burial: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the process, for people and tests."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether calls are possible."""
        return not self._reason

    async def start(self, *, slabs: Mapping[int, tuple[int, int]] = NO_SLABS) -> GpuFacts:
        """Start it. slabs: of an earlier process: descriptors, which stay the caller's, and bytes.

        Raises Unsupported (no GPU, no driver, no extra), Overloaded, TierFailed; then it has ended.
        """
        try:
            self._spawn()
            begun = (await self._ask("begin", patience_s=self._start_patience_s)).body["facts"]
            self.facts = GpuFacts(**begun | {"notices": tuple(begun["notices"])})
            for slab, (descriptor, length_bytes) in slabs.items():
                await self._ask("adopt", descriptors=[descriptor], slab=slab, length=length_bytes)
        except BaseException:
            await self.stop()
            raise
        self._is_missed = True
        return self.facts

    async def make(self, slab: int, length_bytes: int) -> int:
        """Make a slab of zeros; returns its descriptor, the caller's to close. Raises Overloaded if
        the GPU has no room, InvalidArgument, TierFailed."""
        made = await self._ask("make", slab=slab, length=length_bytes)
        if not made.descriptors:
            await self.drop(slab)
            raise TierFailed(
                f"slab {slab}: its descriptor did not arrive, this process has too many; raise LimitNOFILE"
            )
        return made.descriptors.pop()

    async def drop(self, slab: int) -> None:
        """Forget a slab after the copies that use it. Its memory stays in descriptors and mappings.
        Raises InvalidArgument, TierFailed."""
        await self._ask("drop", slab=slab)

    async def attach(self, host: int, fd: int, length_bytes: int) -> None:
        """Map host memory; fd stays the caller's. Raises InvalidArgument, Overloaded, TierFailed."""
        attached = await self._ask("attach", descriptors=[fd], host=host, length=length_bytes)
        new = [notice for notice in attached.body["notices"] if notice not in self.facts.notices]
        self.facts = replace(self.facts, notices=(*self.facts.notices, *new))

    async def detach(self, host: int) -> None:
        """Unmap it after the copies that use it. Raises InvalidArgument, TierFailed."""
        await self._ask("detach", host=host)

    async def load(self, pieces: StructArray) -> list[SliceTable]:
        """Host to slab, PIECE[n]; returns slice tables of the bytes on the device. Raises
        InvalidArgument, before a byte moves, and TierFailed."""
        return unpack_sums((await self._ask("load", pieces=pack_pieces(pieces))).body)

    async def store(self, pieces: StructArray) -> None:
        """Slab to host, PIECE[n]; returns when the last byte is there. Raises InvalidArgument,
        before a byte moves, and TierFailed."""
        await self._ask("store", pieces=pack_pieces(pieces))

    async def load_coded(self, pieces: StructArray, coding: Coding) -> list[SliceTable]:
        """Payloads from the host, decoded into slabs. PIECE[n], with the blocks' own lengths. Returns
        slice tables of the payloads that arrived: compare them before the blocks are read. Raises
        InvalidArgument and Unsupported, before a byte moves, Overloaded, TierFailed."""
        return unpack_sums((await self._ask("load_coded", pieces=pack_pieces(pieces), coding=asdict(coding))).body)

    async def store_coded(self, pieces: StructArray, coding: Coding) -> CodedSums:
        """Blocks of slabs, encoded, to the host; as `load_coded`. Keep a block as it is if its errors
        are not finite."""
        body = (await self._ask("store_coded", pieces=pack_pieces(pieces), coding=asdict(coding))).body
        return CodedSums(unpack_sums(body), np.frombuffer(body["errors"], "<f4").reshape(-1, 2))

    async def sums(self, pieces: StructArray) -> list[SliceTable]:
        """The slice tables of slabs, PIECE[n] without a host. Raises InvalidArgument, TierFailed."""
        return unpack_sums((await self._ask("sums", pieces=pack_pieces(pieces))).body)

    async def probe(self, fd: int, by: str = "auto") -> str:
        """The direct path of a read of a `tierd.gpu.probe_file`; fd stays the caller's. by: the
        setting `direct_reads`. Raises Unsupported if there is none, Overloaded, TierFailed."""
        asked = await self._ask("probe", descriptors=[fd], patience_s=self._start_patience_s, by=by)
        return str(asked.body["way"])

    async def open_file(self, file: int, fd: int) -> None:
        """Open an O_DIRECT fd, the caller's. Raises InvalidArgument, Unsupported, TierFailed."""
        await self._ask("open_file", descriptors=[fd], file=file)

    async def close_file(self, file: int) -> None:
        """Forget a file after the reads that use it. Raises InvalidArgument, TierFailed."""
        await self._ask("close_file", file=file)

    async def read(self, reads: StructArray) -> tuple[list[SliceTable], dict[int, str]]:
        """File to slab, READ[n]: the slice tables of the bytes on the device, and faults by row.
        Raises InvalidArgument, before a byte moves, Unsupported, TierFailed."""
        body = (await self._ask("read", reads=pack_pieces(reads, READ))).body
        return unpack_sums(body), dict(body["faults"])

    async def stop(self) -> None:
        """End the process. Calls in flight fail; slabs live on in their descriptors."""
        self._is_missed = False
        self._end(f"{self._name}: stopped", kill_after_s=STOP_S)
        if self._burial:
            await asyncio.shield(self._burial)
            # Its owner is about to end: the next daemon waits for the rest of it.
            self._fail(copies=True)

    # -- calls

    async def _ask(
        self, verb: str, *, descriptors: Sequence[int] = (), patience_s: float | None = None, **given: Any
    ) -> Message:
        """The answer. Raises the process's error, TierFailed after its death, Overloaded."""
        if self._waiting >= WAITING_MAX:
            raise Overloaded(f"{self._name}: {WAITING_MAX} calls are queued, the limit; make fewer at a time")
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        answer = self._post({"verb": verb, **given}, descriptors, patience_s or self._patience_s)
        if not await _settled(answer):
            return _checked(answer.result())
        if answer.exception() is None:
            await self._undo(answer.result(), given)
        raise asyncio.CancelledError

    async def _undo(self, answer: Message, given: Mapping[str, Any]) -> None:
        """Drop a slab that was made for a cancelled call."""
        if answer.descriptors:
            answer.close()
            with contextlib.suppress(TierdError):
                await self.drop(given["slab"])

    def _post(self, body: dict[str, Any], descriptors: Sequence[int], patience_s: float) -> asyncio.Future[Message]:
        """Post a request; returns its future answer. Each answer passes its turn to the next call."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Message] = loop.create_future()
        answer.add_done_callback(lambda _: self._turns.release())
        if self._reason:
            answer.set_exception(TierFailed(self._reason))
            return answer
        self._next_id += 1
        try:
            packed = frame(body | {"id": self._next_id}, descriptors=len(descriptors))
        except Exception as error:  # noqa: BLE001 -- for the caller; the turn goes to the next call
            answer.set_exception(error)
            return answer
        late = f"{self._name}: {body['verb']} was not answered within {patience_s:g} s, it is killed; look at dmesg"
        deadline = loop.call_later(patience_s, self._lose_patience, body["verb"], late)
        self._pending[self._next_id] = Pending(answer, deadline, is_copy=body["verb"] in COPIES)
        self._outbox.append((memoryview(packed), descriptors))
        self._flush()
        return answer

    def _flush(self) -> None:
        """Send bytes while the socket takes them; the rest when it takes more."""
        loop = asyncio.get_running_loop()
        try:
            while self._outbox:
                packed, descriptors = self._outbox[0]
                sent = socket.send_fds(self._socket, [packed], descriptors)
                self._outbox[0] = (packed[sent:], ())
                if sent == len(packed):
                    self._outbox.popleft()
        except BlockingIOError:
            loop.add_writer(self._socket, self._flush)
            return
        except (BrokenPipeError, ConnectionResetError):
            self._outbox.clear()  # it has ended; earlier answers are read first
        except OSError as error:
            self._end(f"{self._name}: cannot be reached ({error})")
            return
        loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            for message in self._inbox.receive(self._socket):
                self._take(message)
        except BlockingIOError:
            return
        except (OSError, TierFailed) as error:
            self._end(self._last_words or f"{self._name}: ended ({error})")
            return
        if self._inbox.is_ended:
            self._end(self._last_words or f"{self._name}: ended")

    def _take(self, message: Message) -> None:
        if "lost" in message.body:
            self._last_words = f"{self._name}: it lost the GPU ({message.body['lost']})"
            return
        pending = self._pending.pop(message.body["id"], None)
        if pending is None:
            message.close()
            return
        pending.deadline.cancel()
        pending.answer.set_result(message)

    # -- start and end

    def _spawn(self) -> None:
        ours: socket.socket | None = None
        try:
            self._child, ours = children.start("tierd.gpu", str(self._ordinal), kind=socket.SOCK_STREAM)
            self._socket, self._pidfd = ours, os.pidfd_open(self._child.pid)
        except OSError as error:
            if ours is not None:
                ours.close()  # this ends it
            raise TierFailed(
                f"{self._name}: cannot be started ({error}); free memory, processes or descriptors"
            ) from error
        asyncio.get_running_loop().add_reader(ours, self._receive)
        self._reason = ""

    def _lose_patience(self, verb: str, reason: str) -> None:
        self.hung = self.hung or verb
        self._end(reason)

    def _end(self, reason: str, *, kill_after_s: float = 0.0) -> None:
        """Stop all calls to the process."""
        if self._reason:
            return
        self._reason = reason
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._socket.close()
        self._inbox.close()
        self._outbox.clear()
        for pending in self._pending.values():
            pending.deadline.cancel()
        self._burial = loop.create_task(self._bury(kill_after_s))

    async def _bury(self, kill_after_s: float) -> None:
        """Fail all calls when the process is gone. If it stays, tell its owner; copies keep
        waiting."""
        is_gone = kill_after_s > 0 and await _readable(self._pidfd, kill_after_s)
        if not is_gone:
            self._child.kill()
            is_gone = await _readable(self._pidfd, REAP_S)
        if is_gone:
            self._reason += f"; status {self._child.wait()}"
            self._gone()
        else:
            self._reason += f"; pid {self.pid} does not end, its copy targets stay in use until it does"
            self._fail(copies=False)
            self._turns.release()  # copies may hold every turn; each waiting call fails and passes this one on
            asyncio.get_running_loop().add_reader(self._pidfd, self._gone)
        if self._is_missed:
            self._on_death(self._reason)

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._child.wait()
        self._fail(copies=True)

    def _fail(self, *, copies: bool) -> None:
        """Fail waiting calls; copies only after all writes have stopped."""
        for number, pending in list(self._pending.items()):
            if copies or not pending.is_copy:
                del self._pending[number]
                pending.answer.set_exception(TierFailed(self._reason))


async def _settled(answer: asyncio.Future[Message]) -> bool:
    """Wait for the answer in any case; returns whether the caller was cancelled meanwhile."""
    is_cancelled = False
    while not answer.done():
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            is_cancelled = True
    return is_cancelled


def _checked(message: Message) -> Message:
    """An answer without an error. Raises the answer's error."""
    if "error" in message.body:
        name, text = message.body["error"]
        kind = getattr(errors, name, None)
        raise (kind if isinstance(kind, type) and issubclass(kind, TierdError) else TierFailed)(text)
    return message


async def _readable(fd: int, limit_s: float) -> bool:
    """Whether it became readable within limit_s."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _resolve, came)
    try:
        await asyncio.wait([came], timeout=limit_s)
    finally:
        loop.remove_reader(fd)
    return came.done()


def _resolve(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)
