"""Messages between the connector's scheduler and its workers.

They are plain values, pickled with every step: vLLM's hashes, block ids and tokens. A plan names
each block by vLLM's hash; every worker folds these into names of its own rank.
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
    """names: of all its blocks from the sequence's first, stamped. first: number of the first to fill.
    ids: vLLM's blocks to fill from `first` on, NULL_BLOCK for unwanted ones."""

    names: tuple[bytes, ...]
    first: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fills a request's blocks, of each group.

    deadline_s: after its step has begun, it ends.
    is_in_step: the step computes with the blocks. Otherwise the request waits for a later step.
    """

    request: str
    groups: tuple[GroupLoad, ...]
    deadline_s: float = 60.0
    is_in_step: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """Stores consecutive blocks of one group. It has a number of its own.

    before: name of the preceding block, b"" at a sequence's start. tokens: of all, for routers.
    stamp: of the adapter, which is part of tierd's names but not vLLM's.
    """

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
    """Loads and saves of one step. `spaces` are their namespaces; `is_idle`: the step computes nothing.
    step: its number, from 1."""

    spaces: tuple[Space, ...] = ()
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    is_idle: bool = False
    step: int = 0


@dataclass
class Done(KVConnectorWorkerMetadata):
    """saves: number -> how many workers have ended it. copies: (bytes, seconds) of loads from near
    pages. step: its number. waited_s: how long it waited for its loads."""

    saves: Mapping[int, int]
    copies: tuple[tuple[int, float], ...] = ()
    step: int = 0
    waited_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Adds up the workers' counts."""
        assert isinstance(other, Done)
        numbers = {*self.saves, *other.saves}
        saves = {number: self.saves.get(number, 0) + other.saves.get(number, 0) for number in numbers}
        waited_s = max(self.waited_s, other.waited_s)
        return Done(saves, self.copies + other.copies, max(self.step, other.step), waited_s)
