"""What the scheduler's side of the connector tells the workers' side, and what comes back.

Purpose: plain values, pickled with every step: vLLM's own hashes, block ids and tokens, nothing longer. Non-purpose: deciding. Invariant: a plan names each block by
vLLM's hash of it; every worker folds these into names of its own rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tierd.integrations.vllm.spaces import Space

NULL_BLOCK = 0
"""vLLM's id of a block that a request does not need."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Of one group. names: of all its blocks from the first of the sequence, stamped; first: number of the first one to be filled; ids: of vLLM's blocks that
    take those from `first` on, NULL_BLOCK where it is not wanted."""

    names: tuple[bytes, ...]
    first: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fills a request's blocks, of each group."""

    request: str
    groups: tuple[GroupLoad, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Stores consecutive blocks of one group. number: of this save; before: name of the block before the first, b"" for the first of a sequence; tokens: of all
    of them, for routers; stamp: of the adapter, which tierd's names have and vLLM's have not."""

    number: int
    group: int
    position: int
    before: bytes
    names: tuple[bytes, ...]
    ids: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    stamp: bytes = b""


@dataclass
class Orders(KVConnectorMetadata):
    """Of one step. spaces: where both happen; is_idle: the step computes nothing."""

    spaces: tuple[Space, ...] = ()
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    is_idle: bool = False


@dataclass
class Done(KVConnectorWorkerMetadata):
    """saves: number -> of how many workers it has ended."""

    saves: Mapping[int, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both workers' together."""
        assert isinstance(other, Done)
        numbers = {*self.saves, *other.saves}
        return Done({number: self.saves.get(number, 0) + other.saves.get(number, 0) for number in numbers})
