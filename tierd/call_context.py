"""The call that the running code belongs to: its id, for log lines, exemplars and spans.

It follows the code into tasks that the call begins, and ends with the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("tierd_call", default=MappingProxyType({}))


@contextmanager
def in_call(call: str, method: str) -> Iterator[None]:
    """Around a call. call: its id, from its client or made by the daemon."""
    token = _FIELDS.set({"call": call, "method": method})
    try:
        yield
    finally:
        _FIELDS.reset(token)


def add(**fields: str) -> None:
    """Adds fields to the call's log lines, such as the engine's id of its request."""
    _FIELDS.set({**_FIELDS.get(), **fields})


def fields() -> Mapping[str, str]:
    """The call's fields; empty outside of calls."""
    return _FIELDS.get()
