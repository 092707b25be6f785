"""Builds requests: from a call's arguments to its message.

The functions are pure and shared by both transports. They do no I/O; replies.py parses replies.
Invalid arguments raise InvalidArgument here, before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd._proto import cache_pb2 as pb
from tierd.client.values import About, Group, Hashes, OpenedNamespace, PutGroup, Target, Tokens
from tierd.core.formats.block import U4_MAX, text, token_array, whole
from tierd.core.formats.model import (
    COMMIT_BLOCK,
    HASH_BYTES,
    PRIORITY_LIMIT,
    PUT_BLOCK,
    RETENTION_LIMIT_S,
    TTL_LIMIT_S,
    Durability,
    StructArray,
    TierKind,
)
from tierd.errors import InvalidArgument

SESSION_KEY = "tierd-session"
CREDENTIAL_KEY = "authorization"
REQUEST_KEY = "tierd-request"
GIVING = frozenset({"Acquire", "Reserve", "Commit"})
"""Calls that leave something held; without their reply, a client does not know what."""
ABOUT_BYTES = 2 << 20
"""Maximum bytes of a group's hashes, and of its tokens, to keep below gRPC's 8 MiB."""

REQUEST_BYTES = 64
"""Bytes of a request's id that are sent."""
TIER_DIGITS = 5
"""Maximum digits of a tier's index; no daemon has so many tiers."""
T = TypeVar("T")


def open_namespace_request(namespace: OpenedNamespace) -> pb.OpenNamespaceRequest:
    """The request that opens a namespace. Raises InvalidArgument."""
    spec = namespace.spec.checked()
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
        error_limit=namespace.error_limit,
        codec=spec.codec,
    )


def groups_of(
    what: OpenedNamespace | Group | Sequence[Group], hashes: Hashes | None, tokens: int | None
) -> list[Group]:
    """The groups of a call, from groups or from a namespace and its hashes. Raises InvalidArgument."""
    if isinstance(what, OpenedNamespace):
        if hashes is None:
            raise InvalidArgument("hashes: none for the namespace; pass namespace.hash(tokens)")
        return [Group(what, checked_hashes(hashes), tokens)]
    if hashes is not None or tokens is not None:
        raise InvalidArgument("hashes: given beside groups, which have their own; pass one or the other")
    return listed(what, Group)


def checked_hashes(hashes: Hashes) -> Hashes:
    """uint8 [n, 32]. Raises InvalidArgument."""
    array = np.ascontiguousarray(hashes)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != HASH_BYTES:
        raise InvalidArgument(
            f"hashes: {array.dtype} {array.shape} is not uint8 [blocks, {HASH_BYTES}]; pass those of namespace.hash"
        )
    return array


def listed(what: Any, kind: type[T]) -> list[T]:
    """One value or several of a kind, as a list. Raises InvalidArgument."""
    groups = [what] if isinstance(what, kind) else list(what)
    for group in groups:
        if not isinstance(group, kind) or not isinstance(group.namespace, OpenedNamespace):  # type: ignore[attr-defined]
            raise InvalidArgument(
                f"groups: {group!r:.80} is no {kind.__name__} of a namespace that was opened; pass one"
            )
        checked_hashes(group.hashes)  # type: ignore[attr-defined]
    if not groups:
        raise InvalidArgument("groups: none; a plain model has one")
    return groups


def sequence_group(namespace: OpenedNamespace, what: Tokens | Hashes | Group) -> Group:
    """The group of a get: of tokens (with a short last block), of hashes, or the given group."""
    if isinstance(what, Group):
        return what
    if _is_hashes(what):
        return Group(namespace, checked_hashes(what))  # type: ignore[arg-type]
    return Group(namespace, namespace.hash(what, with_tail=True), len(what))


