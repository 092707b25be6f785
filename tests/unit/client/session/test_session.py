"""The client's end of the session socket, against a socket whose other end the test controls."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator

import msgpack
import numpy as np
import pytest

from tests.unit.client.conftest import CLASS_BYTES, PAGES, Memory
from tierd.client.connect import forks
from tierd.client.connect.target import LocalTarget
from tierd.client.session.mapping import MappedSegment, map_segment
from tierd.client.session.session import Session, connect_session
from tierd.client.session.session_socket import _say_goodbye
from tierd.core.formats.model import HANDLE
from tierd.errors import (
    DeadlineExceeded,
    NotFound,
    OperatorError,
    Overloaded,
    SessionLost,
    TierFailed,
    Unavailable,
    Unsupported,
)

SOON_S = 5.0


@pytest.fixture
def ends() -> Iterator[tuple[Session, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    session = Session(ours, {"session": 5, "token": "5.x"})
    yield session, theirs
    session.close()
    theirs.close()


def answer(theirs, reply, fds=()):
    """Sends a reply from the other end."""
    socket.send_fds(theirs, [msgpack.packb(reply)], list(fds))


def handles():
    found = np.zeros(1, dtype=HANDLE)
    found["segment"] = 1
    return found


def test_letting_go_never_waits(ends):
    """Messages that do not fit into a full socket are queued, and sent when there is room."""
    session, theirs = ends
    sent = 0
    while not session._unsent:
        session.let_go(leases=[sent])
        sent += 1
    session.let_go(leases=[sent], reservations=[9])
    found = [msgpack.unpackb(theirs.recv(4096)) for _ in range(sent - 1)]
    assert session.is_alive  # this also sends the queued messages
    found += [msgpack.unpackb(theirs.recv(4096)) for _ in range(2)]
    assert [m["leases"] for m in found] == [[i] for i in range(sent + 1)]
    assert (found[-1]["reservations"], found[-1]["reply"]) == ([9], False)


def test_letting_go_of_a_daemon_that_has_gone(ends):
    """A release to a daemon that has ended is not an error."""
    session, theirs = ends
    theirs.close()
    session.let_go(leases=[1])
    assert (session.is_alive, len(session._unsent)) == (False, 0)


def test_a_late_answer_is_never_taken_for_another(ends):
    """A request that times out ends the session, so its late answer never serves another request."""
    session, _theirs = ends
    with pytest.raises(DeadlineExceeded):
        session.ask({"op": "ping"}, timeout_s=0.01)
    assert not session.is_alive
    with pytest.raises(SessionLost):
        session.ask({"op": "ping"}, timeout_s=1)


def test_the_end_is_told_though_a_child_has_a_copy(ends):
    """A session that times out ends for the daemon too, even if a child inherited the descriptor."""
    session, theirs = ends
    theirs.settimeout(SOON_S)
    with session._connection.dup():
        with pytest.raises(DeadlineExceeded):
            session.ask({"op": "ping"}, timeout_s=0.01)
        assert theirs.recv(4096) and theirs.recv(4096) == b""


def test_a_late_line_costs_no_session(ends):
    """A line that arrives late is closed, and the next request still gets its own reply."""
    session, theirs = ends
    with pytest.raises(DeadlineExceeded):
        session.line(timeout_s=0.01)
    assert session.is_alive
    late, other = socket.socketpair()
    with late:
        answer(theirs, {"ok": True}, [late.fileno()])
    answer(theirs, {"ok": True, "own": 1})
    assert session.ask({"op": "ping"}, timeout_s=SOON_S)["own"] == 1
    with other:
        assert other.recv(1) == b""
    assert [msgpack.unpackb(theirs.recv(4096))["op"] for _ in range(2)] == ["line", "ping"]


def test_a_turn_is_waited_for_no_longer_than_a_call_has(ends):
    """A call with little time does not wait for another thread's reply, and does not disturb it."""
    session, theirs = ends
    replies = []
    thread = threading.Thread(target=lambda: replies.append(session.ask({"op": "ping"}, timeout_s=SOON_S)))
    thread.start()
    theirs.recv(4096)
    for ask in (session.line, lambda timeout_s: session.map(handles(), timeout_s=timeout_s)):
        with pytest.raises(DeadlineExceeded):
            ask(timeout_s=0.01)
    assert thread.is_alive()
    answer(theirs, {"ok": True})
    thread.join(SOON_S)
    assert len(replies) == 1


