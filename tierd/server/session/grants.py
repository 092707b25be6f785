"""What calls have given to clients lately, so that a reply that nobody waited for leaves nothing held.

A call that is cancelled, or whose deadline passes, may have been answered at that moment: its client never learns the number of the lease
or reservation, which would stay until its process ends. So it names the call (`tierd-request`) over the session socket, and what that call gave,
or is still to give, is taken back.

Purpose: numbers by calls' ids, a bounded number of them for each session. Non-purpose: leases themselves (core), deadlines (guard.py).
Invariants: whichever comes first, the call's end or the word that it was given up, nothing stays held; no session makes another's be
forgotten; of a session that has stopped nothing is remembered, though a call of it may end after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from tierd.errors import TierdError, Unavailable

LIMIT = 1024
"""Calls of a session that are remembered; its client speaks within a moment, if it does, and has far fewer in flight."""

Call = tuple[int, str]
"""Session and request id."""
Given = tuple[int, Sequence[int]]
"""Lease, 0: none; reservations."""
T = TypeVar("T")


class Grants:
    """One per daemon. release(session, leases) and abort(session, reservation) as in the cache; they know of no fault.

    check_open(session) raises SessionLost for one that has stopped.
    """

    def __init__(
        self,
        *,
        release: Callable[[int, Sequence[int]], None],
        abort: Callable[[int, int], None],
        check_open: Callable[[int], object],
    ) -> None:
        self._release = release
        self._abort = abort
        self._check_open = check_open
        self._given: dict[int, OrderedDict[str, Given]] = {}
        self._revoked: dict[int, OrderedDict[str, None]] = {}

    def give(self, call: Call, reply: T, *, lease: int = 0, reservations: Sequence[int] = ()) -> T:
        """The reply of a call, on its way. Raises Unavailable if its client has given the call up, SessionLost if it has gone."""
        try:
            self._check_wanted(*call)
        except TierdError:
            self._take_back(call[0], (lease, reservations))
            raise
        if lease or reservations:
            _remember(self._given, call, (lease, reservations))
        return reply

    def revoke(self, session: int, request: str) -> None:
        """The client does not have the reply of a call and will not take it."""
        calls = self._given.get(session)
        given = calls.pop(request, None) if calls else None
        if given is None:
            _remember(self._revoked, (session, request), None)
        else:
            self._take_back(session, given)

    def forget(self, session: int) -> None:
        """Its connection is closed: no word of its calls can come any more."""
        self._given.pop(session, None)
        self._revoked.pop(session, None)

    @property
    def count(self) -> int:
        """Calls that are remembered."""
        return sum(map(len, self._given.values())) + sum(map(len, self._revoked.values()))

    def _check_wanted(self, session: int, request: str) -> None:
        self._check_open(session)
        if request in self._revoked.get(session, ()):
            del self._revoked[session][request]
            raise Unavailable(f"call {request}: its client gave it up; call again")

    def _take_back(self, session: int, given: Given) -> None:
        lease, reservations = given
        if lease:
            self._release(session, [lease])
        for reservation in reservations:
            self._abort(session, reservation)


def _remember(sessions: dict[int, OrderedDict[str, T]], call: Call, value: T) -> None:
    calls = sessions.setdefault(call[0], OrderedDict())
    calls[call[1]] = value
    if len(calls) > LIMIT:
        calls.popitem(last=False)
