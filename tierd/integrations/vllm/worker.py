"""The connector in vLLM's workers: copies KV between vLLM's blocks and tierd's pages.

Threads carry out Orders; the scheduler decides. The step waits for short loads only, which it
computes with. An idle engine waits load_grace_s a step for loads. Each load is reported once, with
every block that it failed to fill; it ends at its deadline. Each save is reported once, when its
blocks are no longer read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tierd.client import About, OpenedNamespace, PutGroup
from tierd.core.formats.model import ROOT
from tierd.errors import TierdError
from tierd.integrations.coding import Order
from tierd.integrations.courier import Courier
from tierd.integrations.loading import Loaded
from tierd.integrations.pieces import Pieces
from tierd.integrations.store import EngineStore
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
        self._loading: Courier[int, Loaded] = Courier("tierd-load", threads=options.threads, limit=options.queue_limit)
        self._loads: dict[int, Load] = {}  # in threads
        self._ended: list[tuple[Load, Loaded]] = []  # not reported yet
        self._step, self._number, self._waited_s = 0, 0, 0.0
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
        """Starts loads in threads, unless vLLM will set new blocks to zero in this step."""
        if not self._has_zeroing:
            self._begin(orders)

    def begin_loads(self, orders: Orders) -> None:
        """Starts loads in threads, if they have not begun, and carries out those that the step computes
        with."""
        self._step, self._is_idle = orders.step, orders.is_idle
        self._begin(orders)
        for load in orders.loads:
            if load.is_in_step:
                begun = time.monotonic()
                self._ended.append((load, _none_on_error(self._work(orders, load))))
                self._waited_s += time.monotonic() - begun

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
        taken, self._ended, ended = self._ended, [], Ended()
        taken += [(self._loads.pop(one.key), one.value or Loaded()) for one in self._loading.finished()]
        for load, loaded in taken:
            missing = [block for at, part in enumerate(load.groups) for block in _missing(part, loaded, at)]
            self._note(ended, load, missing)
        return ended

    def take_saves(self) -> Done:
        """Numbers of saves that have ended, successful or not, and what the step cost."""
        numbers = self._saved + [outcome.key for outcome in self._saving.finished()]
        (self._saved, waited_s), self._waited_s = ([], self._waited_s), 0.0
        return Done(dict.fromkeys(numbers, 1), self._store.advice.take_copies(), self._step, waited_s)

    def take_counts(self) -> Counter[str]:
        """Counts since the last call."""
        return self._store.take_counts()

    def close(self) -> None:
        """Waits for transfers, then ends the session."""
        self._loading.close(timeout_s=END_S)
        self._saving.close(timeout_s=END_S)
        self._store.close()
        self._memory = None

    def _begin(self, orders: Orders) -> None:
        if orders is self._begun:
            return
        self._begun = orders
        for load in orders.loads:
            if load.is_in_step:
                continue
            self._number += 1
            if self._loading.submit(self._number, self._work(orders, load)):
                self._loads[self._number] = load
            else:
                self._ended.append((load, Loaded()))

    def _work(self, orders: Orders, load: Load) -> Callable[[], Loaded]:
        """A load that begins now: unfinished device steps may still read its blocks for their
        previous owners."""
        return partial(self._load, orders.spaces, load, self._so_far(), time.monotonic() + load.deadline_s)

    # -- in threads

    def _load(self, spaces: Sequence[Space], load: Load, ready: Any, until: float) -> Loaded:
        if ready is not None:
            ready.synchronize()
        groups = [
            space.group(self._space(space), part.names, ranks=(self._rank,), request=load.request)
            for space, part in zip(spaces, load.groups, strict=True)
        ]
        targets = [self._targets(at, part) for at, part in enumerate(load.groups)]
        return self._store.load(groups, targets, stream=self._stream, timeout_s=until - time.monotonic())

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
        if self._ended:
            return
        if self._loading.unfinished:
            self._loading.await_any(timeout_s=self._options.load_grace_s)
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


def _none_on_error(work: Callable[[], Loaded]) -> Loaded:
    """The engine goes on, as if the load had been in a thread."""
    try:
        return work()
    except TierdError:
        return Loaded()


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
