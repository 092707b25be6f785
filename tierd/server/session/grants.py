"""Remembers what recent calls gave to clients, to take it back if a reply does not arrive.

A call may be answered just when it is cancelled or times out. Its client then never learns the
number of the lease or reservation, which would stay until its process ends. So the client names the
call (`tierd-request`) over the session socket, and the daemon takes its grants back.

The order of the call's end and the revocation does not matter. The number of remembered calls is
bounded for each session, so no session displaces another's. Nothing is remembered of a stopped
session, even if a call of it ends later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from tierd.errors import TierdError, Unavailable

LIMIT = 1024
"""Remembered calls of a session. Its client revokes within a moment, and has far fewer in flight."""

Call = tuple[int, str]
"""Session and request id."""
Given = tuple[int, Sequence[int]]
"""Lease, 0: none; reservations."""
T = TypeVar("T")


class Grants:
    """One per daemon. release(session, leases), abort(session, reservation): as in the cache; they
    raise nothing. check_open(session): raises SessionLost for a stopped one."""

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
        """Passes a call's reply on. Raises Unavailable if its client gave the call up, SessionLost
        if the session has stopped."""
        try:
            self._check_wanted(*call)
        except TierdError:
            self._take_back(call[0], (lease, reservations))
            raise
        if lease or reservations:
            _remember(self._given, call, (lease, reservations))
        return reply

    def revoke(self, session: int, request: str) -> None:
        """Takes back what a call gave or will give. Its client will not read the reply."""
        calls = self._given.get(session)
        given = calls.pop(request, None) if calls else None
        if given is None:
            _remember(self._revoked, (session, request), None)
        else:
            self._take_back(session, given)

    def forget(self, session: int) -> None:
        """Its connection is closed, so no call can be revoked any more."""
        self._given.pop(session, None)
        self._revoked.pop(session, None)

    @property
    def count(self) -> int:
        """Remembered calls."""
        return sum(map(len, self._given.values())) + sum(map(len, self._revoked.values()))

    def _check_wanted(self, session: int, request: str) -> None:
        self._check_open(session)
        if request in self._revoked.get(session, ()):
            del self._revoked[session][request]
            raise Unavailable(f"call {request}: its client cancelled it; call again")

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
