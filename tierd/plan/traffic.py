"""Traffic, and the hits that tiers of a size give.

A preset is a curve: the share of prompt tokens that come again within some time, as measured. A
tier that takes in `new` bytes a second keeps each for capacity / new seconds if the least recently
used goes first. The two depend on each other; `CurveHits` finds where they agree. This is the
approximation of Che, Tung and Wang ("Hierarchical Web Caching Systems", IEEE JSAC 2002, section 4).

With a trace, `tierd.simulator` counts the hits under the daemon's own policies instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CURVES = {
    "chat": (
        (0, 0.0),
        (10, 0.042),
        (30, 0.059),
        (60, 0.102),
        (120, 0.187),
        (300, 0.284),
        (600, 0.339),
        (900, 0.349),
        (1800, 0.353),
    ),
    "agent": (
        (0, 0.0),
        (10, 0.158),
        (30, 0.617),
        (60, 0.781),
        (120, 0.860),
        (300, 0.910),
        (600, 0.930),
        (900, 0.940),
        (1800, 0.959),
        (3600, 0.960),
    ),
}
"""(seconds, share): of Mooncake's conversation trace (FAST 2025), and of captured coding agents. The
first spans 35 minutes, so longer pauses are not in it."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """prompt, output: mean tokens of a request. per_s: requests a second."""

    name: str
    prompt: float
    output: float
    per_s: float

    @property
    def mean_tokens(self) -> float:
        """Tokens of a request in the middle of its answer."""
        return self.prompt + self.output / 2


PRESETS = {"chat": Traffic("chat", 12_566, 347, 3.23), "agent": Traffic("agent", 129_205, 439, 0.345)}


def share_within(curve: str, seconds: float) -> float:
    """Share of prompt tokens that were used in the last so many seconds."""
    times, shares = zip(*CURVES[curve], strict=True)
    return float(np.interp(seconds, times, shares))


@dataclass(frozen=True, slots=True)
class CurveHits:
    """Hits by a preset's curve. token_bytes: of a stored token."""

    traffic: Traffic
    curve: str
    token_bytes: float

    def of(self, tokens: float) -> float:
        """As `Hits`."""
        asked = self.traffic.per_s * self.traffic.prompt
        low, high = 0.0, 1.0
        for _ in range(60):  # the share is where the time that it allows gives it back
            share = (low + high) / 2
            is_more = share < 1 and share_within(self.curve, tokens / (asked * (1 - share))) > share
            low, high = (share, high) if is_more else (low, share)
        return low

    def split(self, host: int, nvme: int) -> tuple[float, float]:
        """As `Hits`."""
        near, all_ = (self.of(size / self.token_bytes) for size in (host, host + nvme))
        return near, all_ - near