def sequence_put(namespace: OpenedNamespace, what: Tokens | Hashes | PutGroup, *, lengths: Sequence[int]) -> PutGroup:
    """The group of a put, for blocks of these lengths. Tokens may include a short last block or
    leave it out. Raises InvalidArgument."""
    if isinstance(what, PutGroup):
        return what
    if _is_hashes(what):
        return _filled(PutGroup(namespace, checked_hashes(what)), lengths)  # type: ignore[arg-type]
    size, count = namespace.spec.tokens_per_block, len(what)
    full = count // size
    if len(lengths) not in (full, -(-count // size)):
        raise InvalidArgument(
            f"blocks: {len(lengths)} for {count} tokens, which are {full} full blocks of {size}; pass one each, and one"
            " more to store the rest"
        )
    tail = len(lengths) > full
    hashes, covered = namespace.hash(what, with_tail=tail), count if tail else full * size
    return _filled(PutGroup(namespace, hashes, covered, about=About(tokens=what[:covered])), lengths)


def _filled(group: PutGroup, lengths: Sequence[int]) -> PutGroup:
    """Sets the buffers' lengths. Raises InvalidArgument if a buffer is shorter than its block
    needs, or longer than a full block."""
    wanted, most = put_lengths(group).tolist(), group.namespace.spec.block_bytes
    for i, (length, least) in enumerate(zip(lengths, wanted, strict=False) if lengths != wanted else ()):
        if not least <= length <= most:
            remedy = f"pass {least} to {most}, or give the blocks' lengths in a PutGroup"
            raise InvalidArgument(f"buffer {i}: {length} bytes for a block of {least}; {remedy}")
    return replace(group, lengths=lengths)


def _is_hashes(what: Tokens | Hashes) -> bool:
    return isinstance(what, np.ndarray) and what.ndim == 2


def wanted_tier(name: str) -> dict[str, Any]:
    """Fields for a tier: any tier of a kind (`host`), or one (`device.1`). Raises InvalidArgument."""
    kind, dot, index = str(name).partition(".")
    kinds = {"device": TierKind.DEVICE, "host": TierKind.HOST}
    if kind not in kinds or (dot and not (index.isdecimal() and len(index) <= TIER_DIGITS)):
        raise InvalidArgument(
            f"tier: {name!r} cannot be mapped; ask for 'host', 'device', or one of them as 'device.1'"
        )
    return {"tier": int(kinds[kind]), "nth": int(index) + 1 if dot else 0}


INTENTS = {"default": pb.INTENT_DEFAULT, "none": pb.INTENT_NONE, "load": pb.INTENT_LOAD}


def intent(name: str) -> int:
    """The intent of a lookup. Raises InvalidArgument."""
    if name not in INTENTS:
        raise InvalidArgument(f"intent: {name!r} is unknown; use one of {', '.join(INTENTS)}")
    return INTENTS[name]


def target(of: str | Target) -> dict[str, Any]:
    """Fields for a prefetch. Raises InvalidArgument."""
    if not isinstance(of, Target):
        return wanted_tier(of)
    if of.ttl_s is not None and not 0 < of.ttl_s <= TTL_LIMIT_S:
        raise InvalidArgument(f"ttl_s: {of.ttl_s} is outside 0 to {TTL_LIMIT_S}; give the seconds until the use")
    ttl_ms = 0 if of.ttl_s is None else max(1, int(of.ttl_s * 1000))
    return wanted_tier(of.tier) | {"ttl_ms": ttl_ms}


def group_message(group: Group) -> pb.Group:
    """A group as Lookup, Acquire, Prefetch and Get carry it. Raises InvalidArgument."""
    hashes = checked_hashes(group.hashes)
    return pb.Group(
        namespace=group.namespace.id,
        ranks=[whole("ranks", rank, U4_MAX, remedy="count ranks from 0") for rank in group.ranks],
        hashes=hashes.tobytes(),
        tokens_per_block=group.namespace.spec.tokens_per_block,
        tokens=group.namespace.tokens_in(len(hashes), tokens=group.tokens),
        need=whole("need", group.need, 2, remedy="give one of tierd.client.Need"),  # type: ignore[arg-type]
        need_tokens=whole(
            "need_tokens", group.need_tokens, (1 << 63) - 1, remedy="give the number of last tokens needed"
        ),
        digest=group.namespace.digest,
        error_limit=group.namespace.error_limit if group.error_limit is None else group.error_limit,
        request=request_id(group.request),
    )


def request_id(given: str) -> bytes:
    """An engine's id of a request as messages carry it. Raises InvalidArgument."""
    return text("request", given).encode(errors="replace")[:REQUEST_BYTES]


def computed_message(request: str, tokens: int, times: tuple[float, float]) -> pb.Computed:
    """An engine's decision to compute. times: of loading and computing. Raises InvalidArgument."""
    count = whole("tokens", tokens, (1 << 63) - 1, remedy="count the tokens that are computed")
    try:
        load_s, compute_s = map(float, times)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"times: {times!r:.80} are no two numbers; give seconds of loading, of computing"
        ) from None
    return pb.Computed(request=request_id(request), tokens=count, load_s=load_s, compute_s=compute_s)


def put_lengths(group: PutGroup) -> NDArray[np.uint32]:
    """Bytes of each block. Raises InvalidArgument."""
    covered = group.namespace.block_tokens(len(group.hashes), tokens=group.tokens)
    if group.lengths is None:
        return group.namespace.block_lengths(covered)
    if len(group.lengths) != len(covered):
        raise InvalidArgument(f"lengths: {len(group.lengths)} for {len(covered)} blocks; pass one each")
    return np.asarray(
        [whole("lengths", length, U4_MAX, remedy="give it in bytes") for length in group.lengths], np.uint32
    )


def put_group_message(group: PutGroup, *, with_names: bool = False) -> pb.PutGroup:
    """A group for Reserve and Put. with_names: with the engine's names. Raises InvalidArgument."""
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
    if with_names and group.about is not None:
        _add_names(message, group.about)
    return message


def _say(message: pb.PutGroup, group: PutGroup) -> None:
    """Adds priorities and retention times. Raises InvalidArgument."""
    if group.priority is None:
        raise InvalidArgument(f"retention_s: {group.retention_s!r:.80} without a priority; give both, or neither")
    for value in _of_each(group, "priority"):
        message.priorities.append(whole("priority", value, PRIORITY_LIMIT, remedy="leave it out for the default"))
    for value in _of_each(group, "retention_s") if group.retention_s is not None else ():
        if value is not None and not 0 < value <= RETENTION_LIMIT_S:
            raise InvalidArgument(
                f"retention_s: {value} is not above 0 and at most {RETENTION_LIMIT_S}; give None for no limit"
            )
        message.retention_s.append(0 if value is None else math.ceil(value))


def _of_each(group: PutGroup, name: str) -> Sequence[float | None]:
    """The group's value for all blocks, or one for each."""
    given = getattr(group, name)
    if not isinstance(given, Sequence | np.ndarray):
        return [given]
    if len(given) != len(group.hashes):
        raise InvalidArgument(f"{name}: {len(given)} for {len(group.hashes)} blocks; give one for all, or one for each")
    return list(given)


def _add_names(message: pb.PutGroup, about: About) -> None:
    """Adds the engine's names and tokens, except what does not fit: the blocks matter more."""
    hashes, tokens = b"".join(about.hashes), token_array(about.tokens).tobytes()
    if len(hashes) <= ABOUT_BYTES:
        message.engine_hashes, message.engine_per_block = hashes, about.per_block if hashes else 0
        message.engine_parent = about.parent if hashes else b""
    if len(tokens) <= ABOUT_BYTES and len(hashes) <= ABOUT_BYTES:
        message.token_ids = tokens


def reserve_request(
    groups: Iterable[PutGroup], tier: str, *, durable: bool, with_names: bool = False
) -> pb.ReserveRequest:
    """durable: existing blocks are made durable now, others by the commit. Raises InvalidArgument."""
    return pb.ReserveRequest(
        groups=[put_group_message(group, with_names=with_names) for group in groups],
        **wanted_tier(tier),
        durability=(Durability.DURABLE if durable else Durability.MEMORY).value,  # type: ignore[arg-type]
    )


def commit_request(
    reservation: int, blocks: StructArray | None, *, durable: bool, lease: bool = False, keep_open: bool = False
) -> pb.CommitRequest:
    """blocks: COMMIT_BLOCK [n]; None: every block as named in Reserve. Raises InvalidArgument."""
    if blocks is not None and getattr(blocks, "dtype", None) != COMMIT_BLOCK:
        raise InvalidArgument(f"blocks: {type(blocks).__name__} is no array of COMMIT_BLOCK; pass the result of naming")
    return pb.CommitRequest(
        reservation=reservation,
        blocks=None if blocks is None else pb.CommitGroup(blocks=blocks.tobytes()),
        durability=(Durability.DURABLE if durable else Durability.MEMORY).value,  # type: ignore[arg-type]
        lease=lease,
        keep_open=keep_open,
    )


def named_indices(request: pb.CommitRequest) -> list[int] | None:
    """Indices of the reservation's blocks that a commit names; None: all."""
    if not request.HasField("blocks"):
        return None
    return np.frombuffer(request.blocks.blocks, dtype=COMMIT_BLOCK)["index"].tolist()  # type: ignore[no-any-return]


def watch_request(after: int) -> pb.WatchRequest:
    """after: sequence number of the last event seen."""
    return pb.WatchRequest(after=whole("after", after, (1 << 64) - 1, remedy="give an event's sequence number"))
