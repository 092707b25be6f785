"""What 100,000 blocks on NVMe add to the start of an empty daemon: real processes, from exec to "ready"."""

from __future__ import annotations

import time
from pathlib import Path

from tierd.client import Client, NamespaceSpec
from tierd.testing import Daemon
from tools.bench import nvme_start
from tools.bench.rows import Row, row_of

BLOCKS = 100_000
REPEATS = 7
PROMISE_S = 0.5
CONFIG = """\
[[host]]
capacity = "64 MiB"

[[nvme]]
capacity = {capacity}
segment = {segment}
"""


def _config() -> str:
    spec = nvme_start.spec_for(BLOCKS)
    return CONFIG.format(capacity=spec.capacity_bytes, segment=spec.segment_bytes)


def _fill(daemon: Daemon) -> None:
    """Puts 100,000 blocks of a namespace that the daemon knows into its store's snapshot."""
    daemon.start()
    with Client(daemon.target) as client:
        namespace = client.open_namespace(NamespaceSpec(model="bench", tokens_per_block=16, block_bytes=4096))
    daemon.stop()
    spec, directory = nvme_start.spec_for(BLOCKS), Path(daemon.root) / "state" / "nvme-0"
    store = nvme_start.prepare(spec, directory, None)
    records = nvme_start.records_of(BLOCKS, store, namespace=namespace.id)
    nvme_start.prepare(spec, directory, records)


def _start_s(daemon: Daemon) -> float:
    begun = time.perf_counter()
    daemon.start()
    elapsed = time.perf_counter() - begun
    daemon.stop()
    return elapsed


def rows() -> list[Row]:
    """The row `daemon_start_100k`: full minus empty, pair by pair, against the promise of 0.5 s."""
    with Daemon(_config()) as full, Daemon(_config()) as empty:
        full.stop()
        empty.stop()
        _fill(full)
        added = []
        for _ in range(REPEATS):
            empty_s = _start_s(empty)
            added.append(max(0.0, _start_s(full) - empty_s))
        log = full.log
        found = f"blocks={BLOCKS}" in log
    if not found:
        raise RuntimeError(f"daemon_start: the daemon did not take in {BLOCKS} blocks; its log:\n{log[-2000:]}")
    return [
        row_of(
            "daemon_start_100k",
            added,
            unit="s",
            limits=[PROMISE_S] * REPEATS,
            meaning=f"what {BLOCKS:,} blocks on NVMe add to the start of an empty daemon",
        )
    ]
