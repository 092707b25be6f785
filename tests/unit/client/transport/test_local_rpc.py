"""The client's end of lines, over a socket pair whose other end the test controls."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tierd.client.transport.local_rpc import Line, LocalRpcPool
from tierd.errors import OperatorError, Overloaded

SOON_S = 20.0


class Given:
    """A session that gives this many lines. ends: the daemon's ends."""

    def __init__(self, lines: int, *, gives: int = 100) -> None:
        self.lines, self._gives = lines, gives
        self.ends: list[socket.socket] = []

    def line(self, *, timeout_s: float) -> socket.socket:
        """Gives one more line."""
        if len(self.ends) >= self._gives:
            raise Overloaded("lines: too many")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.ends.append(theirs)
        return ours


@pytest.fixture
def pair() -> Iterator[tuple[Line, socket.socket]]:
    """A line and its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    line = Line(ours)
    yield line, theirs
    line.close()
    theirs.close()


def soon() -> float:
    """A deadline that no test reaches."""
    return time.monotonic() + SOON_S


@pytest.mark.parametrize("length", [0, 1, 65_532, 65_533, 3 << 20])
def test_answers_of_any_length(pair: tuple[Line, socket.socket], length: int) -> None:
    """An answer arrives whole, at any length and in any pieces."""
    line, theirs = pair
    answer = bytes(range(256)) * (length // 256) + bytes(length % 256)

    def give() -> None:
        for part in (struct.pack("<I", length)[:3], struct.pack("<I", length)[3:] + answer):
            theirs.sendall(part)

    thread = threading.Thread(target=give)
    thread.start()
    assert line.ask(b"x", deadline=soon()) == answer
    thread.join()
    assert theirs.recv(100) == struct.pack("<I", 1) + b"x"


def test_the_deadline_of_an_answer_that_does_not_come(pair: tuple[Line, socket.socket]) -> None:
    """A call ends at its deadline: with no answer, half an answer, a full socket or a past deadline."""
    line, theirs = pair
    with pytest.raises(TimeoutError):
        line.ask(b"x", deadline=time.monotonic() + 0.02)
    theirs.sendall(struct.pack("<I", 10) + b"half")
    with pytest.raises(TimeoutError):
        line.ask(b"x", deadline=time.monotonic() + 0.02)
    with pytest.raises(TimeoutError):
        line.ask(b"x" * (7 << 20), deadline=time.monotonic() + 0.02)
    with pytest.raises(TimeoutError):
        line.ask(b"x", deadline=time.monotonic() - 1)


@pytest.mark.parametrize("said", [b"", b"\x05\x00", b"\x05\x00\x00\x00abc"])
def test_a_daemon_that_goes(pair: tuple[Line, socket.socket], said: bytes) -> None:
    """A partial answer raises an error."""
    line, theirs = pair
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises((EOFError, OSError)):
        line.ask(b"x", deadline=soon())


def test_a_daemon_that_has_gone_signals_nothing(pair: tuple[Line, socket.socket]) -> None:
    """A send to a closed peer raises an error and no SIGPIPE, which would kill the process by default."""
    line, theirs = pair
    theirs.close()
    seen, before = list[int](), signal.signal(signal.SIGPIPE, lambda number, _: seen.append(number))
    try:
        with pytest.raises(OSError):
            line.send(b"x", deadline=soon())
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert seen == []


@pytest.mark.parametrize("said", [b"\x01\x00\x00\x00abc", b"\xff\xff\xff\x7f"])
def test_what_is_no_answer(pair: tuple[Line, socket.socket], said: bytes) -> None:
    """Bytes beyond one answer, and an answer above the limit, raise OperatorError."""
    line, theirs = pair
    theirs.sendall(said)
    with pytest.raises(OperatorError):
        line.ask(b"x", deadline=soon())


def test_messages_that_come_at_once(pair: tuple[Line, socket.socket]) -> None:
    """Messages that arrive in one read are received one by one, also if the last one is incomplete."""
    line, theirs = pair
    said = [b"first", b"", b"third" * 20_000]
    raw = b"".join(struct.pack("<I", len(each)) + each for each in said)
    theirs.sendall(raw[:-9])
    assert [line.receive(deadline=soon()) for _ in said[:2]] == said[:2]
    theirs.sendall(raw[-9:])
    assert line.receive(deadline=soon()) == said[2]
    line.check_over()


def test_as_many_lines_as_were_told() -> None:
    """A pool opens at most its limit; a returned line is reused, and a dropped line makes room."""
    given = Given(2)
    lines = LocalRpcPool(given)  # type: ignore[arg-type]
    first, second = lines.take(timeout_s=1), lines.take(timeout_s=1)
    assert first is not None and second is not None and lines.take(timeout_s=1) is None
    lines.rest(first)
    assert lines.take(timeout_s=1) is first
    lines.drop(second)
    assert given.ends[1].recv(1) == b""
    assert lines.take(timeout_s=1) not in (None, first, second)
    lines.close()
    assert [end.recv(1) for end in given.ends] == [b""] * 3
    assert lines.take(timeout_s=1) is None
    for end in given.ends:
        end.close()


def test_a_daemon_that_gives_no_line() -> None:
    """If the daemon gives no line, the pool returns None, and the next call asks again."""
    given = Given(2, gives=0)
    lines = LocalRpcPool(given)  # type: ignore[arg-type]
    assert lines.take(timeout_s=1) is None
    given._gives = 1
    assert lines.take(timeout_s=1) is not None
    lines.close()
    given.ends[0].close()


def test_a_line_that_comes_after_the_end_is_closed() -> None:
    """A line that arrives after the pool was closed is closed, and its caller gets None."""
    given = Given(2)
    lines, real = LocalRpcPool(given), given.line  # type: ignore[arg-type]

    def line(**given: Any) -> socket.socket:
        ours = real(**given)
        lines.close()
        return ours

    given.line = line  # type: ignore[method-assign]
    assert lines.take(timeout_s=1) is None
    assert given.ends[0].recv(1) == b""
    given.ends[0].close()


def test_close_ends_a_call_in_progress() -> None:
    """Close ends a thread's wait at once; the thread closes its line itself, so no descriptor is reused."""
    given, errors = Given(1), []
    lines = LocalRpcPool(given)  # type: ignore[arg-type]
    line = lines.take(timeout_s=1)
    assert line is not None

    def ask() -> None:
        try:
            line.ask(b"x", deadline=soon())
        except (EOFError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert given.ends[0].recv(5)
    lines.close()
    thread.join(SOON_S)
    assert len(errors) == 1
    assert line._socket.fileno() >= 0, "closed under the thread that waits on it"
    lines.drop(line)
    assert line._socket.fileno() < 0
    given.ends[0].close()
