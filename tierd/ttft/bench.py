"""Prefixes of several lengths from each source, in turns, on one daemon.

    for each run: for each length: device, host, nvme, nowhere; whole and by layer
                  for each length: what the advisor chooses, for host and nvme

The advisor learns from the run's own loads and steps, as an engine's does.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tierd.advisor.advice import Run, Wanted, advise
from tierd.advisor.pace import PaceMeter
from tierd.advisor.prefill import Prefill
from tierd.client import Client, NamespaceSpec, PutGroup
from tierd.core.formats.model import HASH_BYTES, ROOT
from tierd.errors import InvalidArgument, OperatorError
from tierd.testing import chain, content_of
from tierd.ttft.engine import Engine, Measured
from tierd.ttft.machine import Machine, Shape
from tierd.ttft.timeline import Job, Sizes, Source, bound

MODEL = "tierd-bench-ttft"
PUT_BLOCKS = 8
PUT_TIMEOUT_S = 60.0
WARM = 2
"""Rounds of the shortest prefix that are not counted: the advisor needs some steps."""
OVERHEAD = 1.5
"""Seconds of a run for each second that it measures."""


class Evict(Protocol):
    """Evicts blocks of these hashes, uint8 [n, 32]."""

    def __call__(self, hashes: NDArray[np.uint8], *, everywhere: bool) -> None:
        """From host memory, or from all tiers."""
        ...


@dataclass(frozen=True, slots=True)
class Series:
    """One way to serve a prefix. how: "whole", "by layer", "advised", or "" where nothing is loaded."""

    source: Source
    how: str = ""


PLAIN = (
    Series(Source.DEVICE),
    Series(Source.HOST, "whole"),
    Series(Source.HOST, "by layer"),
    Series(Source.NVME, "whole"),
    Series(Source.NVME, "by layer"),
    Series(Source.NOWHERE),
)
ADVISED = (Series(Source.HOST, "advised"), Series(Source.NVME, "advised"))
LOADED = (Source.HOST, Source.NVME)


@dataclass(frozen=True, slots=True)
class Setup:
    """machine, shape: as they are; `scale` divides them. tail: share of the prompt that is computed.
    sources: those to measure."""

    machine: Machine
    shape: Shape
    scale: int
    prefixes: Sequence[int]
    tail: float = 0.25
    runs: int = 3
    sources: Sequence[Source] = tuple(Source)

    @property
    def small(self) -> Shape:
        """The shape that is stored here."""
        return self.shape.scaled(self.scale)

    @property
    def series(self) -> list[Series]:
        """All that the sources allow; the advised ones come last."""
        return [each for each in (*PLAIN, *ADVISED) if each.source in self.sources]

    @property
    def memory_bytes(self) -> int:
        """Of host pages and the engine's memory, for the longest prefix."""
        return int(2 * max(self.prefixes) * self.small.token_bytes)

    def job(self, prefix: int, loaded: int) -> Job:
        """A request for this prefix."""
        return Job(prefix, max(1, round(prefix * self.tail / (1 - self.tail))), loaded)

    def bound_s(self, series: Series, prefix: int, *, stops: Sequence[int] = ()) -> float:
        """Least seconds to the first token by arithmetic; of an advised one, with the best number of
        loaded blocks.

        stops: layers after each part that the disk reads; none: each layer alone.
        """
        whole = 0 if series.source is Source.NOWHERE else prefix
        counts = range(0, prefix + 1, self.small.tokens_per_block) if series.how == "advised" else [whole]
        sizes = Sizes(self.shape.layers, self.shape.token_bytes)
        lines = (
            bound(self.job(prefix, count), series.source, self.machine, sizes=sizes, stops=stops) for count in counts
        )
        return min((line.as_whole() if series.how == "whole" else line).first_token_s for line in lines)

    @property
    def expected_s(self) -> float:
        """Of the whole measurement, about."""
        rounds = sum(self.bound_s(series, prefix) for prefix in self.prefixes for series in self.series)
        return OVERHEAD * self.runs * rounds + 2 * self.memory_bytes / 200e6

    def checked(self, *, memory_bytes: int, limit_s: float) -> Setup:
        """Itself. Raises InvalidArgument if it needs more memory or time, or a prefix has no whole
        blocks."""
        tokens = self.small.tokens_per_block
        if odd := [prefix for prefix in self.prefixes if prefix < tokens or prefix % tokens]:
            raise InvalidArgument(
                f"--prefix: {odd[0]} tokens are no whole blocks of {tokens}; use multiples of {tokens}"
            )
        if self.memory_bytes > memory_bytes:
            raise InvalidArgument(
                f"--prefix: {max(self.prefixes)} tokens need {self.memory_bytes >> 20} MiB of the {memory_bytes >> 20} MiB"
                " allowed; use a shorter one, a larger --scale, or more --memory"
            )
        if self.expected_s > limit_s:
            raise InvalidArgument(
                f"--runs: {self.runs} take about {self.expected_s:.0f} s of the {limit_s:g} s allowed; use fewer runs,"
                " a shorter --prefix, or a higher --limit"
            )
        return self