def test_the_end_of_the_daemon(ends):
    """End of file instead of an answer is SessionLost."""
    session, theirs = ends
    theirs.close()
    with pytest.raises(SessionLost):
        session.ask({"op": "ping"}, timeout_s=1)


def test_refusals(ends):
    """A refused map raises the daemon's error, and the session goes on."""
    session, theirs = ends
    answer(theirs, {"ok": False, "error": "NotFound", "message": "segment 1: gone"})
    with pytest.raises(NotFound, match="segment 1: gone"):
        session.map(handles(), timeout_s=1)
    assert session.is_alive


def test_descriptors_are_closed_whatever_comes(ends):
    """Descriptors that arrive with a wrong answer are closed."""
    session, theirs = ends
    before = len(os.listdir("/proc/self/fd"))
    with open("/dev/null", "rb") as file:
        answer(theirs, {"ok": True, "bytes": 1, "writable": False, "catalogue_bytes": 1}, [file.fileno()])
        answer(theirs, {"ok": True, "bytes": 1, "writable": False, "catalogue_bytes": 1}, [file.fileno()] * 3)
        answer(theirs, {"ok": False, "error": "NotFound", "message": "x"}, [file.fileno()] * 2)
    with pytest.raises(Overloaded, match="1 of 2 descriptors"):
        session.map(handles(), timeout_s=1)
    with pytest.raises(OperatorError, match="3 descriptors"):
        session.map(handles(), timeout_s=1)
    with pytest.raises(NotFound):
        session.map(handles(), timeout_s=1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_gpu_that_this_process_has_not(tmp_path):
    """A tier on a GPU that this process lacks is Unsupported, and no descriptor stays open."""
    gpu = {"uuid": "00" * 16, "ordinal": 0}
    tiers = [{"name": "device.0", "gpu": gpu}, {"name": "device.1", "gpu": gpu}, {"name": "host.0"}]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    session, memory = Session(ours, {"session": 5, "token": "5.x", "tiers": tiers}), Memory(tmp_path)
    session.check_gpus("host.0")
    for wanted in ("device", "device.1"):
        with pytest.raises(Unsupported):
            session.check_gpus(wanted)
    before = len(os.listdir("/proc/self/fd"))
    sizes = {"bytes": PAGES * CLASS_BYTES, "catalogue_bytes": memory.catalogue_path.stat().st_size}
    with memory.data.open("rb") as data, memory.catalogue_path.open("rb") as catalogue:
        answer(theirs, {"ok": True, "writable": False} | sizes, [data.fileno(), catalogue.fileno()])
    with pytest.raises(Unsupported):
        session.map(handles(), timeout_s=5)
    session.unmap()
    assert (len(os.listdir("/proc/self/fd")), session.segments.unmapped(handles())) == (before, {(0, 1)})
    session.close()
    theirs.close()


def test_descriptors_are_not_inherited_over_exec(ends, monkeypatch):
    """A program that a worker starts during a map does not inherit the segment's descriptors."""
    session, theirs = ends
    inherited = []

    def look(_, *, data, catalogue, is_writable):
        inherited.extend(map(os.get_inheritable, (data[0], catalogue[0])))
        raise TierFailed("seen")

    monkeypatch.setattr("tierd.client.session.session.map_segment", look)
    with open("/dev/null", "rb") as file:
        answer(theirs, {"ok": True, "bytes": 1, "writable": False, "catalogue_bytes": 1}, [file.fileno()] * 2)
    with pytest.raises(TierFailed, match="seen"):
        session.map(handles(), timeout_s=1)
    assert inherited == [False, False]


def test_unread_descriptors_are_closed_at_the_end(ends):
    """At the end of the session unread descriptors are closed, and the request raises SessionLost."""
    session, theirs = ends
    before = len(os.listdir("/proc/self/fd"))
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(SessionLost, match="has gone"):
        session.ask({"op": "ping"}, timeout_s=1)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_childs_copy_says_no_goodbye():
    """A forked child that closes its copies does not end the parent's session; the parent does."""
    for pid, word in ((os.getppid(), b""), (os.getpid(), msgpack.packb({"op": "bye"}))):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            _say_goodbye(ours, [ours, ours.dup()], pid)
            assert theirs.recv(100) == word


def test_no_session_sockets_elsewhere(monkeypatch):
    """On other systems than Linux a local daemon is Unsupported, with the way to reach one."""
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(Unsupported, match="host:port"):
        connect_session(LocalTarget("/nowhere"), name="t", engine={}, credential=None, timeout_s=1)


def test_a_process_without_descriptors_is_told_so(monkeypatch):
    """A process without free descriptors gets Overloaded with the remedy, which best effort makes a miss."""

    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("tierd.client.session.session.socket.socket", full)
    with pytest.raises(Overloaded, match="ulimit -n"):
        connect_session(LocalTarget("/nowhere"), name="t", engine={}, credential=None, timeout_s=1)


def test_segments_that_nobody_uses_are_swept(ends, tmp_path, monkeypatch):
    """A client that maps many segments keeps those that hold pages, and drops the empty ones."""
    session, theirs = ends
    monkeypatch.setattr("tierd.client.session.segments.SWEEP_SEGMENTS", 2)
    for number, word in ((8, 0), (9, 5)):
        words = np.array([word], dtype=np.uint64)
        data, none = np.zeros(1, np.uint8), memoryview(b"")
        session.segments.add((0, number), MappedSegment(number, 0, data, words, none, none, 1, 1, is_writable=False))
    memory = Memory(tmp_path)
    with open(memory.data, "rb") as data, open(memory.catalogue_path, "rb") as catalogue:
        sizes = {"bytes": PAGES * CLASS_BYTES, "catalogue_bytes": memory.catalogue_path.stat().st_size}
        answer(theirs, {"ok": True, "writable": False} | sizes, [data.fileno(), catalogue.fileno()])
    session.map(handles(), timeout_s=1)
    assert [session.segments.has([(0, number)]) for number in (8, 9, 1)] == [False, True, True]


@pytest.mark.parametrize("reply", [b"", msgpack.packb({}), msgpack.packb([1])])
def test_a_daemon_that_ends_during_hello(tmp_path, reply):
    """End of file or a malformed answer to hello is Unavailable."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "session.sock"))
        listener.listen(1)

        def serve():
            theirs, _ = listener.accept()
            with theirs:
                theirs.recv(4096)
                if reply:
                    theirs.send(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Unavailable, match="without an answer"):
            connect_session(LocalTarget(str(tmp_path)), name="t", engine={}, credential=None, timeout_s=5)
        thread.join()


@pytest.mark.parametrize("segment", [1, 2])
def test_a_foreign_catalogue(tmp_path, segment):
    """Only the segment's own catalogue is accepted."""
    memory = Memory(tmp_path)
    size = memory.catalogue_path.stat().st_size
    with open(memory.data, "rb") as data, open(memory.catalogue_path, "rb") as catalogue:
        files = {"data": (data.fileno(), PAGES * CLASS_BYTES), "catalogue": (catalogue.fileno(), size)}
        if segment == 1:
            mapped = map_segment((0, segment), is_writable=False, **files)
            assert (mapped.is_empty, mapped.data.flags.writeable, len(mapped.words)) == (True, False, PAGES)
        else:
            with pytest.raises(TierFailed, match="another segment's catalogue"):
                map_segment((0, segment), is_writable=False, **files)


def test_a_fork_waits_for_calls_in_flight():
    """A fork begins only when no call is in flight, and a call begins only when no fork runs."""
    forking, order = threading.Event(), []

    def fork():
        forking.set()
        forks._before()
        order.append("fork")
        forks._after_in_parent()

    thread = threading.Thread(target=fork)
    with forks.calling():
        thread.start()
        forking.wait()
        order.append("call")
    thread.join()
    with forks.calling():
        order.append("next")
    assert order == ["call", "fork", "next"]
