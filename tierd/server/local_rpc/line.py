"""One line: a stream socket of messages in turns, each after its length (4 bytes, little-endian).

It turns bytes into messages and back on the event loop; calls.py interprets them. A message is read
only up to MESSAGE_MAX_BYTES, and within its reader's patience. While a client sends ahead, its
first message is taken before more is read. The other end's close is reported at once, also during a
call.
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
"""The same limit as gRPC's here."""


class Line(asyncio.Protocol):
    """The daemon's end. on_over: called once when the other end has closed. backlog: counts the
    kept bytes."""

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
        """Sets the limit of unsent bytes to 0, so writes wait for the other end."""
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
        """The other end has closed. Half-closed lines are not supported."""
        self._end()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has closed."""
        self._end()

    def pause_writing(self) -> None:
        """The other end does not read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The other end reads again."""
        self._writable.set()
        self._note()

    async def read(self, *, patience_s: float) -> bytes | None:
        """The next message, or None if the other end has closed. The line cannot be read after an
        error.

        Raises InvalidArgument for a message that is too long, or does not end within patience_s."""
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
                    f"local RPC: {len(self._buffer)} bytes of an incomplete message in {patience_s:g} s; send it whole"
                ) from None
        raw = bytes(memoryview(self._buffer)[HEAD.size : end])
        del self._buffer[:end]
        self._note()
        return raw

    def write(self, message: bytes) -> None:
        """Sends a message."""
        self._transport.write(HEAD.pack(len(message)) + message)
        self._note()

    @property
    def has_more(self) -> bool:
        """Whether unread bytes have arrived."""
        return bool(self._buffer)

    @property
    def is_taken(self) -> bool:
        """Whether the other end has taken all written bytes, or has closed."""
        return self._writable.is_set()

    async def taken(self) -> None:
        """Waits until `is_taken`."""
        await self._writable.wait()

    def close(self) -> None:
        """Ends the line. Bytes not taken yet are lost. Safe to call twice."""
        self._is_over = True
        self._transport.abort()
        self._buffer.clear()
        self._note()

    def end(self) -> None:
        """Ends the line as if the other end had closed."""
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
        """The end of the first message, if it is complete."""
        if len(self._buffer) < HEAD.size:
            return None
        length: int = HEAD.unpack_from(self._buffer)[0]
        if length > MESSAGE_MAX_BYTES:
            raise InvalidArgument(
                f"local RPC: a message of {length} bytes is above the limit of {MESSAGE_MAX_BYTES}; send less"
            )
        return HEAD.size + length if len(self._buffer) >= HEAD.size + length else None

    def _note(self) -> None:
        """Reports kept bytes to the backlog, if there are many, or were."""
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