@dataclass(slots=True)
class Learnt:
    """An engine's advisor: what it knows of its prefill, its link and its disk."""

    prefill: Prefill = field(default_factory=Prefill)
    link: PaceMeter = field(default_factory=PaceMeter)
    disk: PaceMeter = field(default_factory=PaceMeter)

    def observe(self, job: Job, series: Series, measured: Measured, *, size: int, layers: int) -> None:
        """A request of the engine. size: bytes that it loaded."""
        line = measured.timeline
        self.prefill.observe([(job.loaded, job.prefix - job.loaded + job.tail)], line.layer_s * layers)
        if series.how == "whole":
            self.link.observe(size, float(line.copied[-1] - line.arrived[-1]))
            if series.source is Source.NVME:
                self.disk.observe(size, float(line.arrived[-1]))

    def tokens(self, job: Job, source: Source, shape: Shape) -> int:
        """Tokens of the prefix that are worth loading."""
        wanted = Wanted(job.prefix + job.tail, 0, shape.tokens_per_block, shape.token_bytes, layers=shape.layers)
        pace = self.disk.pace() if source is Source.NVME else None
        return advise(wanted, [Run(job.prefix, pace)], self.prefill, copy=self.link.pace()).tokens


@dataclass(frozen=True, slots=True)
class Result:
    """One request. loaded: tokens."""

    series: Series
    prefix: int
    loaded: int
    measured: Measured


class Bench:
    """Measures a setup on a daemon. A context manager; it evicts its blocks in the end."""

    def __init__(self, client: Client, setup: Setup, evict: Evict) -> None:
        """Entering it stores the longest prefix. Raises OperatorError if the daemon does not keep it."""
        self._setup, self._shape, self._client, self._evict = setup, setup.small, client, evict
        spec = NamespaceSpec(
            model=MODEL,
            tokens_per_block=self._shape.tokens_per_block,
            block_bytes=self._shape.block_bytes,
            geometry=self._shape.geometry,
        )
        self._space = client.open_namespace(spec)
        blocks = max(setup.prefixes) // self._shape.tokens_per_block
        self._hashes = chain(secrets.randbits(60), blocks)
        self._missing = np.random.default_rng().integers(0, 256, (blocks, HASH_BYTES), np.uint8)
        machine = setup.machine.scaled(setup.scale)
        self._engine = Engine(client, self._space, machine, self._shape, blocks=blocks)
        self._learnt, self._stored = Learnt(), 0

    def __enter__(self) -> Self:
        if set(LOADED) & set(self._setup.sources):
            try:
                self._store()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._evict(self._hashes[: self._stored], everywhere=True)

    @property
    def steps(self) -> int:
        """Requests that `results` measures."""
        return self._setup.runs * len(self._setup.prefixes) * len(self._setup.series)

    def results(self) -> Iterator[Result]:
        """The requests of each run, in turns: each run begins with another series."""
        for _ in range(WARM):
            for series in self._setup.series:
                self._measure(series, min(self._setup.prefixes))
        for run in range(self._setup.runs):
            for is_advised in (False, True):
                chosen = [each for each in self._setup.series if (each.how == "advised") == is_advised]
                turn = run % max(1, len(chosen))
                for prefix in self._setup.prefixes:
                    for series in chosen[turn:] + chosen[:turn]:
                        yield self._measure(series, prefix)

    def _measure(self, series: Series, prefix: int) -> Result:
        job = self._job(series, prefix)
        hashes = self._hashes[: job.loaded // self._shape.tokens_per_block]
        if series.source is Source.DEVICE:
            measured = self._engine.compute(job)
        elif not job.loaded:
            measured = self._engine.compute(job, missed=self._missing[: prefix // self._shape.tokens_per_block])
        else:
            self._place(series.source, hashes)
            measured = self._engine.load(job, hashes, series.source, by_layer=series.how != "whole")
        self._learnt.observe(
            job, series, measured, size=len(hashes) * self._shape.block_bytes, layers=self._shape.layers
        )
        return Result(series, prefix, job.loaded, measured)

    def _job(self, series: Series, prefix: int) -> Job:
        job = self._setup.job(prefix, 0 if series.source is Source.NOWHERE else prefix)
        if series.how != "advised":
            return job
        return self._setup.job(prefix, self._learnt.tokens(job, series.source, self._shape))

    def _place(self, source: Source, hashes: NDArray[np.uint8]) -> None:
        """Brings the blocks into host memory, or leaves them on disk alone."""
        if source is Source.NVME:
            self._evict(hashes, everywhere=False)
        else:
            self._client.acquire(self._space, hashes, timeout_s=PUT_TIMEOUT_S).release()

    def _store(self) -> None:
        for i in range(0, len(self._hashes), PUT_BLOCKS):
            names = self._hashes[i : i + PUT_BLOCKS]
            blocks = [content_of(name, self._shape.block_bytes) for name in names]
            is_durable = Source.NVME in self._setup.sources
            parent = self._hashes[i - 1].tobytes() if i else ROOT
            group = PutGroup(self._space, names, parent=parent, position=i)
            put = self._client.put(self._space, group, blocks, durable=is_durable, timeout_s=PUT_TIMEOUT_S)
            self._stored = i + put.stored
            if put.stored < len(names):
                raise OperatorError(
                    f"ttft: the daemon stored {self._stored} of {len(self._hashes)} blocks; use shorter prefixes, or a"
                    " daemon with larger tiers"
                )


def by_series(results: Sequence[Result]) -> dict[tuple[Series, int], list[Result]]:
    """The results of each series and prefix."""
    found = defaultdict[tuple[Series, int], list[Result]](list)
    for result in results:
        found[result.series, result.prefix].append(result)
    return found
