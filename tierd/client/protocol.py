"""The protocol without I/O: from a call to its message, from a reply to its values.

Purpose: pure functions, so that both transports share every rule. Non-purpose: sockets, time, who calls. Invariant: a reply that is not
what the proto file promises is an OperatorError here, and never an index error later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierd import errors
from tierd._proto import cache_pb2 as pb
from tierd.chunks import CHUNK_BYTES, Chunk, Codec
from tierd.client.buffers import copy_all
from tierd.client.values import (
    About,
    Event,
    EventKind,
    Found,
    Group,
    Hashes,
    OpenedNamespace,
    PutGroup,
    Tokens,
    checked_hashes,
    listed,
)
from tierd.core.block import U4_MAX, NamespaceSpec, token_array, whole
from tierd.core.model import (
    COMMIT_BLOCK,
    HANDLE,
    HASH_BYTES,
    PRIORITY_LIMIT,
    PUT_BLOCK,
    RETENTION_LIMIT_S,
    BlockStatus,
    Durability,
    StructArray,
    TierKind,
)
from tierd.errors import CorruptRecord, InvalidArgument, OperatorError, StaleHandle, TierdError
from tierd.wire_codecs import WireCodec, shortest

SESSION_KEY = "tierd-session"
CREDENTIAL_KEY = "authorization"
REQUEST_KEY = "tierd-request"
GIVING = frozenset({"Acquire", "Reserve", "Commit"})
"""Calls that leave something held, of which a client without their reply would not know."""
ABOUT_BYTES = 2 << 20
"""Of hashes, and of tokens, that an engine says of one group: with them a message stays below the 8 MiB that gRPC takes."""

TIER_DIGITS = 5
"""Of a tier's index: no daemon has so many."""


# -- errors


def error_of(name: str | None, message: str, *, status: str) -> TierdError:
    """The error that the daemon raised. name: its class, from the trailing metadata; status: the gRPC status code's name."""
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
"""For what did not come from tierd itself: the transport, a proxy."""


# -- namespaces


def open_namespace_request(spec: NamespaceSpec) -> pb.OpenNamespaceRequest:
    """Raises InvalidArgument."""
    spec.checked()
    shape = spec.geometry
    return pb.OpenNamespaceRequest(
        model=spec.model,
        tokens_per_block=spec.tokens_per_block,
        block_bytes=spec.block_bytes,
        weights_digest=spec.weights_digest,
        adapter=spec.adapter,
        group=spec.group,
        salt=spec.salt,
        rank_count=spec.rank_count,
        geometry=pb.Geometry(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            layout=shape.layout,
        ),
    )


