"""The call that the running code belongs to: its id, for log lines, exemplars and spans.

It follows the code into tasks that the call begins, and ends with the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("tierd_call", default=MappingProxyType({}))


class InCall:
    """Around a call. call: its id, from its client or made by the daemon."""

    __slots__ = ("_fields", "_token")

    def __init__(self, call: str, method: str) -> None:
        self._fields = {"call": call, "method": method}

    def __enter__(self) -> None:
        self._token = _FIELDS.set(self._fields)

    def __exit__(self, *_: object) -> None:
        _FIELDS.reset(self._token)


def add(**fields: str) -> None:
    """Adds fields to the call's log lines, such as the engine's id of its request."""
    _FIELDS.set({**_FIELDS.get(), **fields})


def fields() -> Mapping[str, str]:
    """The call's fields; empty outside of calls."""
    return _FIELDS.get()
