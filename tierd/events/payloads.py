"""The format of KV events, as vLLM publishes them over ZMQ: values to payloads and back.

    frames    topic | sequence number, u64 big-endian | payload
    payload   msgpack [time in seconds, [event, ...], data parallel rank]
    map       {"type": "BlockStored", "block_hashes": [...], ...}
    array     ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id,
               medium, lora_name, extra_keys, group_idx]

This module writes and reads both shapes of an event. Reading returns the written values. Fields
added by a newer publisher are skipped. An invalid payload raises CorruptRecord. The format is that
of vLLM 0.32, vllm/distributed/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from tierd.core.formats.model import TierKind
from tierd.errors import CorruptRecord

Hash = int | bytes
Shape = Literal["map", "array"]

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
MEDIUM: Mapping[TierKind, str] = {
    TierKind.DEVICE: GPU,
    TierKind.HOST: CPU,
    TierKind.NVME: STORAGE,
    TierKind.ARCHIVE: STORAGE,
}
"""Routers' names for each kind of tier."""
END = (-1).to_bytes(8, "big", signed=True)
"""A sequence number that ends a replay."""
NAME_BYTES_MAX = 64
"""The longest hash of an engine."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks now in a medium. tokens: of all; empty if unknown: block_size is then 0."""

    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: tuple[int, ...]
    block_size: int
    medium: str | None
    adapter: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that a medium no longer holds."""

    hashes: tuple[Hash, ...]
    medium: str | None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """Routers must forget all earlier events."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """One payload. time_s: since 1970; rank: of data parallelism."""

    time_s: float
    events: tuple[Event, ...]
    rank: int | None = None


def encode(batch: Batch, *, shape: Shape = "map") -> bytes:
    """Writes a payload."""
    put = _to_map if shape == "map" else _to_array
    return bytes(msgpack.packb([batch.time_s, [put(event) for event in batch.events], batch.rank]))


def decode(payload: bytes) -> Batch:
    """Reads a payload; its events may have either shape. Raises CorruptRecord."""
    try:
        time_s, events, *rest = msgpack.unpackb(payload, strict_map_key=False)
        return Batch(float(time_s), tuple(_event(event) for event in events), rest[0] if rest else None)
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise CorruptRecord(
            f"KV events: {len(payload)} bytes are no batch of events ({error!r:.200}); is that another kind of publisher?"
        ) from error


def short_hash(name: bytes) -> int:
    """A hash as most routers use it: its last eight bytes, u64."""
    return int.from_bytes(name[-8:], "big")


def _to_map(event: Event) -> dict[str, Any]:
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, Removed):
        found: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.medium}
    else:
        found = {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": event.tokens,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": event.adapter,
        }
    return found if event.group is None else found | {"group_idx": event.group}


def _to_array(event: Event) -> list[Any]:
    if isinstance(event, Cleared):
        return ["AllBlocksCleared"]
    group = [] if event.group is None else [event.group]
    if isinstance(event, Removed):
        return ["BlockRemoved", event.hashes, event.medium, *group]
    last = [None, *group] if group else []  # extra_keys precede the group
    return [
        "BlockStored",
        event.hashes,
        event.parent,
        event.tokens,
        event.block_size,
        None,
        event.medium,
        event.adapter,
        *last,
    ]


FIELDS: Mapping[str, Sequence[str]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Names of an array's fields, in order, after the type."""


def _event(raw: Any) -> Event:
    if isinstance(raw, Mapping):
        kind, fields = raw["type"], raw
    else:
        kind, *values = raw
        fields = dict(zip(FIELDS[kind], values, strict=False))
    return _value(kind, fields)


def _value(kind: str, fields: Mapping[str, Any]) -> Event:
    if kind == "AllBlocksCleared":
        return Cleared()
    hashes, medium, group = _hashes(fields["block_hashes"]), fields.get("medium"), fields.get("group_idx")
    if kind == "BlockRemoved":
        return Removed(hashes, medium, group)
    if kind != "BlockStored":
        raise ValueError(f"unknown event {kind!r:.40}")
    parent, tokens = fields.get("parent_block_hash"), tuple(int(token) for token in fields["token_ids"])
    return Stored(hashes, parent, tokens, int(fields["block_size"]), medium, fields.get("lora_name"), group)


def _hashes(raw: Sequence[Any]) -> tuple[Hash, ...]:
    if not all(isinstance(one, int | bytes) for one in raw):
        raise TypeError("a hash is neither an integer nor bytes")
    return tuple(raw)