def take_namespace(namespace: OpenedNamespace, reply: pb.OpenNamespaceReply, *, link: int) -> None:
    """Notes what a daemon answered. Raises StaleHandle if the namespace is in another epoch than when it was first opened.

    A worker that has the old weights must not go on under the new epoch's name, so a moved epoch is never taken silently.
    """
    if len(reply.digest) != HASH_BYTES or not reply.namespace:
        raise OperatorError(
            f"daemon: namespace {reply.namespace} with a digest of {len(reply.digest)} bytes; versions differ?"
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


# -- what is asked for


def groups_of(
    what: OpenedNamespace | Group | Sequence[Group], hashes: Hashes | None, tokens: int | None
) -> list[Group]:
    """The groups of a call that takes groups, or a namespace and its hashes. Raises InvalidArgument."""
    if isinstance(what, OpenedNamespace):
        if hashes is None:
            raise InvalidArgument("hashes: none for the namespace; pass namespace.hash(tokens)")
        return [Group(what, checked_hashes(hashes), tokens)]
    if hashes is not None or tokens is not None:
        raise InvalidArgument("hashes: given beside groups, which have their own; pass one or the other")
    return listed(what, Group)


def sequence_group(namespace: OpenedNamespace, what: Tokens | Hashes | Group) -> Group:
    """The group of a get: of tokens (a short last block included), of hashes, or as it is."""
    if isinstance(what, Group):
        return what
    if _is_hashes(what):
        return Group(namespace, checked_hashes(what))  # type: ignore[arg-type]
    return Group(namespace, namespace.hash(what, with_tail=True), len(what))


def sequence_put(namespace: OpenedNamespace, what: Tokens | Hashes | PutGroup, *, lengths: Sequence[int]) -> PutGroup:
    """The group of a put of so many blocks. Tokens may have a short last block or leave it out. Raises InvalidArgument."""
    if isinstance(what, PutGroup):
        return what
    if _is_hashes(what):
        return _filled(PutGroup(namespace, checked_hashes(what)), lengths)  # type: ignore[arg-type]
    size, count = namespace.spec.tokens_per_block, len(what)
    full = count // size
    if len(lengths) not in (full, -(-count // size)):
        raise InvalidArgument(
            f"blocks: {len(lengths)} for {count} tokens, which are {full} full blocks of {size}; pass one each, and one more for the"
            " rest if it shall be stored"
        )
    tail = len(lengths) > full
    hashes, covered = namespace.hash(what, with_tail=tail), count if tail else full * size
    return _filled(PutGroup(namespace, hashes, covered, about=About(tokens=what[:covered])), lengths)


def _filled(group: PutGroup, lengths: Sequence[int]) -> PutGroup:
    """The group, of buffers that are so long. Raises InvalidArgument where one is shorter than what its block covers, or longer than a full one."""
    wanted, most = put_lengths(group).tolist(), group.namespace.spec.block_bytes
    for i, (length, least) in enumerate(zip(lengths, wanted, strict=False) if lengths != wanted else ()):
        if not least <= length <= most:
            remedy = f"pass {least} to {most}, or say the lengths of blocks in a PutGroup"
            raise InvalidArgument(f"buffer {i}: {length} bytes for a block of {least}; {remedy}")
    return replace(group, lengths=lengths)


def _is_hashes(what: Tokens | Hashes) -> bool:
    return isinstance(what, np.ndarray) and what.ndim == 2


def wanted_tier(name: str) -> dict[str, Any]:
    """The fields that say where handles shall point: any tier of a kind (`host`), or one (`device.1`). Raises InvalidArgument."""
    kind, dot, index = str(name).partition(".")
    kinds = {"device": TierKind.DEVICE, "host": TierKind.HOST}
    if kind not in kinds or (dot and not (index.isdecimal() and len(index) <= TIER_DIGITS)):
        raise InvalidArgument(
            f"tier: {name!r} cannot be mapped; ask for 'host', 'device', or one of them as 'device.1'"
        )
    return {"tier": int(kinds[kind]), "nth": int(index) + 1 if dot else 0}


def groups_message(groups: Iterable[Group]) -> list[pb.Group]:
    """Groups as Lookup, Acquire and Prefetch carry them."""
    return [_group_message(group) for group in groups]


def _group_message(group: Group) -> pb.Group:
    hashes = checked_hashes(group.hashes)
    return pb.Group(
        namespace=group.namespace.id,
        ranks=[whole("ranks", rank, U4_MAX, remedy="count ranks from 0") for rank in group.ranks],
        hashes=hashes.tobytes(),
        tokens_per_block=group.namespace.spec.tokens_per_block,
        tokens=group.namespace.tokens_in(len(hashes), tokens=group.tokens),
        need=whole("need", group.need, 2, remedy="give one of tierd.client.Need"),  # type: ignore[arg-type]
        need_tokens=whole("need_tokens", group.need_tokens, (1 << 63) - 1, remedy="count its last tokens"),
        digest=group.namespace.digest,
    )


def put_lengths(group: PutGroup) -> NDArray[np.uint32]:
    """Bytes of each block. Raises InvalidArgument."""
    covered = group.namespace.block_tokens(len(group.hashes), tokens=group.tokens)
    if group.lengths is None:
        return group.namespace.block_lengths(covered)
    if len(group.lengths) != len(covered):
        raise InvalidArgument(f"lengths: {len(group.lengths)} for {len(covered)} blocks; pass one each")
    return np.asarray([whole("lengths", length, U4_MAX, remedy="in bytes") for length in group.lengths], np.uint32)


def put_group_message(group: PutGroup, *, tells: bool = False) -> pb.PutGroup:
    """A group as Reserve and Put carry it. tells: with what the engine says of it, for routers. Raises InvalidArgument."""
    hashes = checked_hashes(group.hashes)
    blocks = np.zeros(len(hashes), dtype=PUT_BLOCK)
    blocks["hash"] = hashes
    blocks["tokens"] = group.namespace.block_tokens(len(hashes), tokens=group.tokens)
    blocks["length"] = put_lengths(group)
    message = pb.PutGroup(
        namespace=group.namespace.id,
        rank=whole("rank", group.rank, U4_MAX, remedy="count ranks from 0"),
        parent=group.parent,
        position=whole("position", group.position, U4_MAX, remedy="count blocks from the sequence's first"),
        blocks=blocks.tobytes(),
        digest=group.namespace.digest,
    )
    if group.priority is not None or group.retention_s is not None:
        _say(message, group)
    if tells and group.about is not None:
        _tell(message, group.about)
    return message


def _say(message: pb.PutGroup, group: PutGroup) -> None:
    """Priorities, and for how long. Raises InvalidArgument."""
    if group.priority is None:
        raise InvalidArgument(
            f"retention_s: {group.retention_s!r:.80} of no priority; give the priority that it limits, or neither"
        )
    for value in _of_each(group, "priority"):
        message.priorities.append(whole("priority", value, PRIORITY_LIMIT, remedy="leave it out for the default"))
    for value in _of_each(group, "retention_s") if group.retention_s is not None else ():
        if value is not None and not 0 < value <= RETENTION_LIMIT_S:
            raise InvalidArgument(
                f"retention_s: {value} is not above 0 and at most {RETENTION_LIMIT_S}; give None for good"
            )
        message.retention_s.append(0 if value is None else math.ceil(value))


def _of_each(group: PutGroup, name: str) -> Sequence[float | None]:
    """The group's value for all blocks, or those for each."""
    given = getattr(group, name)
    if not isinstance(given, Sequence | np.ndarray):
        return [given]
    if len(given) != len(group.hashes):
        raise InvalidArgument(f"{name}: {len(given)} for {len(group.hashes)} blocks; give one for all, or one for each")
    return list(given)


def _tell(message: pb.PutGroup, about: About) -> None:
    """What is too much for a message is left out: the blocks matter more than what is said of them."""
    hashes, tokens = b"".join(about.hashes), token_array(about.tokens).tobytes()
    if len(hashes) <= ABOUT_BYTES:
        message.engine_hashes, message.engine_per_block = hashes, about.per_block if hashes else 0
        message.engine_parent = about.parent if hashes else b""
    if len(tokens) <= ABOUT_BYTES and len(hashes) <= ABOUT_BYTES:
        message.token_ids = tokens


def reserve_request(groups: Iterable[PutGroup], tier: str, *, durable: bool, tells: bool = False) -> pb.ReserveRequest:
    """durable: what the commit will ask for; blocks that exist already are made durable now. Raises InvalidArgument."""
    return pb.ReserveRequest(
        groups=[put_group_message(group, tells=tells) for group in groups],
        **wanted_tier(tier),
        durability=(Durability.DURABLE if durable else Durability.MEMORY).value,  # type: ignore[arg-type]
    )


def commit_request(
    reservation: int, blocks: StructArray | None, *, durable: bool, lease: bool = False, keep_open: bool = False
) -> pb.CommitRequest:
    """blocks: COMMIT_BLOCK [n]; None: every block as it was named in Reserve. Raises InvalidArgument."""
    if blocks is not None and getattr(blocks, "dtype", None) != COMMIT_BLOCK:
        raise InvalidArgument(f"blocks: {type(blocks).__name__} is no array of COMMIT_BLOCK; pass what naming gives")
    return pb.CommitRequest(
        reservation=reservation,
        blocks=None if blocks is None else pb.CommitGroup(blocks=blocks.tobytes()),
        durability=(Durability.DURABLE if durable else Durability.MEMORY).value,  # type: ignore[arg-type]
        lease=lease,
        keep_open=keep_open,
    )


# -- what was answered


@dataclass(frozen=True)
class LeasedGroup:
    """A group's part of a lease. first: number of the first block given; handles: HANDLE [ranks, count]."""

    first: int
    handles: StructArray

    @property
    def count(self) -> int:
        """Blocks given per rank."""
        return int(self.handles.shape[1])


@dataclass(frozen=True)
class Leased:
    """What Acquire answered. whole: False if more is held than could be brought near now."""

    lease: int = 0
    tokens: int = 0
    tier_tokens: tuple[int, ...] = ()
    whole: bool = True
    groups: tuple[LeasedGroup, ...] = ()


def named_indices(request: pb.CommitRequest) -> list[int] | None:
    """Which blocks of the reservation a commit names; None: all."""
    if not request.HasField("blocks"):
        return None
    return np.frombuffer(request.blocks.blocks, dtype=COMMIT_BLOCK)["index"].tolist()  # type: ignore[no-any-return]


def found(reply: pb.LookupReply, groups: Sequence[Group]) -> Found:
    """What Lookup answered."""
    tiers = []
    for data, group in zip(reply.tier_of, groups, strict=False):
        ranks = max(1, len(group.ranks))
        tiers.append(np.frombuffer(data, dtype=np.int8).reshape(ranks, -1))
    return Found(reply.tokens, tuple(tiers), tuple(reply.tier_tokens))


def leased(reply: pb.AcquireReply, groups: Sequence[Group]) -> Leased:
    """What Acquire answered."""
    given = []
    for part, group in zip(reply.groups, groups, strict=False):
        ranks = max(1, len(group.ranks))
        given.append(
            LeasedGroup(part.first, handles_of(part.handles, count=ranks * part.count).reshape(ranks, part.count))
        )
    return Leased(reply.lease, reply.tokens, tuple(reply.tier_tokens), reply.whole, tuple(given))


def handles_of(data: bytes, *, count: int | None = None) -> StructArray:
    """HANDLE [n]. Raises OperatorError."""
    if len(data) % HANDLE.itemsize or (count is not None and len(data) != count * HANDLE.itemsize):
        raise OperatorError(
            f"daemon: {len(data)} bytes of handles where {count} of {HANDLE.itemsize} were due; versions differ?"
        )
    return np.frombuffer(data, dtype=HANDLE)


def joined(parts: Sequence[StructArray]) -> StructArray:
    """HANDLE [n] of several groups, in order, the caller's own."""
    # Joining records takes numpy ten times as long as copying them.
    return parts[0].copy() if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=HANDLE), *parts])


