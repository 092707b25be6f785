"""The pace of a link: how long bytes take from a tier to where they are needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tierd.advisor.fit import Fit

USUAL_S = (1e-4, 1e-9)
"""Of a transfer and a byte."""
RECOVERY_S = 10.0
"""Idle time after which a link is expected to be twice as fast."""
MEMORY = 0.8
"""After ten samples at another pace the old one weighs a tenth."""


@dataclass(frozen=True, slots=True)
class Pace:
    """wait_s: of earlier transfers in its queue. latency_s: of a transfer of no bytes."""

    bytes_per_s: float
    latency_s: float = 0.0
    wait_s: float = 0.0

    def after(self, queued_bytes: float, *, since_s: float) -> Pace:
        """The pace behind so many bytes. since_s: time since the last transfer ended, or the first
        began: if it is longer than the bytes take, the link hangs, and nobody knows for how long."""
        queued_s = queued_bytes / self.bytes_per_s
        return replace(self, wait_s=queued_s - since_s if since_s < queued_s else since_s)


FIRST_PACE = Pace(1e9)
"""Assumed before the first transfer."""


class PaceMeter:
    """Learns a pace from transfers."""

    def __init__(self) -> None:
        self._fit = Fit(USUAL_S, (0.05, 0.0), memory=MEMORY)
        self._best = 0.0

    def observe(self, size: int, seconds: float) -> None:
        """A transfer of `size` bytes took so long."""
        if size > 0 and seconds > 0:
            self._fit.observe((1.0, float(size)), seconds)

    def pace(self, idle_s: float = 0.0) -> Pace | None:
        """None before the first transfer. idle_s: time without one. An idle link is expected to get
        better, up to half of its best pace: otherwise nobody would try a link that was slow once."""
        if not self._fit.samples:
            return None
        latency_s, each_s = self._fit.costs
        if each_s <= 0:  # all of the time is latency
            return Pace(float("inf"), latency_s)
        width = 1 / each_s
        self._best = max(self._best, width)
        doubled = 2.0 ** (idle_s / RECOVERY_S)
        return Pace(min(max(width, self._best / 2), width * doubled), latency_s / doubled)
