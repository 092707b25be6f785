"""The cost of scrapes: what one of 10,000 series takes from the event loop, and gets beside scrapes.

The loop waits while a scrape's thread holds the interpreter. That is its processor time, which
other processes do not change. Gets run in slices of a second, in turns with and without one scrape.
"""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import Histogram

from tierd.client import Client, NamespaceSpec
from tierd.exposition import render_pieces
from tierd.metrics import Metrics
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, KIB, Effort
from tools.bench.rows import Row, row_of

SERIES, BLOCKS = 10_000, 32
TOTAL_MS, PIECE_MS = 50.0, 5.0
"""The promised limits of a scrape."""
CONFIG = """\
nvme = []
[server]
metrics_listen = "127.0.0.1:{port}"
[[host]]
capacity = "64 MiB"
"""


def crowded(series: int) -> Metrics:
    """Metrics with so many series or a few more, spread over the rows that have labels."""
    metrics, number = Metrics(), 0
    labelled = [metric for metric in vars(metrics).values() if getattr(metric, "_labelnames", ())]
    while series > 0:
        metric = labelled[number % len(labelled)]
        child = metric.labels(*(f"{name}-{number}" for name in metric._labelnames))
        if isinstance(metric, Histogram):
            child.observe(0.003, exemplar={"call": f"c{number:x}"})
        series -= sum(not sample.name.endswith("_created") for sample in child._samples())
        number += 1
    return metrics


def held(metrics: Metrics) -> tuple[float, float]:
    """Milliseconds that a scrape holds the interpreter: in all, and in one piece."""
    pieces, last = list[float](), time.thread_time()
    for _ in render_pieces(metrics.registry, openmetrics=True):
        last, before = time.thread_time(), last
        pieces.append(1e3 * (last - before))
    return sum(pieces), max(pieces)


def loop_rows(effort: Effort) -> list[Row]:
    """`scrape_loop` and `scrape_piece`, milliseconds."""
    metrics = crowded(effort.pick(SERIES, 100))
    total, longest = map(list, zip(*[held(metrics) for _ in range(effort.at_least(21))], strict=True))
    of = "that a scrape of 10,000 series holds the interpreter, of the promised"
    return [
        row_of("scrape_loop", total, unit="ms", limits=[TOTAL_MS] * len(total), meaning=f"in all, {of}"),
        row_of("scrape_piece", longest, unit="ms", limits=[PIECE_MS] * len(longest), meaning=f"at a time, {of}"),
    ]


def gets_row(effort: Effort) -> Row:
    """`scrape_gets`: gets a second beside a scrape each second, against those without."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    slice_s = effort.pick(1.0, 0.02)
    sides: tuple[list[float], list[float]] = ([], [])
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(CONFIG.format(port=port)))
        client, threads = stack.enter_context(Client(daemon.target)), stack.enter_context(ThreadPoolExecutor(1))
        space = client.open_namespace(NamespaceSpec(model="bench", tokens_per_block=16, block_bytes=4 * KIB))
        client.put(space, chain(0, BLOCKS), [bytes(4 * KIB)] * BLOCKS)

        def scrape() -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
                assert b"tierd_info" in reply.read()

        def rate() -> float:
            begun, done = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - begun) < slice_s:
                assert client.get(space, chain(0, BLOCKS)).blocks == BLOCKS
                done += 1
            return done / elapsed

        rate()
        for number in range(2 * effort.at_least(21)):
            is_scraped = number % 4 in (0, 3)
            scraping = threads.submit(scrape) if is_scraped else None
            sides[is_scraped].append(rate())
            if scraping:
                scraping.result()
    meaning = f"gets of {BLOCKS} blocks as views beside a scrape each second, against those without"
    return row_of("scrape_gets", sides[True], unit="1/s", limits=sides[False], meaning=meaning)


def rows(effort: Effort = FULL) -> list[Row]:
    """`scrape_loop`, `scrape_piece` and `scrape_gets`."""
    return [*loop_rows(effort), gets_row(effort)]
