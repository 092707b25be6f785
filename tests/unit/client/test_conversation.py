"""The client's end of conversations over a gRPC that says nothing: what becomes of streams and of their deadlines."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tierd.client.conversation import Conversation, Conversations, Watch

SOON_S = 20.0
ROUNDS, BEGUN = 10, 2000


class Silent:
    """gRPC's stub and its call in one. is_cancelled: set by cancel; asks: what is to be sent."""

    def __init__(self) -> None:
        self.is_cancelled = threading.Event()
        self.asks: Iterator[Any] = iter(())

    def Converse(self, asks: Iterator[Any], *, metadata: Any) -> Silent:  # noqa: N802 - gRPC's name for it
        """A call."""
        call = Silent()
        self.asks = call.asks = asks
        return call

    def add_callback(self, _callback: Callable[[], None]) -> bool:
        """It never ends."""
        return True

    def cancel(self) -> None:
        """Notes it."""
        self.is_cancelled.set()


def begun(watch: Watch, timeout_s: float) -> Conversation:
    """A call under watch."""
    stream = Conversation(Silent(), ())
    stream.deadline = time.monotonic() + timeout_s
    watch.add(stream)
    return stream


def is_cancelled(stream: Conversation) -> bool:
    """Whether its call is, soon."""
    return bool(stream._stream.is_cancelled.wait(SOON_S))


def test_deadlines_are_kept_while_calls_begin() -> None:
    """However many streams are new while those are looked for whose time is over, the next deadline is kept too."""
    watch, interval = Watch(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(ROUNDS):
            for stream in [Conversation(Silent(), ()) for _ in range(BEGUN)]:
                stream.deadline = time.monotonic() + 0.0001
                watch.add(stream)
    finally:
        sys.setswitchinterval(interval)
    assert is_cancelled(begun(watch, 0.001))


def test_deadlines_are_kept_after_a_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process had no thread to give for the first call, the second one's deadline is kept."""
    watch = Watch()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as lack:
        lack.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            begun(watch, 0.001)
    assert is_cancelled(begun(watch, 0.001))


def test_an_answer_in_the_moment_of_its_deadline() -> None:
    """A stream that was cancelled as its answer came is nobody's next one, and makes room for another."""
    streams = Conversations(Silent(), (), limit=1)
    first = streams.take()
    assert first is not None and streams.take() is None
    first.deadline = 1.0
    first.check(2.0)
    streams.rest(first)
    second = streams.take()
    assert second not in (None, first)


def test_a_stream_that_is_collected_ends() -> None:
    """A client that is dropped without close leaves no thread of gRPC waiting for what it would say."""
    stub = Silent()
    stream = Conversation(stub, ())
    waiter = threading.Thread(target=lambda: list(stub.asks), daemon=True)
    waiter.start()
    assert math.isinf(stream.deadline) and waiter.is_alive()
    del stream
    waiter.join(SOON_S)
    assert not waiter.is_alive()
