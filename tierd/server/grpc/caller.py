"""The caller of a call, as handlers see it. No handler runs without one.

It says who calls, by when, and how to read on. guard.py decides who may call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a call. session: the core's id. deadline: in the loop's time. rest: waits for
    the message after the call's, if one follows."""

    session: int
    tenant: str
    is_admin: bool
    request: str
    deadline: float
    rest: Callable[[], Awaitable[bytes]] | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - asyncio.get_running_loop().time())


CALLER: ContextVar[Caller] = ContextVar("caller")
"""The caller of the running handler."""
