"""One line: a stream socket that carries messages, each after its length (u4, little endian), to and fro in turns.

Purpose: bytes to messages and back on the event loop. Non-purpose: what a message says (calls.py). Invariants: nobody's message is begun to be read
into memory beyond MESSAGE_MAX_BYTES, or for longer than its reader has patience; a client that sends ahead is not read from until what it sent first is taken; the other end's going is told at once,
also in the middle of a call.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from tierd.errors import InvalidArgument
from tierd.server.local_rpc.backlog import NOTED_BYTES, Backlog

HEAD = struct.Struct("<I")
MESSAGE_MAX_BYTES = 8 << 20
"""As of gRPC here."""


class Line(asyncio.Protocol):
    """The daemon's end. on_over: called once, when the other end has gone; backlog: is told what is kept."""

    def __init__(self, on_over: Callable[[], object], backlog: Backlog) -> None:
        self._on_over, self._backlog = on_over, backlog
        self._is_noted = False
        self._buffer = bytearray()
        self._awaited: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_over = False
        self._transport: asyncio.Transport
        self.owes_more = False
        """Whether the next message belongs to the call before it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Whatever the other end does not take at once is waited for."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        """Part of a message, or more than one."""
        self._buffer += data
        self._note()
        if self._awaited is None:
            self._transport.pause_reading()
        else:
            self._wake()

    def eof_received(self) -> bool:
        """The other end has gone: there are no halves of a line."""
        self._end()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """So it has."""
        self._end()

    def pause_writing(self) -> None:
        """The other end does not read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has."""
        self._writable.set()
        self._note()

    async def read(self, *, patience_s: float) -> bytes | None:
        """The next message; None when the other end has gone. Raises InvalidArgument for one too long, or begun and not ended within patience_s, after
        which nothing more can be read."""
        while (end := self._whole()) is None:
            if self._is_over:
                return None
            if not self._buffer:
                await self._more()
                continue
            try:
                async with asyncio.timeout(patience_s):
                    while self._whole() is None and not self._is_over:
                        await self._more()
            except TimeoutError:
                raise InvalidArgument(
                    f"line: {len(self._buffer)} bytes of a message, and no end of it within {patience_s:g} s; send it at once"
                ) from None
        raw = bytes(memoryview(self._buffer)[HEAD.size : end])
        del self._buffer[:end]
        self._note()
        return raw

    def write(self, message: bytes) -> None:
        """Gives a message away."""
        self._transport.write(HEAD.pack(len(message)) + message)
        self._note()

    @property
    def has_more(self) -> bool:
        """Whether bytes have come that nobody has read."""
        return bool(self._buffer)

    @property
    def is_taken(self) -> bool:
        """Whether the other end has taken what was written, or has gone."""
        return self._writable.is_set()

    async def taken(self) -> None:
        """Waits until it is."""
        await self._writable.wait()

    def close(self) -> None:
        """Ends the line; what was written and not taken is lost. Safe to call twice."""
        self._is_over = True
        self._transport.abort()
        self._buffer.clear()
        self._note()

    def end(self) -> None:
        """Ends the line as if the other end had gone."""
        self._is_noted = False
        self._transport.abort()

    async def _more(self) -> None:
        """Waits for bytes, or the end."""
        self._transport.resume_reading()
        self._awaited = asyncio.get_running_loop().create_future()
        try:
            await self._awaited
        finally:
            self._awaited = None

    def _whole(self) -> int | None:
        """Where the first message ends, if it is here."""
        if len(self._buffer) < HEAD.size:
            return None
        length: int = HEAD.unpack_from(self._buffer)[0]
        if length > MESSAGE_MAX_BYTES:
            raise InvalidArgument(f"line: a message of {length} bytes is above the {MESSAGE_MAX_BYTES}; send less")
        return HEAD.size + length if len(self._buffer) >= HEAD.size + length else None

    def _note(self) -> None:
        """Tells the backlog, where it is worth it, or was."""
        kept = len(self._buffer)
        if not self._writable.is_set():
            kept += self._transport.get_write_buffer_size()
        if kept > NOTED_BYTES or self._is_noted:
            self._is_noted = kept > NOTED_BYTES
            self._backlog.note(self.end, kept)

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _end(self) -> None:
        self._writable.set()
        if not self._is_over:
            self._is_over = True
            self._wake()
            self._on_over()
