"""Messages to values and back, with every check that needs only the message and its namespaces.

A malformed message becomes InvalidArgument here, with thing, fault, value, limit and remedy. Later
code sees only well-formed values. guard and cache check permissions. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tierd._proto import cache_pb2 as pb
from tierd.advisor.pace import Pace
from tierd.cache.commit import CommitQuery, Sums
from tierd.cache.gets import Intent
from tierd.cache.prefetches import TTL_S, Order
from tierd.cache.verification import Generations
from tierd.core.arrays.sets import every, some
from tierd.core.formats.block import KVGeometry, Namespace, NamespaceSpec
from tierd.core.formats.model import (
    COMMIT_BLOCK,
    HANDLE,
    HASH_BYTES,
    PRIORITY_LIMIT,
    PUT_BLOCK,
    RETENTION_LIMIT_S,
    ROOT,
    TTL_LIMIT_S,
    BlockStatus,
    Durability,
    Need,
    StructArray,
    TierKind,
)
from tierd.core.plan import Bytes, Committed, GroupQuery, Lengths, PutQuery, Served
from tierd.decisions.record import REQUEST_BYTES
from tierd.errors import InvalidArgument

NamespaceOf = Callable[[int, bytes], Namespace]
"""The namespace of rank 0 with this id, if the caller may use it and the digest, if given, is its
own."""

_NEEDS = frozenset(map(int, Need))
GROUP_LIMIT = 64
"""Attention groups in one call."""


def spec_of(message: pb.OpenNamespaceRequest) -> NamespaceSpec:
    """The spec that a client asks for."""
    shape = message.geometry
    return NamespaceSpec(
        model=message.model,
        tokens_per_block=message.tokens_per_block,
        block_bytes=message.block_bytes,
        weights_digest=message.weights_digest,
        adapter=message.adapter,
        group=message.group,
        salt=message.salt,
        rank_count=message.rank_count or 1,
        geometry=KVGeometry(shape.layers, shape.kv_heads, shape.head_dim, shape.dtype, shape.layout or "NHD"),
        codec=message.codec,
    ).checked()


def error_limit(value: float) -> float:
    """The error limit of a request. Raises InvalidArgument unless it is 0 or more."""
    if not value >= 0:
        raise InvalidArgument(f"error_limit: {value} is not 0 or more; pass 0 for exact blocks alone")
    return value


def tier_kind(value: int) -> TierKind:
    """A kind of tier that handles can point into."""
    if value not in (TierKind.DEVICE, TierKind.HOST):
        raise InvalidArgument(f"tier: kind {value} cannot be mapped by a client; ask for DEVICE (0) or HOST (1)")
    return TierKind(value)


def intent(value: int) -> Intent:
    """The intent of a lookup."""
    try:
        return Intent(value)
    except ValueError:
        raise InvalidArgument(f"intent: {value} is unknown; the values are in cache.proto") from None


def order(request: pb.PrefetchRequest) -> Order:
    """The purpose of a prefetch."""
    if request.ttl_ms > 1000 * TTL_LIMIT_S:
        raise InvalidArgument(f"ttl_ms: {request.ttl_ms} is above {1000 * TTL_LIMIT_S}, a day; send at most that")
    return Order(ttl_s=request.ttl_ms / 1000 or TTL_S)


def durability(value: int) -> Durability:
    """The durability of a put."""
    try:
        return Durability(value)
    except ValueError:
        raise InvalidArgument(f"durability: {value} is unknown; the values are in cache.proto") from None


def queries(groups: Sequence[pb.Group], *, namespace_of: NamespaceOf, batch_limit: int) -> list[GroupQuery]:
    """The groups of a Lookup, Acquire or Prefetch."""
    if not 1 <= len(groups) <= GROUP_LIMIT:
        raise InvalidArgument(f"groups: {len(groups)} is outside 1 to {GROUP_LIMIT}; a plain model has one")
    found = [_query(group, namespace_of(group.namespace, group.digest)) for group in groups]
    _check_batch(sum(len(q.hashes) * len(q.namespaces) for q in found), batch_limit)
    return found


def _query(group: pb.Group, namespace: Namespace) -> GroupQuery:
    size = namespace.spec.tokens_per_block
    hashes = hashes_of(group.hashes, "group.hashes")
    if group.tokens_per_block not in (0, size):
        raise InvalidArgument(
            f"group.tokens_per_block: {group.tokens_per_block} is not the namespace's {size}; send that"
        )
    tokens = group.tokens or len(hashes) * size
    if -(-tokens // size) != len(hashes):
        raise InvalidArgument(
            f"group.tokens: {tokens} need {-(-tokens // size)} blocks of {size}, {len(hashes)} hashes were sent; send one each"
        )
    if group.need not in _NEEDS:
        raise InvalidArgument(f"group.need: {group.need} is unknown; the values are in cache.proto")
    if len(group.ranks) > namespace.spec.rank_count:
        raise InvalidArgument(f"group.ranks: {len(group.ranks)} of {namespace.spec.rank_count}; name each rank once")
    ranks = list(group.ranks) or [0]
    return GroupQuery(
        namespaces=tuple(namespace.id + _rank(r, namespace) for r in ranks),
        hashes=hashes,
        tokens_per_block=size,
        tokens=tokens,
        need=Need(group.need),
        need_tokens=min(group.need_tokens, tokens),  # all tokens at most, to fit the core's columns
        error_limit=error_limit(group.error_limit),
        request=group.request[:REQUEST_BYTES],
    )


def put_queries(groups: Sequence[pb.PutGroup], *, namespace_of: NamespaceOf, batch_limit: int) -> list[PutQuery]:
    """The groups of a Reserve or a Put."""
    if not 1 <= len(groups) <= GROUP_LIMIT:
        raise InvalidArgument(f"groups: {len(groups)} is outside 1 to {GROUP_LIMIT}; a plain model has one")
    found = [_put_query(group, namespace_of(group.namespace, group.digest)) for group in groups]
    _check_batch(sum(len(q.blocks) for q in found), batch_limit)
    return found


def _put_query(group: pb.PutGroup, namespace: Namespace) -> PutQuery:
    blocks = _records(group.blocks, PUT_BLOCK, "group.blocks")
    _check_sizes(blocks, namespace.spec)
    size = namespace.spec.tokens_per_block
    named = int(np.count_nonzero(blocks["hash"].any(axis=1)))
    if named and named < len(blocks):
        raise InvalidArgument(
            "group.blocks: named and private blocks (hash all zero) in one group; use a group for each"
        )
    if named and some(blocks["tokens"][:-1] != size):
        raise InvalidArgument(
            f"group.blocks: a block before the last has not {size} tokens; only the last may be short"
        )
    if len(group.parent) not in (0, HASH_BYTES):
        raise InvalidArgument(f"group.parent: {len(group.parent)} bytes instead of {HASH_BYTES} or none")
    return PutQuery(
        namespace=namespace.id + _rank(group.rank, namespace),
        parent=group.parent or ROOT,
        position=group.position,
        blocks=blocks,
        priorities=_priorities(group, len(blocks)),
        retention_s=_of_each(group.retention_s, "retention_s", len(blocks), limit=RETENTION_LIMIT_S),
    )


def _priorities(group: pb.PutGroup, count: int) -> Bytes | None:
    if group.retention_s and not group.priorities:
        raise InvalidArgument(f"group.retention_s: {group.retention_s[0]} s without a priority; send both, or neither")
    given = _of_each(group.priorities, "priorities", count, limit=PRIORITY_LIMIT)
    return None if given is None else given.astype(np.uint8)


def _of_each(values: Sequence[int], name: str, count: int, *, limit: int) -> Lengths | None:
    """A value for each of `count` blocks, uint32 [n]. None if none was sent."""
    if not values:
        return None
    if len(values) not in (1, count):
        raise InvalidArgument(f"group.{name}: {len(values)} for {count} blocks; send one for all, or one for each")
    if max(values) > limit:
        raise InvalidArgument(f"group.{name}: {max(values)} is outside 0 to {limit}; send a value in that range")
    return np.full(count, values, np.uint32)


def commit_query(message: pb.CommitRequest, *, batch_limit: int, written: Sums | None) -> CommitQuery:
    """Parses a Commit. written: waits until all is written; None: no such message can follow."""
    if message.unwritten and written is None:
        raise InvalidArgument(
            "commit.unwritten: no message can follow this call; use local RPC, or commit after all is written"
        )
    return CommitQuery(
        message.reservation,
        commit_blocks(message, batch_limit=batch_limit),
        durability(message.durability),
        lease=message.lease,
        keep_open=message.keep_open,
        sums=message.sums,
        written=written if message.unwritten else None,
    )


def commit_blocks(message: pb.CommitRequest, *, batch_limit: int) -> StructArray | None:
    """COMMIT_BLOCK [n], or None for all blocks as named in Reserve."""
    if not message.HasField("blocks"):
        return None
    blocks = _records(message.blocks.blocks, COMMIT_BLOCK, "blocks")
    _check_batch(len(blocks), batch_limit)
    if not every(blocks["hash"].any(axis=1)):
        raise InvalidArgument("blocks.hash: all zero; name every block that is committed")
    if len(blocks) and (int(blocks["tokens"].min()) < 1 or int(blocks["length"].min()) < 1):
        raise InvalidArgument("blocks: a block of 0 tokens or 0 bytes; leave it out")
    return blocks


def generations_of(data: bytes) -> Generations:
    """u64 [n]."""
    if len(data) % 8:
        raise InvalidArgument(f"doubted: {len(data)} bytes is no multiple of 8; send whole generations")
    return np.frombuffer(data, dtype="<u8")


def hashes_of(data: bytes, thing: str) -> Bytes:
    """uint8 [n, 32]."""
    if len(data) % HASH_BYTES:
        raise InvalidArgument(f"{thing}: {len(data)} bytes is no multiple of {HASH_BYTES}; send whole hashes")
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, HASH_BYTES)


def handles(extents: StructArray, *, status: int | StructArray, tokens: StructArray, epoch: int) -> StructArray:
    """HANDLE, in the shape of extents. Statuses and tokens broadcast over it."""
    out = np.frombuffer(bytearray(extents.tobytes()), HANDLE).reshape(
        extents.shape
    )  # HANDLE begins with the fields of EXTENT
    out["status"], out["tokens"], out["epoch"] = status, tokens, epoch
    return out


def acquire_reply(
    served: Served, *, lease: int, tier_tokens: list[int], whole: bool, epochs: list[int]
) -> pb.AcquireReply:
    """The answer to Acquire. epochs: of each group's namespace."""
    groups, end = [], 0
    for group, epoch in zip(served.groups, epochs, strict=False):
        start, end = end, end + group.extents.size
        status: int | StructArray = BlockStatus.READY
        if served.pending is not None:
            pending = served.pending[start:end].reshape(group.extents.shape)
            status = np.where(pending, BlockStatus.PENDING, BlockStatus.READY)
        given = handles(group.extents, status=status, tokens=group.tokens, epoch=epoch)
        groups.append(pb.GroupHandles(first=group.first, count=group.count, handles=given.tobytes()))
    return pb.AcquireReply(lease=lease, tokens=served.tokens, groups=groups, tier_tokens=tier_tokens, whole=whole)


