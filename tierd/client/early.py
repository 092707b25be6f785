"""Early copies: a get begins to copy while the daemon is asked what holds now: what the last get of the same sequence gave, or what the daemon tells that
it is about to verify.

    last answer ──▶ Known ──┐
                            ├─▶ copied while Acquire is under way ──▶ what the answer names alike is there already
    preview ────────────────┘

Purpose: a call that costs a get little beyond its copy, and a verification that costs it nothing. Non-purpose: the call, the look at the generation words
afterwards (lease.py). Invariants: nothing is served because of it: the answer alone says what is leased, and a block counts as copied only where the answer
has the very same handle, of the same daemon, whose generation is never used twice; so its page held these bytes from before the copy until the look that
follows it. Of a daemon that has gone nothing is known.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.client import buffers
from tierd.client.mapping import Segment, still_hold
from tierd.client.protocol import every, leased
from tierd.client.session import Session, by_place
from tierd.client.values import Group
from tierd.core.model import HANDLE, Need, StructArray
from tierd.errors import InvalidArgument, TierdError

SEQUENCES_LIMIT, HANDLES_LIMIT = 1024, 1 << 16
"""Of which handles are remembered: 40 bytes each."""
_NONE: StructArray = np.zeros(0, dtype=HANDLE)
Key = tuple[int, tuple[int, ...], bytes]
"""Of a sequence: namespace, ranks, hash of the last block, which covers those before it."""


class Known:
    """Handles by sequence, of one link; the longest unused go first. Threads may share it."""

    def __init__(self) -> None:
        self._handles: OrderedDict[Key, StructArray] = OrderedDict()
        self._count = 0
        self._turn = threading.Lock()

    def note(self, group: Group, handles: StructArray) -> None:
        """All of a sequence has been given, as HANDLE [n]."""
        key = _key(group)
        if key is None or len(handles) != len(group.hashes) * max(1, len(group.ranks)):
            return
        with self._turn:
            self._drop(key)
            self._handles[key] = handles
            self._count += len(handles)
            while len(self._handles) > SEQUENCES_LIMIT or self._count > HANDLES_LIMIT:
                self._drop(next(iter(self._handles)))

    def find(self, group: Group) -> StructArray | None:
        """What was given last."""
        key = _key(group)
        return self._handles.get(key) if key is not None else None

    def _drop(self, key: Key) -> None:
        handles = self._handles.pop(key, None)
        self._count -= len(handles) if handles is not None else 0


class EarlyCopy:
    """The copy of one get. known: what the last get gave; deadline: of time.monotonic(). handles: what was copied, from the first block on."""

    is_due = False

    def __init__(self, session: Session, group: Group, out: Any, *, known: StructArray | None, deadline: float) -> None:
        self.session, self._group, self._out = session, group, out
        self._known, self._deadline = known, deadline
        self.handles: StructArray = _NONE

    def run(self) -> None:
        """Copies what is known."""
        if self._known is not None:
            self._copy(self._known)

    def hear(self, reply: pb.AcquireReply) -> None:
        """Copies what the daemon looks at meanwhile."""
        handles = leased(reply, [self._group]).groups[0].handles.reshape(-1) if reply.groups else _NONE
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:  # to ask and not to wait would end the session
            return
        with contextlib.suppress(TierdError):  # the answer's own will say why
            self.session.map(handles, timeout_s=left_s)
            self._copy(handles)

    def _copy(self, handles: StructArray) -> None:
        """Once; nothing where a page has gone, or the buffers do not fit."""
        pages = _pages(self.session, handles) if len(handles) and not len(self.handles) else None
        if pages is None:
            return
        try:
            targets = buffers.pieces(self._out, list(map(len, pages.data)), writable=True)
        except InvalidArgument:  # the answer may be shorter, and fit
            return
        buffers.copy_all(targets, pages.data, at=pages.at)
        self.handles = handles

    def covers(self, handles: StructArray) -> int:
        """How many of these blocks, from the first on, need not be copied."""
        if len(handles) < len(self.handles) and isinstance(self._out, list | tuple):
            return 0  # a buffer may be there twice, and what was copied last is no part of the answer
        count = min(len(handles), len(self.handles))
        mine, given = self.handles[:count], handles[:count]
        if mine.tobytes() == given.tobytes():  # numpy compares field by field, which takes thirty times as long
            return count
        return int(np.argmin(mine == given))


def _key(group: Group) -> Key | None:
    if group.need is not Need.PREFIX or not len(group.hashes):
        return None
    return group.namespace.id, tuple(group.ranks), group.hashes[-1].tobytes()


class _Pages(NamedTuple):
    """The bytes of pages, and their addresses."""

    data: list[buffers.Bytes]
    at: list[int]


def _pages(session: Session, handles: StructArray) -> _Pages | None:
    """Those of the handles, if all of them are mapped and still what they were."""
    parts = by_place(handles)
    out = _Pages([buffers.NO_BYTES] * len(handles), [0] * len(handles))
    for place, rows in parts:
        segment, those = session.segment(place), handles if len(parts) == 1 else handles[rows]
        if not isinstance(segment, Segment) or not every(still_hold(segment.words, those)):
            return None
        starts, lengths = those["offset"].tolist(), those["length"].tolist()
        data = [segment.data[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        at = [segment.address + start for start in starts]
        if len(parts) == 1:
            return _Pages(data, at)
        for row, page, address in zip(np.arange(len(handles))[rows].tolist(), data, at, strict=True):
            out.data[row], out.at[row] = page, address
    return out
