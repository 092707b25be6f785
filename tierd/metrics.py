"""Name, unit and meaning of every metric.

One table, and one `Metrics` object with its own registry. Each row is an attribute, and each
attribute a row; other parts count. A metric's name ends in its unit, counters in _total. A label
has few values: tiers such as "host.0", links such as "nvme.0>host.0", names of enum members,
methods and errors.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from tierd.exposition import Scrapes, render_pieces
from tierd.http_server import HttpServer

SECONDS_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds, seconds: from a call on a warm socket to the deadline."""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric: its kind, unit, meaning and labels."""

    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()


METRICS: Mapping[str, Row] = {
    "tierd_calls_total": Row(
        "counter", "calls", "Calls served, by outcome: ok or the error's class.", ("method", "outcome")
    ),
    "tierd_call_seconds": Row("histogram", "seconds", "Time from a call's arrival to its reply.", ("method",)),
    "tierd_lookups_total": Row("counter", "lookups", "Sequences looked up or acquired."),
    "tierd_gets_one_sided_total": Row(
        "counter", "gets", "Lookups that clients served without a call, from pages that they had before."
    ),
    "tierd_tokens_hit_total": Row(
        "counter", "tokens", "Tokens served by leases, by the nearest tier that held them.", ("tier",)
    ),
    "tierd_tier_tokens_missed_total": Row(
        "counter",
        "tokens",
        "Tokens looked for in a tier and not served from it. Tiers are asked near to far, each for what the nearer ones "
        "missed. With tierd_tokens_hit_total it gives the tier's hit ratio.",
        ("tier",),
    ),
    "tierd_tokens_missed_total": Row(
        "counter",
        "tokens",
        "Tokens asked for in lookups or gets and not served: absent (held nowhere), no_room (no space in a near tier), "
        "busy (a far tier's queue was full), failed.",
        ("reason",),
    ),
    "tierd_blocks_committed_total": Row("counter", "blocks", "Blocks published by commits, by tier.", ("tier",)),
    "tierd_reserve_total": Row("counter", "blocks", "Blocks of Reserve calls, by status.", ("status",)),
    "tierd_freed_total": Row("counter", "pages", "Pages freed, by tier and reason.", ("tier", "reason")),
    "tierd_bytes_total": Row("counter", "bytes", "Bytes moved between tiers, by link.", ("link",)),
    "tierd_transfers_total": Row(
        "counter", "transfers", "Finished transfers, by link and outcome.", ("link", "outcome")
    ),
    "tierd_prefetched_bytes_total": Row(
        "counter",
        "bytes",
        "Bytes of prefetched blocks, by origin (lookup, call) and outcome: used (by a get in time), wasted "
        "(not used in time, or evicted before), dropped (cancelled or failed before they arrived).",
        ("origin", "outcome"),
    ),
    "tierd_transfer_seconds": Row(
        "histogram", "seconds", "Time from the start of a batch of transfers to its end, by link.", ("link",)
    ),
    "tierd_corrupt_total": Row("counter", "pages", "Pages whose bytes differ from the committed bytes.", ("tier",)),
    "tierd_admission_declined_blocks_total": Row(
        "counter",
        "blocks",
        "Blocks not written to a store: partial (a short last block), unlikely (to be used again), budget (of wear).",
        ("tier", "reason"),
    ),
    "tierd_wear_left_bytes": Row(
        "gauge", "bytes", "Bytes that the wear budget of a store allows to be written now.", ("tier",)
    ),
    "tierd_scrub_pages_total": Row(
        "counter",
        "pages",
        "Pages that a scrub checked, by outcome: good, digest, header, io (condemned), unread (kept).",
        ("tier", "outcome"),
    ),
    "tierd_scrub_passes_total": Row("counter", "passes", "Finished scrubs of all tiers."),
    "tierd_tier_bytes": Row(
        "gauge",
        "bytes",
        "Bytes of a tier: used, free in segments, unassigned; they add up to its capacity.",
        ("tier", "state"),
    ),
    "tierd_tier_pages": Row("gauge", "pages", "Pages of a tier by state; each page has one.", ("tier", "state")),
    "tierd_tier_pinned_pages": Row(
        "gauge", "pages", "Pages of a tier that are pinned, whatever their state.", ("tier",)
    ),
    "tierd_tier_serving": Row("gauge", "1 or 0", "Whether a tier is in service.", ("tier",)),
    "tierd_tier_writable": Row("gauge", "1 or 0", "Whether a tier takes new blocks.", ("tier",)),
    "tierd_tier_outages_total": Row("counter", "times", "How often a stored tier went out of service.", ("tier",)),
    "tierd_loop_lag_seconds": Row(
        "histogram", "seconds", "Delay of a call in the event loop, measured four times a second."
    ),
    "tierd_arena_touch_bytes_per_second": Row(
        "gauge", "bytes/s", "First-touch rate of a mapped tier at start.", ("tier",)
    ),
    "tierd_arena_unready_bytes": Row(
        "gauge", "bytes", "Capacity of a mapped tier whose memory is still to be allocated and touched.", ("tier",)
    ),
    "tierd_arena_huge_share": Row("gauge", "share", "Share of a mapped tier in huge pages.", ("tier",)),
    "tierd_blocks": Row("gauge", "blocks", "Blocks held in any tier."),
    "tierd_sessions": Row("gauge", "sessions", "Sessions by state: open, ended, restored.", ("state",)),
    "tierd_leases": Row("gauge", "leases", "Leases held."),
    "tierd_reservations": Row("gauge", "reservations", "Reservations open."),
    "tierd_queue_depth": Row("gauge", "entries", "Entries waiting in a queue.", ("queue",)),
    "tierd_ceiling_hit_ratio": Row(
        "gauge",
        "share",
        "Estimated share of tokens served if host memory and stores had factor times their size (inf: no limit), "
        "over a window in seconds.",
        ("window", "factor"),
    ),
    "tierd_notices": Row(
        "gauge", "1", "Fallbacks: a facility that the machine lacks, and its replacement. Set at start.", ("what",)
    ),
    "tierd_info": Row("gauge", "1", "Version and instance of the daemon.", ("version", "instance")),
}


class Metrics:
    """All metrics of one daemon, as prometheus_client objects. Safe to use from threads.

    Example: `metrics.tokens_hit.labels(tier="host.0").inc(512)`. Several may live in one process;
    nothing is global.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = self._counter("tierd_calls_total")
        self.call_seconds = self._histogram("tierd_call_seconds")
        self.lookups = self._counter("tierd_lookups_total")
        self.gets_one_sided = self._counter("tierd_gets_one_sided_total")
        self.tokens_hit = self._counter("tierd_tokens_hit_total")
        self.tier_tokens_missed = self._counter("tierd_tier_tokens_missed_total")
        self.tokens_missed = self._counter("tierd_tokens_missed_total")
        self.blocks_committed = self._counter("tierd_blocks_committed_total")
        self.reserve = self._counter("tierd_reserve_total")
        self.freed = self._counter("tierd_freed_total")
        self.bytes = self._counter("tierd_bytes_total")
        self.transfers = self._counter("tierd_transfers_total")
        self.prefetched = self._counter("tierd_prefetched_bytes_total")
        self.transfer_seconds = self._histogram("tierd_transfer_seconds")
        self.corrupt = self._counter("tierd_corrupt_total")
        self.admission_declined = self._counter("tierd_admission_declined_blocks_total")
        self.wear_left = self._gauge("tierd_wear_left_bytes")
        self.scrub_pages = self._counter("tierd_scrub_pages_total")
        self.scrub_passes = self._counter("tierd_scrub_passes_total")
        self.tier_bytes = self._gauge("tierd_tier_bytes")
        self.tier_pages = self._gauge("tierd_tier_pages")
        self.tier_pinned_pages = self._gauge("tierd_tier_pinned_pages")
        self.tier_serving = self._gauge("tierd_tier_serving")
        self.tier_writable = self._gauge("tierd_tier_writable")
        self.loop_lag = self._histogram("tierd_loop_lag_seconds")
        self.tier_outages = self._counter("tierd_tier_outages_total")
        self.arena_touch_rate = self._gauge("tierd_arena_touch_bytes_per_second")
        self.arena_unready = self._gauge("tierd_arena_unready_bytes")
        self.arena_huge_share = self._gauge("tierd_arena_huge_share")
        self.blocks = self._gauge("tierd_blocks")
        self.sessions = self._gauge("tierd_sessions")
        self.leases = self._gauge("tierd_leases")
        self.reservations = self._gauge("tierd_reservations")
        self.queue_depth = self._gauge("tierd_queue_depth")
        self.ceiling = self._gauge("tierd_ceiling_hit_ratio")
        self.notices = self._gauge("tierd_notices")
        self.info = self._gauge("tierd_info")
        ProcessCollector(namespace="tierd", registry=self.registry)

    def notice(self, what: str) -> None:
        """Reports that the machine lacks something and something else is used instead."""
        self.notices.labels(what=what).set(1)

    def render(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return "".join(render_pieces(self.registry, openmetrics=False)).encode()

    def counters(self) -> dict[str, int]:
        """Every counter above 0, by name and labels: `tierd_tokens_hit_total{tier="host.0"}`."""
        counted = {}
        for family in self.registry.collect():
            if family.name + "_total" not in METRICS:
                continue
            for sample in family.samples:
                if sample.name == family.name + "_total":
                    labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                    counted[sample.name + (f"{{{labels}}}" if labels else "")] = int(sample.value)
        return counted

    def _counter(self, name: str) -> Counter:
        row = METRICS[name]
        return Counter(name, row.meaning, row.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        row = METRICS[name]
        return Gauge(name, row.meaning, row.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        row = METRICS[name]
        return Histogram(name, row.meaning, row.labels, buckets=SECONDS_BUCKETS, registry=self.registry)


class Listener:
    """Serves /metrics in its own thread until `close`. Raises OSError if the address is taken.
    port: the one that it listens on; the system chooses it for port 0."""

    def __init__(self, metrics: Metrics, *, host: str, port: int) -> None:
        self.metrics_app: Any = Scrapes(metrics.registry)
        self._server = HttpServer(host, port)
        self._server.set_app(self.metrics_app)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port: int = self._server.server_port

    def serve(self, app: Any) -> None:
        """Passes requests from now on to this WSGI application, /metrics too."""
        self._server.set_app(app)

    def close(self) -> None:
        """Stops serving and waits for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
