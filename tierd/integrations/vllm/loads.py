"""Loads in vLLM's worker: some end in their step, whose layers wait for them; others in later steps.

Each load is reported once, and has a deadline. At the deadline it is given up: nothing writes into
its blocks afterwards, and vLLM computes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tierd.integrations.courier import Courier
from tierd.integrations.loading import LayerLoad, Loaded
from tierd.integrations.vllm.options import ConnectorOptions
from tierd.integrations.vllm.plan import Load

Work = Callable[[LayerLoad, float], Loaded]
"""Carries a load out, with so many seconds for the daemon's answer."""


@dataclass
class _Running:
    """layers: those that the step has waited for."""

    order: Load
    load: LayerLoad
    until: float
    layers: set[int] = field(default_factory=set)

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())


class Loads:
    """One worker's. layer_count: of the KV cache group whose layers wait. is_layerwise: whether all
    its attention layers call `await_layer` in each step."""

    def __init__(self, options: ConnectorOptions, *, layer_count: int, is_layerwise: bool) -> None:
        self._layer_count, self._is_layerwise = layer_count, is_layerwise
        self._later, self._now = (
            Courier[int, Loaded](name, threads=options.threads, limit=options.queue_limit)
            for name in ("tierd-load", "tierd-load-now")
        )
        self._of_step: list[_Running] = []
        self._running: dict[int, _Running] = {}
        self._number, self._waited_s = 0, 0.0
        self.late = 0
        """Loads given up so far."""

    @property
    def is_pending(self) -> bool:
        """Whether a load of an earlier step has not been taken."""
        return bool(self._running)

    def begin(self, order: Load, work: Work, *, stream: Any = None) -> None:
        """Starts a load in a thread. stream: as for LayerLoad."""
        until = time.monotonic() + order.deadline_s
        running = _Running(order, LayerLoad(stream, until=until if order.is_in_step else None), until)
        self._number += 1
        courier = self._now if order.is_in_step else self._later
        if not courier.submit(self._number, lambda: _carried_out(running, work)):
            running.load.give_up()
        if order.is_in_step:
            self._of_step.append(running)
        else:
            self._running[self._number] = running

    def await_step(self) -> None:
        """Waits for the step's loads as a whole if its layers do not."""
        if self._of_step and not self._is_layerwise:
            for layer in range(self._layer_count):
                self.await_layer(layer)

    def await_layer(self, layer: int) -> None:
        """Waits until the layer of the step's loads is in vLLM's memory, or their deadlines."""
        if not self._of_step:
            return
        begun = time.monotonic()
        for running in self._of_step:
            running.layers.add(layer)
            if not running.load.wait(layer, timeout_s=running.left_s):
                self._give_up(running)
        self._waited_s += time.monotonic() - begun

    def rest(self, timeout_s: float) -> None:
        """Waits until a load of an earlier step has ended, or until the first deadline."""
        if self._running:
            self._later.await_any(timeout_s=min(timeout_s, *(running.left_s for running in self._running.values())))

    def take(self) -> list[tuple[Load, Loaded]]:
        """Loads that have ended since the last call, with all of this step's."""
        taken = [(running.order, self._ended(running)) for running in self._of_step]
        self._of_step = []
        self._now.finished()
        for outcome in self._later.finished():
            running = self._running.pop(outcome.key, None)
            if running is not None:
                taken.append((running.order, outcome.value or Loaded()))
        for number, running in [*self._running.items()]:
            if running.load.is_given_up or (not running.left_s and self._give_up(running)):
                del self._running[number]
                taken.append((running.order, Loaded()))
        return taken

    def take_waited_s(self) -> float:
        """Seconds that steps waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def close(self, timeout_s: float) -> None:
        """Gives up all loads; waits for their threads."""
        for running in (*self._of_step, *self._running.values()):
            running.load.give_up()
        for courier in (self._later, self._now):
            courier.close(timeout_s=timeout_s)

    def _ended(self, running: _Running) -> Loaded:
        """The result of a load of this step, which has computed with it."""
        loaded = running.load.result(timeout_s=running.left_s)
        if loaded is None and not self._give_up(running):
            loaded = running.load.result(timeout_s=0)
        if len(running.layers) < self._layer_count:  # it has computed with layers that it did not wait for
            self._is_layerwise, loaded = False, None
        return loaded or Loaded()

    def _give_up(self, running: _Running) -> bool:
        if not running.load.is_given_up and running.load.give_up():
            self.late += 1
        return running.load.is_given_up


def _carried_out(running: _Running, work: Work) -> Loaded:
    try:
        return work(running.load, running.left_s)
    finally:
        running.load.end(Loaded())  # an error: nobody waits until the deadline


def is_layerwise(config: Any) -> bool:
    """Whether all attention layers of each step call the connector. config: VllmConfig. Whole CUDA
    graphs replay without calls, and draft layers run after the step's loads were taken."""
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    has_whole_graphs = mode is not None and mode.has_full_cudagraphs()
    return not has_whole_graphs and getattr(config, "speculative_config", None) is None
