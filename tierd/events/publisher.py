"""The publisher: the sockets, and the only thread that uses them and the router view.

It sends events as numbered messages, and replays. feed.py decides when, router_view.py decides
which events are sent. It never waits for a subscriber: a slow one loses messages and sees the gap
in their numbers. Replay buffers and subscriber queues are bounded in messages and bytes. A replay
that starts later than requested starts with "cleared". Numbers begin at the wall clock, so a new
life of the daemon shows as a gap.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import structlog

from tierd.config import EventsConfig
from tierd.errors import ConfigError
from tierd.events.payloads import END, Batch, Cleared, Event, Stored, encode
from tierd.events.router_view import EVENT_TOKENS, RouterView

log = structlog.get_logger(__name__)

FIRST_BEAT_S, LAST_BEAT_S = 1.0, 3600.0
"""An empty message ends a silence of FIRST_BEAT_S, then one twice as long, and so on. So a
subscriber learns that it missed the last message."""
RANK = 0
"""Rank of data parallelism: a daemon serves all ranks alike."""
REPLAY_BYTES = 64 << 20
"""Maximum bytes kept for replays, in any number of messages."""
QUEUE_MESSAGES = 256
"""Messages queued for a subscriber that does not read; further ones are lost to it."""
LINGER_MS = 200
"""Time for the last messages at the end."""
BACKLOG = 16

Work = Callable[[RouterView], list[Event]]
"""Applies events to the router view; returns the events to send."""


class Publisher:
    """One per daemon. Any thread may call `do`; the work runs in the publisher's thread."""

    def __init__(self, settings: EventsConfig, view: RouterView) -> None:
        """Binds, and starts to serve replays. Raises ConfigError."""
        self._settings, self._view = settings, view
        self._zmq = _load()
        self._context = self._zmq.Context()
        self._topic = settings.topic.encode()
        self._next = time.time_ns() // 1000
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._beat_s = FIRST_BEAT_S
        self._work: SimpleQueue[tuple[Work, Future[int]] | None] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bind()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def do(self, work: Work) -> Future[int]:
        """Applies the work and sends its events; the number of messages sent."""
        done: Future[int] = Future()
        self._give((work, done))
        return done

    def close(self, *, timeout_s: float) -> None:
        """Tells routers to clear, and ends, within the timeout."""
        self.do(RouterView.clear)
        self._give(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("KV events: publisher did not end in time", timeout_s=timeout_s)

    def _give(self, item: tuple[Work, Future[int]] | None) -> None:
        self._work.put(item)
        os.eventfd_write(self._bell, 1)

    def _bind(self) -> None:
        zmq, settings = self._zmq, self._settings
        self._out = self._context.socket(zmq.PUB)
        self._out.set_hwm(QUEUE_MESSAGES)
        self._replays = self._context.socket(zmq.ROUTER) if settings.replay_bind else None
        if self._replays is not None:
            self._replays.set_hwm(settings.buffer + 2)  # a whole replay, its "cleared" and its end
        pairs = [(self._out, "bind", settings.bind), (self._replays, "replay_bind", settings.replay_bind)]
        for socket, name, address in pairs:
            if socket is None:
                continue
            socket.setsockopt(zmq.BACKLOG, BACKLOG)
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.setsockopt(zmq.IPV6, int("[" in address))  # not for all addresses: a machine may lack IPv6
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise ConfigError(
                    f"events.{name}: {address} cannot be bound ({error}); choose another address"
                ) from error

    def _run(self) -> None:
        zmq, poller = self._zmq, self._zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        is_open = True
        while is_open:
            try:
                ready = dict(poller.poll(1000 * self._beat_s))
                if not ready:
                    self._emit([])
                    self._beat_s = min(2 * self._beat_s, LAST_BEAT_S)
                if self._replays in ready:
                    self._replay()
                if self._bell in ready:
                    os.eventfd_read(self._bell)
                    is_open = self._work_off()
            except Exception:
                log.exception("KV events: a request or a message failed")
        self._context.destroy(linger=LINGER_MS)

    def _work_off(self) -> bool:
        """Does all waiting work; False: the publisher is to end."""
        while not self._work.empty():
            item = self._work.get_nowait()
            if item is None:
                return False
            work, done = item
            try:
                done.set_result(self._send(work(self._view)))
            except Exception as error:  # the caller starts again from the beginning
                log.exception("KV events: not published")
                done.set_exception(error)
        return True

    def _send(self, events: Sequence[Event]) -> int:
        count = 0
        for part in parts(events):
            self._emit(part)
            self._beat_s = FIRST_BEAT_S
            count += 1
        return count

    def _emit(self, events: Sequence[Event]) -> None:
        payload = encode(Batch(time.time(), tuple(events), RANK), shape=self._settings.format)
        self._keep(self._next, payload)
        self._out.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)
        self._next += 1

    def _keep(self, number: int, payload: bytes) -> None:
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._settings.buffer or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self) -> None:
        assert self._replays is not None
        who, *rest = self._replays.recv_multipart(self._zmq.NOBLOCK)
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            log.warning("KV events: malformed replay request", frames=[len(frame) for frame in rest])
            return
        for number, payload in self._since(int.from_bytes(rest[1], "big")):
            self._answer(who, self._topic, number.to_bytes(8, "big"), payload)
        self._answer(who, b"", END, b"")

    def _answer(self, *frames: bytes) -> None:
        assert self._replays is not None
        with contextlib.suppress(self._zmq.Again):  # the client does not read; it will see the gap
            self._replays.send_multipart((frames[0], b"", *frames[1:]), self._zmq.NOBLOCK)

    def _since(self, start: int) -> Iterator[tuple[int, bytes]]:
        oldest = self._kept[0][0] if self._kept else self._next
        if start < oldest:
            yield oldest - 1, encode(Batch(time.time(), (Cleared(),), RANK), shape=self._settings.format)
        yield from (pair for pair in self._kept if pair[0] >= start)


def parts(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Splits events into messages of bounded size."""
    part: list[Event] = []
    weight = 0
    for event in events:
        weight += _weight(event)
        if part and weight > EVENT_TOKENS:
            yield part
            part, weight = [], _weight(event)
        part.append(event)
    if part:
        yield part


def _weight(event: Event) -> int:
    if isinstance(event, Cleared):
        return 1
    return len(event.hashes) + (len(event.tokens) if isinstance(event, Stored) else 0)


def _load() -> ModuleType:
    try:
        import zmq  # noqa: PLC0415  # an extra: only users of events pay for it
    except ImportError as error:
        raise ConfigError(
            "events.enabled: KV events need pyzmq, which is not installed; pip install 'tierd[events]', or turn them off"
        ) from error
    found: Any = zmq
    return found  # type: ignore[no-any-return]
