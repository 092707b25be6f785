"""What calls have given to clients lately, so that a reply that nobody waited for leaves nothing held.

A call that is cancelled, or whose deadline passes, may have been answered at that moment: its client never learns the number of the lease
or reservation, which would stay until its process ends. So it names the call (`tierd-request`) over the session socket, and what that call gave,
or is still to give, is taken back.

Purpose: numbers by calls' ids, a bounded number of them. Non-purpose: leases themselves (core), deadlines (guard.py). Invariant: whichever comes
first, the call's end or the word that it was given up, nothing stays held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from tierd.errors import Unavailable

LIMIT = 1 << 14
"""Calls that are remembered; their clients speak within a moment, if they do."""

Call = tuple[int, str]
"""Session and request id."""
Given = tuple[int, int]
"""Lease and reservation; 0: none."""
T = TypeVar("T")


class Grants:
    """One per daemon. release(session, leases) and abort(session, reservation) as in the cache; they know of no fault."""

    def __init__(self, *, release: Callable[[int, Sequence[int]], None], abort: Callable[[int, int], None]) -> None:
        self._release = release
        self._abort = abort
        self._given: OrderedDict[Call, Given] = OrderedDict()
        self._revoked: OrderedDict[Call, None] = OrderedDict()

    def give(self, call: Call, reply: T, *, lease: int = 0, reservation: int = 0) -> T:
        """The reply of a call, on its way. Raises Unavailable if its client has given the call up."""
        if call in self._revoked:
            del self._revoked[call]
            self._take_back(call, (lease, reservation))
            raise Unavailable(f"call {call[1]}: its client gave it up; call again")
        if lease or reservation:
            _remember(self._given, call, (lease, reservation))
        return reply

    def revoke(self, session: int, request: str) -> None:
        """The client does not have the reply of a call and will not take it."""
        given = self._given.pop((session, request), None)
        if given is None:
            _remember(self._revoked, (session, request), None)
        else:
            self._take_back((session, request), given)

    def _take_back(self, call: Call, given: Given) -> None:
        lease, reservation = given
        if lease:
            self._release(call[0], [lease])
        if reservation:
            self._abort(call[0], reservation)


def _remember(calls: OrderedDict[Call, T], call: Call, value: T) -> None:
    calls[call] = value
    if len(calls) > LIMIT:
        calls.popitem(last=False)
