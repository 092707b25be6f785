"""The SDK of tierd: `from tierd.client import Client, NamespaceSpec`.

Importing it loads numpy and the message types. The first call that needs grpc loads it. The name
AsyncClient loads asyncio's client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierd.client.blocks.lease import Lease
from tierd.client.blocks.reservation import AsyncReservation, Reservation
from tierd.client.client import Client
from tierd.client.connect.target import resolve_target
from tierd.client.values import (
    About,
    Committed,
    Event,
    EventKind,
    Found,
    GetResult,
    Group,
    Lost,
    OpenedNamespace,
    Prefetch,
    PutGroup,
    PutResult,
    Target,
)
from tierd.core.formats.block import KVGeometry, NamespaceSpec
from tierd.core.formats.model import BlockStatus, Need

if TYPE_CHECKING:
    from tierd.client.aio import AsyncClient

__all__ = [
    "About",
    "AsyncClient",
    "AsyncReservation",
    "BlockStatus",
    "Client",
    "Committed",
    "Event",
    "EventKind",
    "Found",
    "GetResult",
    "Group",
    "KVGeometry",
    "Lease",
    "Lost",
    "NamespaceSpec",
    "Need",
    "OpenedNamespace",
    "Prefetch",
    "PutGroup",
    "PutResult",
    "Reservation",
    "Target",
    "resolve_target",
]


def __getattr__(name: str) -> Any:
    if name == "AsyncClient":
        from tierd.client.aio import AsyncClient  # noqa: PLC0415

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
