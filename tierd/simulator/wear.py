"""Writes to simulated stores: `--admission` and `--wear-budget` as parts of a tier's spec.

A budget in footprints is a share of the bytes of all distinct blocks. It is to be written over the
trace's own span of time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from tierd.core.formats.model import TierKind, TierSpec
from tierd.errors import InvalidArgument
from tierd.policies.admission import ADMISSION
from tierd.simulator.choices import CLAIRVOYANT, DEFAULT
from tierd.simulator.sequences import Measure, Trace
from tierd.units import parse_bytes

DAY_S = 86400.0
_FOOTPRINTS = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*footprints?\s*")


@dataclass(frozen=True, slots=True)
class Budget:
    """The write budget of a store. text: as written. One of the two is set."""

    text: str
    bytes_per_day: int | None = None
    footprints: Fraction | None = None

    def rate(self, trace: Trace, measure: Measure) -> float:
        """Bytes per second of trace time. Raises InvalidArgument for bytes if sizes are in
        blocks."""
        if self.footprints is not None:
            span_s = float(trace.times_s[-1] - trace.times_s[0]) if len(trace) else 0.0
            return float(self.footprints) * trace.distinct_bytes(measure) / max(span_s, 1.0)
        if measure.whole:
            raise InvalidArgument(
                f"--wear-budget {self.text}: sizes are in blocks, which have no bytes; write for example 0.5footprints"
            )
        return (self.bytes_per_day or 0) / DAY_S


@dataclass(frozen=True, slots=True)
class Writes:
    """Write options of stores; None: from the settings."""

    admission: str | None = None
    budget: Budget | None = None

    def applied(self, specs: Iterable[TierSpec], trace: Trace, measure: Measure) -> tuple[TierSpec, ...]:
        """The tiers with these options; a clairvoyant store writes reused blocks, unless an
        admission is named."""
        return tuple(self._applied(s, trace, measure) if s.kind is TierKind.NVME else s for s in specs)

    def _applied(self, spec: TierSpec, trace: Trace, measure: Measure) -> TierSpec:
        admission = CLAIRVOYANT if spec.eviction == CLAIRVOYANT else spec.admission
        if self.admission not in {None, DEFAULT}:
            admission = str(self.admission)
        rate = self.budget.rate(trace, measure) if self.budget else spec.wear_bytes_per_s
        return dataclasses.replace(spec, admission=admission, wear_bytes_per_s=rate)


def parse_admission(text: str) -> str:
    """An admission policy's name. Raises ValueError."""
    known = [DEFAULT, *sorted(ADMISSION)]
    if text.strip() not in known:
        raise ValueError(f"{text!r} is no admission policy; use one of {', '.join(known)}")
    return text.strip()


def parse_budget(text: str) -> Budget:
    """A wear budget as people write it. Raises ValueError with fault, value and remedy."""
    text = text.strip()
    match = _FOOTPRINTS.fullmatch(text)
    if match:
        budget = Budget(text, footprints=Fraction(match["number"]))
    else:
        try:
            budget = Budget(text, bytes_per_day=parse_bytes(int(text) if text.isdecimal() else text))
        except ValueError as error:
            raise ValueError(f"{error} a day, or 0.5footprints over the trace") from error
    if not (budget.footprints or budget.bytes_per_day):
        raise ValueError(f"{text!r} lets nothing be written; leave the nvme tier out instead")
    return budget