def paces_of(paces: Mapping[int, Pace], *, tiers: int) -> list[pb.Pace]:
    """Per tier, by position; empty ones for tiers that are not read through a queue."""
    found = [paces.get(tier) for tier in range(tiers)]
    return [
        pb.Pace(bytes_per_s=p.bytes_per_s, latency_s=p.latency_s, wait_s=p.wait_s) if p else pb.Pace() for p in found
    ]


def commit_reply(committed: Committed) -> pb.CommitReply:
    """The answer to Commit."""
    tokens = np.where(committed.statuses != BlockStatus.FAILED, committed.metas["tokens"], 0)
    epoch = int(committed.metas["epoch"].max(initial=0))
    given = handles(committed.extents, status=committed.statuses, tokens=tokens, epoch=epoch)
    return pb.CommitReply(handles=given.tobytes(), lease=committed.lease)


def _rank(rank: int, namespace: Namespace) -> int:
    if rank >= namespace.spec.rank_count:
        raise InvalidArgument(f"rank: {rank} is above the namespace's last, {namespace.spec.rank_count - 1}")
    return rank


def _records(data: bytes, dtype: np.dtype, thing: str) -> StructArray:
    if len(data) % dtype.itemsize:
        raise InvalidArgument(f"{thing}: {len(data)} bytes is no multiple of {dtype.itemsize}; send whole records")
    return np.frombuffer(data, dtype=dtype)


def _check_sizes(blocks: StructArray, spec: NamespaceSpec) -> None:
    for name, limit, remedy in (
        ("tokens", spec.tokens_per_block, "cut the sequence into blocks of at most that"),
        ("length", spec.block_bytes, "open a namespace for blocks of that size"),
    ):
        values = blocks[name]
        outside = (values < 1) | (values > limit)
        if some(outside):
            raise InvalidArgument(
                f"block.{name}: {int(values[outside][0])} is outside 1 to {limit}, the namespace's limit; {remedy}"
            )


def _check_batch(count: int, limit: int) -> None:
    if count > limit:
        raise InvalidArgument(
            f"batch: {count} blocks are above the limit of {limit} (server.max_batch_blocks); send several calls"
        )
