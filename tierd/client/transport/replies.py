"""Parses replies: from a daemon's messages to values, or to the error that it raised.

The functions are pure and shared by both transports. They do no I/O and retry nothing. A reply that
breaks the proto file's contract is an OperatorError here, and not an index error later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd import errors
from tierd._proto import cache_pb2 as pb
from tierd.advisor.pace import Pace
from tierd.client.values import Event, EventKind, Found, Group, OpenedNamespace, Prefetch
from tierd.core.arrays.sets import every
from tierd.core.formats.model import HANDLE, HASH_BYTES, StructArray
from tierd.errors import OperatorError, StaleHandle, TierdError
from tierd.tcp.codecs import WireCodec


def error_of(name: str | None, message: str, *, status: str) -> TierdError:
    """The daemon's error. name: its class, from the metadata; status: the gRPC status's name."""
    kind = getattr(errors, name or "", None)
    if isinstance(kind, type) and issubclass(kind, TierdError):
        return kind(message)
    plain = _BY_STATUS.get(status)
    if plain is not None:
        return plain(f"daemon: {message}")
    return OperatorError(f"daemon: {status}: {message}")


_BY_STATUS: dict[str, type[TierdError]] = {
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "UNAUTHENTICATED": errors.SessionLost,
    "PERMISSION_DENIED": errors.NotPermitted,
    "UNIMPLEMENTED": errors.Unsupported,
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "CANCELLED": errors.Unavailable,
}
"""For errors that tierd did not raise: the transport, a proxy."""


def take_namespace(namespace: OpenedNamespace, reply: pb.OpenNamespaceReply, *, link: int) -> None:
    """Stores the reply in the namespace. Raises StaleHandle if its epoch or tenant has changed.
    A worker with the old weights must not continue under the new epoch's name."""
    if len(reply.digest) != HASH_BYTES or not reply.namespace:
        raise OperatorError(
            f"daemon: namespace {reply.namespace} has {len(reply.digest)} bytes of digest; use one tierd on both sides"
        )
    if namespace.is_open and namespace.digest != reply.digest:
        if namespace.epoch == reply.epoch:
            raise StaleHandle(
                f"namespace {namespace.spec.model}: it was opened for another tenant, whose blocks this client cannot see; open it with this client"
            )
        raise StaleHandle(
            f"namespace {namespace.spec.model}: epoch {namespace.epoch} has become {reply.epoch}; call open_namespace again once"
            " this worker runs the new weights"
        )
    namespace.id, namespace.digest, namespace.epoch, namespace.link = reply.namespace, reply.digest, reply.epoch, link


def agreed_codec(wanted: WireCodec | None, reply: pb.OpenNamespaceReply) -> WireCodec | None:
    """The codec for chunks: the one that this client wants, if the daemon supports it too."""
    return wanted if wanted is not None and wanted.name in reply.codecs else None


@dataclass(frozen=True)
class LeasedGroup:
    """A group's part of a lease. first: number of the first leased block; handles: HANDLE [ranks, count].
    layers: of its namespace; 0: opaque."""

    first: int
    handles: StructArray
    layers: int = 0

    @property
    def count(self) -> int:
        """Leased blocks per rank."""
        return int(self.handles.shape[1])


@dataclass(frozen=True)
class Leased:
    """The reply to Acquire. whole: False if the store holds more than could be brought near now."""

    lease: int = 0
    tokens: int = 0
    tier_tokens: tuple[int, ...] = ()
    whole: bool = True
    groups: tuple[LeasedGroup, ...] = ()


def found(reply: pb.LookupReply, groups: Sequence[Group]) -> Found:
    """Parses the reply to Lookup."""
    tiers = []
    for data, group in zip(reply.tier_of, groups, strict=False):
        ranks = max(1, len(group.ranks))
        tiers.append(np.frombuffer(data, dtype=np.int8).reshape(ranks, -1))
    paces = tuple(Pace(p.bytes_per_s, p.latency_s, p.wait_s) if p.bytes_per_s > 0 else None for p in reply.paces)
    return Found(reply.tokens, tuple(tiers), tuple(reply.tier_tokens), paces, Prefetch.of(0, [reply.prefetch]))


def leased(reply: pb.AcquireReply, groups: Sequence[Group]) -> Leased:
    """Parses the reply to Acquire."""
    given = []
    for part, group in zip(reply.groups, groups, strict=False):
        ranks = max(1, len(group.ranks))
        handles = handles_of(part.handles, count=ranks * part.count).reshape(ranks, part.count)
        given.append(LeasedGroup(part.first, handles, group.namespace.spec.geometry.layers))
    return Leased(reply.lease, reply.tokens, tuple(reply.tier_tokens), reply.whole, tuple(given))


def handles_of(data: bytes, *, count: int | None = None) -> StructArray:
    """HANDLE [n]. Raises OperatorError."""
    if len(data) % HANDLE.itemsize or (count is not None and len(data) != count * HANDLE.itemsize):
        raise OperatorError(
            f"daemon: {len(data)} bytes of handles for {count} of {HANDLE.itemsize} each; use one tierd on both sides"
        )
    return np.frombuffer(data, dtype=HANDLE)


def joined(parts: Sequence[StructArray]) -> StructArray:
    """HANDLE [n] of several groups, in order, as a copy."""
    # numpy takes ten times as long to join records as to copy them.
    return parts[0].copy() if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=HANDLE), *parts])


def statuses_of(data: bytes, *, count: int) -> NDArray[np.uint16]:
    """u2 [count] of BlockStatus. Raises OperatorError."""
    if len(data) != 2 * count:
        raise OperatorError(f"daemon: {len(data)} bytes of statuses for {count} blocks; use one tierd on both sides")
    return np.frombuffer(data, dtype="<u2").astype(np.uint16)


def all_statuses(count: int, status: int) -> NDArray[np.uint16]:
    """The same status for each of `count` blocks."""
    return np.full(count, status, dtype=np.uint16)


def events_of(message: pb.Events) -> Iterator[Event]:
    """The events of one Watch message."""
    for event in message.events:
        hashes = np.frombuffer(event.hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
        yield Event(event.sequence, EventKind(event.kind), event.tier, event.namespace, hashes, event.reason)


def valid_blocks(groups: Sequence[LeasedGroup], good: NDArray[np.bool_]) -> int:
    """Leading blocks that every rank of the only group has whole. good: per handle, rank-major."""
    if len(groups) != 1:
        return 0 if not good.all() else max((g.count for g in groups), default=0)
    if every(good):
        return groups[0].count
    return int(np.argmin(good.reshape(groups[0].handles.shape).all(axis=0)))
