"""`python -m tierd.hashing FD`: the hash process, started by `tierd.hashing.process` and by nobody else.

Purpose: sums of pages where they lie, soon after they are written. Non-purpose: whose they are. Invariants: it maps memory for reading alone; it ends with its socket and with its parent; signals
that a terminal or a supervisor sends to all processes of a daemon are the daemon's to answer. Imports are few: it is to be there when the first client comes.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import sys
from contextlib import suppress

from tierd import children
from tierd.hashing import wire
from tierd.hashing.place import lie_down_beside
from tierd.hashing.work import Work

NICE = 5
"""Behind the daemon's loop, which answers clients, where there are not processors enough."""
PAUSE_S, PAUSE_LIMIT_S = 50e-6, 5e-3
"""Between two looks at what is written; doubled while nothing is. A copy of 2 MiB takes three times the first."""
MESSAGES_AT_ONCE = 256
"""Are taken before it goes on: each may be of a put that is smaller than what is at its turn."""
PR_SET_TIMERSLACK, SLACK_NS = 29, 1000
"""A pause shall not take twice as long as it should."""


def main() -> None:
    """Serves until the socket ends."""
    peer, work, pause_s = children.begun_by_daemon(int(sys.argv[1])), Work(), PAUSE_S
    daemon, has_work = os.getppid(), False
    with suppress(OSError):  # a sandbox may refuse it
        os.nice(NICE)
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
    peer.send(wire.READY)
    while True:
        for answer in work.turn():
            peer.send(answer)
        if has_work and not work:
            lie_down_beside(daemon)
        has_work = bool(work)
        wait_s = None if not work else pause_s if work.is_idle else 0.0
        pause_s = min(2 * pause_s, PAUSE_LIMIT_S) if work.is_idle else PAUSE_S
        for _ in range(MESSAGES_AT_ONCE):
            if not select.select([peer], [], [], wait_s)[0]:
                break
            if not take(peer, work):
                return
            wait_s, pause_s = 0.0, PAUSE_S


def take(peer: socket.socket, work: Work) -> bool:
    """The next message; False: there will be none."""
    message, descriptors, *_ = socket.recv_fds(peer, wire.MESSAGE_BYTES, 1)
    kind = message[:1]
    if kind == wire.HASH:
        work.add(*wire.asked(message))
    elif kind == wire.ATTACH and descriptors:
        memory, length_bytes = wire.attached(message)
        work.attach(memory, descriptors[0], length_bytes)
    elif kind in (wire.DETACH, wire.WRITTEN, wire.DROP):
        {wire.DETACH: work.detach, wire.WRITTEN: work.written, wire.DROP: work.drop}[kind](wire.subject(message))
    return bool(message)


with suppress(BrokenPipeError, ConnectionResetError):  # the daemon has gone
    main()
