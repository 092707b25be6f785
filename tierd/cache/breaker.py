"""A circuit breaker: decides when a failing stored tier leaves service, and when it returns.

`Breaker` is a pure state machine: times are arguments, in seconds. `watch` examines the tiers.

    closed --(errors, a failed file, a hanging call)--> open --(pause over, command)--> probing
    probing --(success)--> closed    probing --(failure)--> open, the pause doubled up to its bound

A tier out of service for reads is out of service for writes too. An open breaker is probed after
the longest pause at the latest. When it closes, it forgets earlier errors.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from tierd.tiers.tier import Health

CALM_PAUSES = 10
"""After this many of the longest pauses in service, the next pause is the shortest again."""


class State(enum.Enum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When a breaker opens, and for how long.

    faults: this many errors within window_s open it; 0 disables this. hang_s: a call under way for
    longer hangs. pause_s: the first pause. pause_limit_s: the longest."""

    faults: int = 8
    window_s: float = 600.0
    hang_s: float = 5.0
    pause_s: float = 0.5
    pause_limit_s: float = 2.0


class Breaker:
    """The breaker of one tier. reads, writes: whether the tier is in service for them. reason: why
    it is not, else empty."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.state = State.CLOSED
        self.reads = self.writes = True
        self.reason = ""
        self.opened = 0
        """How often it has opened."""
        self._tolerance = tolerance
        self._faults: deque[float] = deque(maxlen=max(1, tolerance.faults))
        self._counted = 0
        self._pause_s = tolerance.pause_s
        self._since = 0.0  # when the state began

    def tolerate(self, tolerance: Tolerance) -> None:
        """Sets the tolerance. State, errors and a pause that has begun stay."""
        self._tolerance = tolerance
        self._faults = deque(self._faults, maxlen=max(1, tolerance.faults))

    def look(self, health: Health, now: float, *, corrupt: int = 0) -> bool:
        """Takes in the tier's health and its count of corrupt blocks. True if the state changed."""
        before = (self.state, self.reads)
        total = health.read_errors + health.write_errors + corrupt
        self._faults.extend([now] * min(total - self._counted, self._tolerance.faults))
        self._counted = total
        reason = self._trouble(health, now)
        if reason and self.state is State.CLOSED:
            self._open(reason, now)
        if self.reads and not self._can_read(health):
            self.reads, self.reason = False, reason or self.reason
        return before != (self.state, self.reads)

    def is_due(self, now: float) -> bool:
        """Whether it is time to probe."""
        return self.state is State.OPEN and now >= self._since + self._pause_s

    def resume(self) -> None:
        """Probes at once, by command."""
        if self.state is State.OPEN:
            self._since = -self._pause_s

    def probing(self) -> None:
        """A probe begins. It ends with `probed`."""
        self.state = State.PROBING

    def probed(self, fault: str, now: float) -> None:
        """Ends a probe. fault: the error that it met; empty if the tier works again."""
        if fault:
            self.state, self.reason, self._since = State.OPEN, fault, now
            self._pause_s = min(2 * self._pause_s, self._tolerance.pause_limit_s)
            return
        self.state, self.reads, self.writes, self.reason = State.CLOSED, True, True, ""
        self._since = now
        self._faults.clear()

    def _open(self, reason: str, now: float) -> None:
        is_calm = now - self._since > CALM_PAUSES * self._tolerance.pause_limit_s
        self._pause_s = (
            self._tolerance.pause_s
            if is_calm or not self.opened
            else min(2 * self._pause_s, self._tolerance.pause_limit_s)
        )
        self.state, self.writes, self.reason, self._since = State.OPEN, False, reason, now
        self.opened += 1

    def _trouble(self, health: Health, now: float) -> str:
        tolerance = self._tolerance
        if health.fault:
            return health.fault
        if health.read_age_s > tolerance.hang_s or health.write_age_s > tolerance.hang_s:
            kind = "read" if health.read_age_s > tolerance.hang_s else "write"
            return f"a {kind} has taken more than {tolerance.hang_s:g} s; check the disk"
        if tolerance.faults and len(self._faults) == tolerance.faults and now - self._faults[0] <= tolerance.window_s:
            return (
                f"{tolerance.faults} reads or writes in {tolerance.window_s:g} s failed or were wrong; check the disk"
            )
        return "" if self._can_read(health) else f"{health.unread} reads in a row failed; check the disk"

    def _can_read(self, health: Health) -> bool:
        """False while reads hang, or after as many failed reads in a row as the tolerance allows."""
        is_lost = bool(self._tolerance.faults) and health.unread >= self._tolerance.faults
        return not is_lost and health.read_age_s <= self._tolerance.hang_s
