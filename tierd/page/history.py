"""The last hour of the daemon as samples: a ring of rows, each already JSON.

Counters stay totals; the page subtracts. Rows come from the metrics alone, so a sample asks the
core nothing.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from tierd.metrics import Metrics

INTERVAL_S = 5.0
SAMPLES = 720
"""One hour. A row of two tiers has about 150 bytes, so the ring takes about 150 KiB."""
REASONS = ("absent", "no_room", "busy", "failed")
"""Reasons of misses with a column of their own; `other` has the rest."""
FOR_ROOM = ("evicted", "demoted")
"""Reasons of freed pages that count as evictions; a farther tier has a demoted block."""
TIER_COLUMNS = ("used", "pages", "hit", "read", "written", "evicted")
COLUMNS = ("uptime_s", "cpu_s", "blocks", "leases", "reservations", "sessions", "transfers", "queued", "lookups")


class History:
    """The ring of one daemon. tiers: names, near to far. started: monotonic seconds."""

    def __init__(self, metrics: Metrics, *, tiers: Sequence[str], started: float) -> None:
        self._metrics, self._tiers, self._started = metrics, tiers, started
        self._rows: deque[bytes] = deque(maxlen=SAMPLES)
        self.count = 0
        """Samples ever taken."""

    @property
    def columns(self) -> list[str]:
        """Names of a row's numbers, in order; those of a tier as `hit:host.0`, bytes and tokens."""
        each = [f"{name}:{tier}" for name in TIER_COLUMNS for tier in self._tiers]
        return [*COLUMNS, *(f"missed:{reason}" for reason in (*REASONS, "other")), *each]

    @property
    def size_bytes(self) -> int:
        """Memory of the rows' text."""
        return sum(map(len, self._rows))

    def sample(self) -> None:
        """Adds a row; the oldest falls out of a full ring."""
        m = self._metrics
        queues, missed, moved = _by(m.queue_depth, "queue"), _by(m.tokens_missed, "reason"), _by(m.bytes, "link")
        used, pages = _by(m.tier_bytes, "tier", state="used"), _by(m.tier_pages, "tier", state="ready")
        hit, evicted, demoted = _by(m.tokens_hit, "tier"), *(_by(m.freed, "tier", reason=why) for why in FOR_ROOM)
        read, written = defaultdict[str, float](float), defaultdict[str, float](float)
        for link, count in moved.items():
            source, _, target = link.partition(">")
            read[source] += count
            written[target] += count
        ours = [missed.pop(reason, 0) for reason in REASONS]
        row = [
            *(round(time.monotonic() - self._started, 1), round(time.process_time(), 2)),
            *(_one(m.blocks), _one(m.leases), _one(m.reservations), _by(m.sessions, "state").get("open", 0)),
            *(queues.get("transfers", 0), queues.get("links", 0), _one(m.lookups)),
            *(*ours, sum(missed.values())),
            *(by.get(tier, 0) for by in (used, pages, hit, read, written) for tier in self._tiers),
            *(evicted.get(tier, 0) + demoted.get(tier, 0) for tier in self._tiers),
        ]
        self._rows.append(json.dumps([_short(number) for number in row], separators=(",", ":")).encode())
        self.count += 1

    def since(self, number: int) -> bytes:
        """The rows after sample `number` that the ring still has, as a JSON array."""
        wanted = min(len(self._rows), max(0, self.count - number))
        rows = list(self._rows)
        return b"[" + b",".join(rows[len(rows) - wanted :]) + b"]"


def _by(metric: Counter | Gauge, label: str, **only: str) -> dict[str, float]:
    """The metric's values summed by a label, of samples whose other labels are these."""
    sums = defaultdict[str, float](float)
    for family in metric.collect():
        for sample in family.samples:
            is_wanted = all(sample.labels.get(key) == value for key, value in only.items())
            if is_wanted and not sample.name.endswith("_created"):
                sums[sample.labels.get(label, "")] += sample.value
    return dict(sums)


def _one(metric: Counter | Gauge) -> float:
    return _by(metric, "").get("", 0)


def _short(number: float) -> float:
    """Whole numbers without a point."""
    return int(number) if number == int(number) else number
