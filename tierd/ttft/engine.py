"""An engine that loads prefixes from a real daemon, over a link and from a disk of given rates.

Calls, reads and copies are real. A step ends when it really ends, or when the machine's would if
that is later. Computing takes time and nothing else, as on a GPU: it goes beside the copies. So
only the end of the last layer is waited for.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.client import Client, Group, Lease, OpenedNamespace
from tierd.core.formats.meta import META
from tierd.errors import OperatorError
from tierd.loads_by_layer import layer_stops
from tierd.testing import is_content
from tierd.ttft.machine import Machine, Shape
from tierd.ttft.timeline import Job, Source, Timeline, arrivals, link_s

LOAD_TIMEOUT_S = 60.0
SLACK_S = 100e-6
"""A sleep ends late by about so much; the rest of a wait is spun."""


@dataclass(frozen=True, slots=True)
class Measured:
    """first_token_s: by the clock. The timeline's is without the last wake-up."""

    timeline: Timeline
    first_token_s: float


class Engine:
    """One engine with memory for a prefix of so many blocks. machine, shape: scaled."""

    def __init__(self, client: Client, space: OpenedNamespace, machine: Machine, shape: Shape, *, blocks: int) -> None:
        self._client, self._space, self._machine, self._shape = client, space, machine, shape
        self._own = np.ones((shape.layers, blocks, shape.layer_bytes), np.uint8)  # ones: every page is there
        self._begun = 0.0

    def compute(self, job: Job, *, missed: NDArray[np.uint8] | None = None) -> Measured:
        """A request that loads nothing. missed: block hashes that the daemon is asked for in vain."""
        self._begun = time.perf_counter()
        if missed is not None and self._client.acquire_by_layer(Group(self._space, missed)):
            raise OperatorError("ttft: the daemon has blocks that nobody stored; use another namespace")
        called = self._now()
        layers = self._shape.layers
        ready = np.full(layers, called)
        timeline = Timeline(called, ready, ready, job.layer_s(self._machine, layers))
        return Measured(timeline, self._computed(timeline))

    def load(self, job: Job, hashes: NDArray[np.uint8], source: Source, *, by_layer: bool) -> Measured:
        """A request that loads the blocks of these hashes. Raises OperatorError if some did not come
        from this source, or a byte of them is wrong."""
        self._begun = time.perf_counter()
        group = Group(self._space, hashes)
        ask = self._client.acquire_by_layer if by_layer else self._client.acquire
        with ask(group, timeout_s=LOAD_TIMEOUT_S) as lease:
            try:
                measured, good = self._computed_after(lease, job, source, by_layer=by_layer), lease.check()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they have views, which keep the lease
                raise
        self._check_bytes(hashes, is_good=good == len(hashes))
        return measured

    def _computed_after(self, lease: Lease, job: Job, source: Source, *, by_layer: bool) -> Measured:
        """Copies what a lease has, and computes."""
        called = self._now()
        self._check_source(lease, job.loaded, source)
        blocks = job.loaded // self._shape.tokens_per_block
        floors = self._floors(blocks, source, by_layer=by_layer)
        timeline = self._stream(lease, floors, called, job.layer_s(self._machine, self._shape.layers))
        timeline = timeline if by_layer else timeline.as_whole()
        return Measured(timeline, self._computed(timeline))

    def _stream(self, lease: Lease, floors: Sequence[float], called: float, layer_s: float) -> Timeline:
        """Copies layer by layer as they arrive."""
        views, arrived, copied = lease.views(), list[float](), list[float]()
        each_s = link_s(len(views) * self._shape.layer_bytes, self._machine)
        for layer, floor in enumerate(floors):
            before = arrived[-1] if arrived else called
            if not lease.await_layer(layer, timeout_s=0.0):
                if not lease.await_layer(layer, timeout_s=LOAD_TIMEOUT_S):
                    raise OperatorError(f"ttft: layer {layer} did not come; see the daemon's log")
                before = self._now()
            arrived.append(max(before, floor))
            self._copy(views, layer)
            free = max(arrived[-1], copied[-1] if copied else 0.0)
            copied.append(max(self._now(), free + each_s))
        return Timeline(called, np.array(arrived), np.array(copied), layer_s)

    def _copy(self, views: Sequence[NDArray[np.uint8]], layer: int) -> None:
        size = self._shape.layer_bytes
        mine, begin = self._own[layer], layer * size
        for row, view in enumerate(views):
            mine[row] = view[begin : begin + size]

    def _computed(self, timeline: Timeline) -> float:
        """Waits for the last layer, and returns the clock's time to first token."""
        left = timeline.first_token_s - self._now() - SLACK_S
        if left > 0:
            time.sleep(left)
        while self._now() < timeline.first_token_s:
            pass
        return self._now()

    def _now(self) -> float:
        """Seconds since the request."""
        return time.perf_counter() - self._begun

    def _floors(self, blocks: int, source: Source, *, by_layer: bool) -> Sequence[float]:
        """Seconds before which the machine's disk would not have each layer."""
        layers = self._shape.layers
        if source is not Source.NVME:
            return [0.0] * layers
        stops = stops_in(self._shape, blocks) if by_layer else [layers]
        return list(arrivals(blocks * self._shape.block_bytes, self._machine, stops=stops))

    def _check_source(self, lease: Lease, tokens: int, source: Source) -> None:
        tiers = dict(zip(self._client.tiers, lease.tier_tokens, strict=False))
        found = sum(count for name, count in tiers.items() if name.startswith(source.value))
        if lease.tokens < tokens or found < tokens:
            raise OperatorError(
                f"ttft: {found} of {tokens} tokens came from {source.value}; use shorter prefixes, or a daemon with a"
                f" larger {source.value} tier and session_share that nobody else uses"
            )

    def _check_bytes(self, hashes: NDArray[np.uint8], *, is_good: bool) -> None:
        good = (is_content(np.ascontiguousarray(self._own[:, i]).reshape(-1), name) for i, name in enumerate(hashes))
        if not (is_good and all(good)):
            raise OperatorError("ttft: a loaded block has other bytes than were stored; run `tierctl scrub`")


def stops_in(shape: Shape, blocks: int) -> list[int]:
    """Layers after each part in which the daemon reads so many blocks from a store."""
    metas = np.zeros(blocks, META)
    metas["stored_length"], metas["layers"] = shape.block_bytes, shape.layers
    return layer_stops(metas)
