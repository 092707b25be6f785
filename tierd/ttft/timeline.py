"""When each layer of a prefix is there, copied and computed, and for what the engine waited.

Times are seconds since the request, float64 [layers]. A stage handles layers in order, one at a
time. So layer n ends at max(end of n - 1, ready of n) + its own time. Copies go beside computing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.ttft.machine import Machine

Times = NDArray[np.float64]


class Source(enum.StrEnum):
    """The place of a prefix. DEVICE: the engine's own memory."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class Job:
    """A request: so many tokens of prefix, of which `loaded` come from their source, then a tail."""

    prefix: int
    tail: int
    loaded: int

    def layer_s(self, machine: Machine, layers: int) -> float:
        """Seconds that each layer of the tokens to compute takes."""
        return machine.prefill_s(self.loaded, self.prefix - self.loaded + self.tail) / layers


class Sizes(NamedTuple):
    """Of a model: its layers, and bytes of a token in all of them."""

    layers: int
    token_bytes: float


@dataclass(frozen=True, slots=True)
class Stalls:
    """Seconds of waiting before each layer, float64 [layers]: for the answer of the daemon's call,
    for the disk, for the link."""

    call: Times
    disk: Times
    link: Times


@dataclass(frozen=True, slots=True)
class Timeline:
    """called: the daemon has answered. arrived: in host memory, not before that. copied: in the
    engine's memory, not before that. layer_s: of computing a layer."""

    called: float
    arrived: Times
    copied: Times
    layer_s: float

    @property
    def ends(self) -> Times:
        """The end of computing each layer."""
        return streamed(self.copied, self.layer_s)

    @property
    def first_token_s(self) -> float:
        """The end of the last layer."""
        return float(self.ends[-1])

    def stalls(self) -> Stalls:
        """The engine's waiting, by its cause. Together with computing it is the time to first token."""
        start = np.concatenate([[0.0], self.ends[:-1]])
        called = np.maximum(start, self.called)
        arrived = np.maximum(called, self.arrived)
        copied = np.maximum(start, self.copied)
        return Stalls(called - start, arrived - called, copied - arrived)

    def as_whole(self) -> Timeline:
        """The same for an engine that computes after the last layer's copy."""
        last = np.ones(len(self.copied))
        return Timeline(self.called, last * self.arrived[-1], last * self.copied[-1], self.layer_s)


def streamed(ready: Times, each_s: float) -> Times:
    """Ends of a stage that takes `each_s` for each layer."""
    steps = each_s * np.arange(len(ready))
    ends: Times = np.maximum.accumulate(ready - steps) + steps + each_s
    return ends


def arrivals(size: float, machine: Machine, *, stops: Sequence[int]) -> Times:
    """Least times at which layers of `size` bytes in all come from the disk. stops: layers after
    each part that it reads."""
    layers, ends = stops[-1], np.asarray(stops)
    stop = ends[np.searchsorted(ends, np.arange(layers), side="right")]
    times: Times = machine.disk_latency_s + size * stop / layers / machine.disk_bytes_per_s
    return times


def link_s(layer_bytes: float, machine: Machine) -> float:
    """Seconds of a copy over the link."""
    return machine.link_latency_s + layer_bytes / machine.link_bytes_per_s


def bound(job: Job, source: Source, machine: Machine, *, sizes: Sizes, stops: Sequence[int] = ()) -> Timeline:
    """The least that arithmetic allows a load by layer: nothing but the machine's rates takes time.

    stops: layers after each part that the disk reads; none: each layer alone.
    """
    layers, size = sizes.layers, job.loaded * sizes.token_bytes
    arrived = zeros = np.zeros(layers)
    if source is Source.NVME and size:
        arrived = arrivals(size, machine, stops=stops or range(1, layers + 1))
    is_copied = source in (Source.HOST, Source.NVME) and size
    copied = streamed(arrived, link_s(size / layers, machine)) if is_copied else zeros
    return Timeline(0.0, arrived, copied, job.layer_s(machine, layers))


def crossover(prefixes: list[int], loaded: list[float], computed: list[float]) -> float | None:
    """The least prefix from which on loading is faster than computing; 0: the first one already.
    None: it never is. Between measured prefixes the ratio of both counts as a power of the length."""
    gain = np.log(np.asarray(computed)) - np.log(np.asarray(loaded))
    slower = np.flatnonzero(gain <= 0)
    if not len(slower):
        return 0.0
    last = int(slower[-1])
    if last + 1 == len(prefixes):
        return None
    share = gain[last] / (gain[last] - gain[last + 1])
    return float(prefixes[last] * (prefixes[last + 1] / prefixes[last]) ** share)
