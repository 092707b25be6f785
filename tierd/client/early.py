"""Gets that copy before the daemon has answered, or without asking it: what the last get of the same sequence gave, or what the daemon tells that it is about to verify.

                    ┌─▶ copied alone, the words looked at again ──▶ served; the daemon is told by the mailbox
    last answer ──▶ Known
                    └─▶ copied while Acquire is under way ──▶ what the answer names alike is there already
    preview ────────────┘

Purpose: gets that cost little beyond their copy, and a verification that costs them nothing. Non-purpose: the call, the look at the generation words after an answer (lease.py).

Invariants: a block counts as copied only where its page had the very generation of its handle before the copy and after it. A generation is never used twice, and the daemon changes the word, or marks it
retired, in the step in which the page stops being that block's to whoever asks; so an answer, too, would have named this page. Alone a get is made only where the daemon would look at nothing that the client
cannot see: it verifies no later hits (`one_sided` of its hello), answered a moment ago, and takes the word about it after the last look, which nobody does whose session has ended. With an
answer, that alone says what is served. Of a daemon that has gone nothing is known. Reads without the other side's processor, which count where a version is the same before and after, are FaRM's lock-free ones (Dragojevic et al., NSDI 2014).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.client import buffers, stopping
from tierd.client.mapping import Segment, still_hold
from tierd.client.protocol import every, groups_message, leased
from tierd.client.session import Session, by_place
from tierd.client.values import GetResult, Group
from tierd.core.model import HANDLE, Need, StructArray
from tierd.core.words import barrier
from tierd.errors import InvalidArgument, TierdError

SEQUENCES_LIMIT, HANDLES_LIMIT = 1024, 1 << 16
"""Of which handles are remembered: 40 bytes each, and 32 of its name."""
_NONE: StructArray = np.zeros(0, dtype=HANDLE)
Key = tuple[int, tuple[int, ...], int | None, bytes]
"""Of a sequence: namespace, as the link's daemon numbers it, ranks, its tokens where the last block is short, and every hash: nothing says that one covers those before it."""


class Known:
    """Handles by sequence, of one link; the longest unused go first. Threads may share it."""

    def __init__(self) -> None:
        self._handles: OrderedDict[Key, StructArray] = OrderedDict()
        self._count = 0
        self._turn = threading.Lock()

    def note(self, group: Group, handles: StructArray) -> None:
        """All of a sequence has been given, and copied, as HANDLE [n]."""
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
        """What was given last; a use."""
        key = _key(group)
        with self._turn:
            if key is None or key not in self._handles:
                return None
            self._handles.move_to_end(key)
            return self._handles[key]

    def _drop(self, key: Key) -> None:
        handles = self._handles.pop(key, None)
        self._count -= len(handles) if handles is not None else 0


class EarlyCopy:
    """The copy of one get. known: what the last get gave; deadline: of time.monotonic(). handles: what was copied, from the first block on."""

    is_due, patience_s = False, 0.0

    def __init__(self, session: Session, group: Group, out: Any, *, known: StructArray | None, deadline: float) -> None:
        self.session, self._group, self._out = session, group, out
        self._known, self._deadline = known, deadline
        self.handles: StructArray = _NONE
        self._from: Sequence[tuple[Segment, StructArray]] = ()

    @property
    def may_be_alone(self) -> bool:
        """Whether `alone` is worth a try."""
        return self._known is not None and self.session.mailbox.takes_gets

    def alone(self) -> GetResult | None:
        """The whole get without a call; None: the daemon is to be asked."""
        known, session = self._known, self.session
        if known is None or len(known) != len(self._group.hashes):
            return None
        self._copy(known)
        if self.handles is not known:
            return None
        barrier()
        if not all(every(still_hold(segment.words, those)) for segment, those in self._from):
            return None
        if not session.mailbox.tell_used(groups_message([self._group])[0].SerializeToString()):
            return None
        tier_tokens = np.bincount(known["tier"], weights=known["tokens"], minlength=len(session.tiers))
        return GetResult(int(known["tokens"].sum()), len(known), (), tuple(map(int, tier_tokens)))

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
            stopping.check()
            self._copy(handles)

    def insist(self) -> None:
        """What the daemon waits for is none of this."""

    def _copy(self, handles: StructArray) -> None:
        """Once; nothing where a page has gone, or the buffers do not fit."""
        pages = _pages(self.session, handles) if len(handles) and not len(self.handles) else None
        if pages is None:
            return
        try:
            targets = buffers.pieces(self._out, pages.lengths, writable=True)
        except InvalidArgument:  # the answer may be shorter, and fit
            return
        buffers.copy_from(pages.at, pages.lengths, targets)
        self.handles, self._from = handles, pages.parts

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
    return group.namespace.id, tuple(group.ranks), group.tokens, group.hashes.tobytes()


class _Pages(NamedTuple):
    """Where pages are mapped, and how long their blocks are. parts: their segments, which keeps them mapped, and the handles of those in each."""

    at: list[int]
    lengths: list[int]
    parts: list[tuple[Segment, StructArray]]


def _pages(session: Session, handles: StructArray) -> _Pages | None:
    """Those of the handles, if all of them are mapped and still what they were."""
    parts = by_place(handles)
    out = _Pages([0] * len(handles), handles["length"].tolist(), [])
    for place, rows in parts:
        segment, those = session.segment(place), handles if len(parts) == 1 else handles[rows]
        if not isinstance(segment, Segment) or not every(still_hold(segment.words, those)):
            return None
        if not every(those["offset"] + those["length"] <= len(segment.data)):
            return None
        out.parts.append((segment, those))
        addresses = (those["offset"] + np.uint64(segment.address)).tolist()
        for row, address in zip(np.arange(len(handles))[rows].tolist(), addresses, strict=True):
            out.at[row] = address
    return out