def statuses_of(data: bytes, *, count: int) -> NDArray[np.uint16]:
    """u2 [count] of BlockStatus. Raises OperatorError."""
    if len(data) != 2 * count:
        raise OperatorError(f"daemon: {len(data)} bytes of statuses for {count} blocks; versions differ?")
    return np.frombuffer(data, dtype="<u2").astype(np.uint16)


def all_statuses(count: int, status: int) -> NDArray[np.uint16]:
    """The same status for each of so many blocks."""
    return np.full(count, status, dtype=np.uint16)


def watch_request(after: int) -> pb.WatchRequest:
    """after: sequence number of the last event seen."""
    return pb.WatchRequest(after=whole("after", after, (1 << 64) - 1, remedy="give an event's sequence number"))


def events_of(message: pb.Events) -> Iterator[Event]:
    """The events of one Watch message."""
    for event in message.events:
        hashes = np.frombuffer(event.hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
        yield Event(event.sequence, EventKind(event.kind), event.tier, event.namespace, hashes, event.reason)


def valid_blocks(groups: Sequence[LeasedGroup], good: NDArray[np.bool_]) -> int:
    """How many blocks, from the first on, every rank of a lease's only group has whole. good: per handle, rank-major."""
    if len(groups) != 1:
        return 0 if not good.all() else max((g.count for g in groups), default=0)
    if every(good):
        return groups[0].count
    return int(np.argmin(good.reshape(groups[0].handles.shape).all(axis=0)))


def every(mask: NDArray[np.bool_]) -> bool:
    """Whether all are true, in a third of the time of `mask.all()`."""
    return int(np.count_nonzero(mask)) == mask.size


# -- chunks, for clients that share no memory


PUT: Codec[pb.PutChunk] = Codec(pb.PutChunk)
GET: Codec[pb.GetChunk] = Codec(pb.GetChunk)


def agreed_codec(wanted: WireCodec | None, reply: pb.OpenNamespaceReply) -> WireCodec | None:
    """What chunks to and from the daemon may be encoded by: the codec that this client wants, where the daemon knows it too."""
    return wanted if wanted is not None and wanted.name in reply.codecs else None


def put_chunks(
    message: pb.PutGroup, pieces: Sequence[NDArray[np.uint8]], *, durable: bool, codec: WireCodec | None = None
) -> Iterator[bytes]:
    """A Put's stream, each message encoded: the group alone, then each block's bytes in order, with checksums."""
    durability = (Durability.DURABLE if durable else Durability.MEMORY).value
    first = pb.PutChunk(group=message, durability=durability, checksum=xxhash.xxh3_64_intdigest(b""))  # type: ignore[arg-type]
    if codec is not None:
        first.codec = codec.name
    yield first.SerializeToString()
    for index, piece in enumerate(pieces):
        for offset in range(0, len(piece), CHUNK_BYTES):
            data: Any = piece[offset : offset + CHUNK_BYTES].data
            head = pb.PutChunk(index=index, offset=offset, checksum=xxhash.xxh3_64_intdigest(data))
            if codec is not None:
                data, head.plain_length = shortest(codec, data)
            yield PUT.encode(head, data)


def get_request(group: Group, *, codec: WireCodec | None) -> pb.GetRequest:
    """codec: by which chunks may come encoded."""
    return pb.GetRequest(group=_group_message(group), codec=codec.name if codec else "")


class Assembly:
    """Blocks put together from a Get's chunks: every chunk checked, in order, ended by the first fault."""

    def __init__(self, target: Callable[[int, int], NDArray[np.uint8]], *, codec: WireCodec | None = None) -> None:
        """target: number of a block and its length to where its bytes go. codec: by which chunks may be encoded."""
        self.whole: list[NDArray[np.uint8]] = []
        self._target, self._codec = target, codec
        self._current: NDArray[np.uint8] | None = None
        self._filled = 0
        self._is_broken = False

    def take(self, chunk: Chunk[pb.GetChunk]) -> None:
        """The next chunk. What does not fit or does not hold ends the prefix: never a wrong byte."""
        head = chunk.head
        if self._is_broken or not (chunk.data or head.status):
            return
        data = self._plain(chunk) if self._fits(head, head.plain_length or len(chunk.data)) else None
        self._is_broken = data is None or xxhash.xxh3_64_intdigest(data) != head.checksum
        if data is None or self._is_broken or self._current is None:
            return
        self._filled = head.offset + len(data)
        copy_all([self._current[head.offset : self._filled]], [np.frombuffer(data, dtype=np.uint8)])
        if self._filled == len(self._current):
            self.whole.append(self._current)
            self._current = None

    def _plain(self, chunk: Chunk[pb.GetChunk]) -> memoryview | None:
        """Its bytes as they were before they were encoded; None where that cannot be told, or nobody asked for it."""
        if not chunk.head.plain_length:
            return chunk.data
        try:
            return None if self._codec is None else self._codec.decode(chunk.data, length=chunk.head.plain_length)
        except CorruptRecord:
            return None

    def _fits(self, head: pb.GetChunk, length: int) -> bool:
        """Whether the chunk continues the block in progress, or begins the next one."""
        if head.status != BlockStatus.READY or head.index != len(self.whole):
            return False
        if self._current is None:
            self._current, self._filled = self._target(head.index, head.length), 0
        return head.offset == self._filled and self._filled + length <= len(self._current)
