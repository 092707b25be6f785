"""The connector in vLLM's workers: copies KV between vLLM's blocks and tierd's pages.

Threads carry out Orders; the scheduler decides. Only shutdown waits for the daemon, with a
deadline. An idle engine waits load_grace_s a step for loads. Each load is reported once, with every
block that it failed to fill. Each save is reported once, when its blocks are no longer read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tierd.client import About, OpenedNamespace, PutGroup
from tierd.core.formats.model import ROOT
from tierd.errors import TierdError
from tierd.integrations.coding import Order
from tierd.integrations.courier import Courier
from tierd.integrations.loading import LayerLoad, Loaded
from tierd.integrations.pieces import Pieces
from tierd.integrations.store import EngineStore
from tierd.integrations.vllm.loads import Loads, is_layerwise
from tierd.integrations.vllm.memory import KVMemory
from tierd.integrations.vllm.options import ConnectorOptions
from tierd.integrations.vllm.plan import NULL_BLOCK, Done, GroupLoad, Load, Orders, Save
from tierd.integrations.vllm.spaces import (
    Space,
    check_supported,
    facts_of,
    is_kept_by_blocks,
    is_replicated,
    spaces_of,
    stamped,
)
from tierd.integrations.vllm.values import order_of

END_S = 10.0
"""Seconds that a shutdown waits for transfers in flight."""
SAVE_GRACE_S = 0.001
"""As load_grace_s, for saves, which no request waits for."""


@dataclass
class Ended:
    """Loads since the last report.

    requests: all. failed: those that miss blocks and start over.
    blocks: missing blocks of the others, which continue before them.
    """

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)


class WorkerSide:
    """config: VllmConfig; kv: KVCacheConfig; rank: of this worker. Raises Unsupported, ConfigError."""

    def __init__(self, config: Any, kv: Any, options: ConnectorOptions, *, rank: int) -> None:
        check_supported(config, kv)
        spaces_of(config, kv, options)  # raises for an unfit codec, before vLLM asks the scheduler
        self._kv, self._options = kv, options
        self._is_replicated, self._is_kept_by_blocks = is_replicated(kv), is_kept_by_blocks(kv)
        self._rank = 0 if self._is_replicated else rank
        self._is_writer = rank == 0 or not self._is_replicated
        self._store = EngineStore(options, facts_of(config, kv, role="worker", rank=rank))
        layers = [group.layer_names for group in kv.kv_cache_groups]
        self._layers = {name: at for names in layers for at, name in enumerate(names)}
        self._loads = Loads(options, layer_count=len(layers[0]), is_layerwise=is_layerwise(config))
        self._stream: Any = None
        self._has_zeroing = getattr(kv, "needs_kv_cache_zeroing", True)
        self._begun: Orders | None = None  # whose loads have begun
        self._saving: Courier[int, int] = Courier("tierd-save", threads=1, limit=options.queue_limit)
        self._opened: dict[int, OpenedNamespace] = {}
        self._memory: KVMemory | None = None
        self._value_orders: list[Order] = []  # with a codec: by group
        self._saved: list[int] = []
        self._is_idle = False

    def register(self, caches: Any) -> None:
        """Takes vLLM's KV memory, by layer. Raises Unsupported if a codec is set and the order of values
        in it is not known."""
        self._memory = KVMemory(caches, self._kv)
        self._stream = _stream() if self._memory.is_on_device else None
        if self._options.codec:
            groups = self._kv.kv_cache_groups
            self._value_orders = [order_of(group, caches[group.layer_names[0]]) for group in groups]

    def begin_early(self, orders: Orders) -> None:
        """Starts the step's loads, unless vLLM will set new blocks to zero in this step."""
        if not self._has_zeroing:
            self._begin(orders)

    def begin_loads(self, orders: Orders) -> None:
        """Starts the step's loads in threads, if they have not begun."""
        self._is_idle = orders.is_idle
        self._begin(orders)
        self._loads.await_step()

    def await_layer(self, name: str) -> None:
        """Waits for this layer of the loads that the step computes with. Unknown layers have no KV of
        their own."""
        layer = self._layers.get(name)
        if layer is not None:
            self._loads.await_layer(layer)

    def begin_saves(self, orders: Orders) -> None:
        """Starts saves of the step's KV, which the device may still be writing."""
        ready = self._so_far() if orders.saves else None
        for save in orders.saves:
            work = partial(self._save, orders.spaces[save.group], save, ready)
            if not self._is_writer or not self._saving.submit(save.number, work):
                self._saved.append(save.number)

    def take_loads(self) -> Ended:
        """Loads that have ended; an idle engine waits briefly."""
        if self._is_idle:
            self._rest()
        ended = Ended()
        for load, loaded in self._loads.take():
            missing = [block for at, part in enumerate(load.groups) for block in _missing(part, loaded, at)]
            self._note(ended, load, missing)
        return ended

    def take_saves(self) -> Done | None:
        """Numbers of saves that have ended, successful or not."""
        numbers = self._saved + [outcome.key for outcome in self._saving.finished()]
        self._saved, copies, waited_s = [], self._store.advice.take_copies(), self._loads.take_waited_s()
        return Done(dict.fromkeys(numbers, 1), copies, waited_s) if numbers or copies or waited_s else None

    def take_counts(self) -> Counter[str]:
        """Counts since the last call."""
        late, self._loads.late = self._loads.late, 0
        return self._store.take_counts() + Counter(late_loads=late)

    def close(self) -> None:
        """Waits for transfers, then ends the session."""
        self._loads.close(timeout_s=END_S)
        self._saving.close(timeout_s=END_S)
        self._store.close()
        self._memory = None

    def _begin(self, orders: Orders) -> None:
        """Unfinished device steps may still read the target blocks for their previous owners."""
        if orders.loads and orders is not self._begun:
            self._begun, ready = orders, self._so_far()
            for load in orders.loads:
                self._loads.begin(load, partial(self._load, orders.spaces, load, ready), stream=self._stream)

    # -- in threads

    def _load(self, spaces: Sequence[Space], load: Load, ready: Any, into: LayerLoad, timeout_s: float) -> Loaded:
        if into.is_given_up:
            return Loaded()
        if ready is not None:
            ready.synchronize()
        groups = [
            space.group(self._space(space), part.names, ranks=(self._rank,))
            for space, part in zip(spaces, load.groups, strict=True)
        ]
        targets = [self._targets(at, part) for at, part in enumerate(load.groups)]
        return self._store.load(groups, targets, into=into, timeout_s=timeout_s)

    def _save(self, space: Space, save: Save, ready: Any) -> int:
        if ready is not None:
            ready.synchronize()
        opened = self._space(space)
        hashes = opened.fold(stamped(save.names, save.stamp))
        if not len(hashes):
            return 0
        parent = opened.fold(stamped([save.before], save.stamp))[0].tobytes() if save.before else ROOT
        group = PutGroup(opened, hashes, rank=self._rank, parent=parent, position=save.position)
        pieces = [self._pieces(save.group, block) for block in save.ids]
        return self._store.save(group, pieces, About(save.names, save.before, save.tokens))

    def _space(self, space: Space) -> OpenedNamespace:
        found = self._opened.get(space.index)
        if found is None or found.spec != space.spec or not found.is_open:
            if space.spec.codec:
                self._store.codings.arrange(space.spec, self._value_orders[space.index])
            found = self._opened[space.index] = self._store.open(space.spec)
        return found

    def _targets(self, group: int, part: GroupLoad) -> list[Pieces | None]:
        wanted = [None if block == NULL_BLOCK else self._pieces(group, block) for block in part.ids]
        return [None] * part.first + wanted

    def _pieces(self, group: int, block: int) -> Pieces:
        if self._memory is None:
            raise TierdError("vllm: no KV memory is registered; this worker was shut down")
        return self._memory.pieces(group, block)

    def _so_far(self) -> Any:
        """An event after all work given to the device so far; None if KV memory is on the host."""
        return _now() if self._memory and self._memory.is_on_device else None

    # -- reports

    def _rest(self) -> None:
        """Waits in an idle step until a transfer ends. vLLM would call again at once and take the
        interpreter from the threads."""
        if self._loads.is_pending:
            self._loads.rest(self._options.load_grace_s)
        elif self._saving.unfinished:
            self._saving.await_any(timeout_s=min(SAVE_GRACE_S, self._options.load_grace_s))

    def _note(self, ended: Ended, load: Load, missing: Sequence[int]) -> None:
        """Reports missing blocks. vLLM accepts single bad blocks only for one group and continues
        before them; otherwise the whole request fails. Nothing waits for a load of its own step."""
        if not load.is_in_step:
            ended.requests.add(load.request)
        if missing and not self._is_kept_by_blocks:
            ended.failed.add(load.request)
        elif missing:
            ended.blocks.update(missing)


def _missing(part: GroupLoad, loaded: Loaded, group: int) -> list[int]:
    """Wanted blocks that were not copied or are not good."""
    good = loaded.good[group] if group < len(loaded.good) else 0
    first = loaded.first[group] if group < len(loaded.first) else 0
    return [
        block for i, block in enumerate(part.ids, start=part.first) if block != NULL_BLOCK and not first <= i < good
    ]


def _now() -> Any:
    """An event on the device's current stream, where the engine computes, after all started work."""
    import torch  # noqa: PLC0415

    event = torch.cuda.Event()
    event.record()
    return event


def _stream() -> Any:
    """A stream for loads, beside that of the engine's computing."""
    import torch  # noqa: PLC0415

    return torch.cuda.Stream()
