"""Frames between the daemon and its GPU process, on real sockets."""

from __future__ import annotations

import os
import socket
import threading

import numpy as np
import pytest

from tests.unit.gpu.processes import pieces_of
from tierd.errors import InvalidArgument, TierFailed
from tierd.gpu import protocol
from tierd.gpu.protocol import (
    HEAD,
    MESSAGE_BYTES,
    PIECE,
    PIECES_MAX,
    Inbox,
    frame,
    pack_pieces,
    pack_sums,
    unpack_pieces,
    unpack_sums,
)


def test_messages_are_whole_wherever_they_are_cut() -> None:
    """Two messages sent byte by byte arrive as two, each with its last byte; then comes the end."""
    ours, theirs = socket.socketpair()
    bodies = [{"id": 1, "pieces": b"\0" * 300}, {"id": 2}]
    packed = b"".join(map(frame, bodies))
    inbox, got = Inbox(), []
    with ours, theirs:
        for i in range(len(packed)):
            theirs.sendall(packed[i : i + 1])
            whole = inbox.receive(ours)
            got += [(i + 1, message.body) for message in whole]
        theirs.close()
        assert not inbox.is_ended
        assert inbox.receive(ours) == []
        assert inbox.is_ended
    assert got == [(len(frame(bodies[0])), bodies[0]), (len(packed), bodies[1])]


def test_descriptors_come_with_their_message() -> None:
    """Each message has its own descriptors, also when a read returns many messages. They are
    close-on-exec, and the inbox closes those that no caller takes."""
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    files = [os.memfd_create(f"file{i}") for i in range(3)]
    with ours, theirs:
        for i, sent in enumerate(([], files[:1], [], files[1:])):
            socket.send_fds(theirs, [frame({"id": i}, descriptors=len(sent))], sent)
        socket.send_fds(theirs, [frame({"id": 4}, descriptors=1)[:-1]], files[:1])
        inbox, messages = Inbox(), []
        while len(messages) < 4:
            messages += inbox.receive(ours)
        names = [[os.readlink(f"/proc/self/fd/{fd}").split()[0] for fd in message.descriptors] for message in messages]
        assert names == [[], ["/memfd:file0"], [], ["/memfd:file1", "/memfd:file2"]]
        assert not any(os.get_inheritable(fd) for message in messages for fd in message.descriptors)
        for message in messages:
            message.close()
        while len(os.listdir("/proc/self/fd")) < before + len(files) + 1:
            inbox.receive(ours)
        inbox.close()
        assert len(os.listdir("/proc/self/fd")) == before + len(files)
    for fd in files:
        os.close(fd)


@pytest.mark.parametrize(
    "sent",
    [
        HEAD.pack(MESSAGE_BYTES + 1, 0),
        HEAD.pack(1, 99),
        HEAD.pack(1, 0) + b"\xc1",
        HEAD.pack(1, 0) + b"\x01",
        HEAD.pack(2, 0) + b"\x01\x01",
    ],
)
def test_what_is_no_message_is_refused(sent: bytes) -> None:
    """A length or descriptor count beyond the bounds, or a body that is no msgpack map, is TierFailed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        with pytest.raises(TierFailed, match="GPU process: (a|malformed) message"):
            Inbox().receive(ours)


def test_a_message_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of exactly the bound arrives; a longer one is not sent."""
    monkeypatch.setattr(protocol, "MESSAGE_BYTES", 1 << 20)
    longest = {"id": 1, "pieces": b"x" * ((1 << 20) - len(frame({"id": 1, "pieces": b""})) + HEAD.size - 4 + 1)}
    while len(packed := frame(longest)) != (1 << 20) + HEAD.size:
        longest["pieces"] += b"x" * ((1 << 20) + HEAD.size - len(packed))
    ours, theirs = socket.socketpair()
    inbox, got = Inbox(), []
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(packed,))
        sender.start()
        while not got:
            got = inbox.receive(ours)
        sender.join()
    assert got[0].body == longest
    with pytest.raises(InvalidArgument, match="the limit is 1048576"):
        frame(longest | {"pieces": longest["pieces"] + b"x"})


def test_pieces_have_one_shape() -> None:
    """PIECE[n] comes back unchanged; another dtype, two dimensions or too many pieces are refused."""
    pieces = pieces_of()
    assert np.array_equal(unpack_pieces(pack_pieces(pieces)), pieces)
    assert PIECE.itemsize == 32
    for wrong in (np.zeros(2, "<u8"), np.zeros((2, 2), PIECE), np.zeros(PIECES_MAX + 1, PIECE)):
        with pytest.raises(InvalidArgument, match="pieces"):
            pack_pieces(wrong)


@pytest.mark.parametrize("counts", [(), (0,), (3, 0, 1), (0, 0)])
def test_slice_tables_come_back(counts: tuple[int, ...]) -> None:
    """The same tables come back, empty ones among them."""
    tables = [np.arange(count, dtype=np.uint64) + 2**63 for count in counts]
    got = unpack_sums(pack_sums(tables))
    assert [table.tolist() for table in got] == [table.tolist() for table in tables]
