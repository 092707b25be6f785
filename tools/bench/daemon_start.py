"""Start time that 100,000 blocks on NVMe add to an empty daemon: real processes, from exec to
"ready"."""

from __future__ import annotations

import time
from pathlib import Path

from tierd.client import Client, NamespaceSpec
from tierd.testing import Daemon
from tools.bench import nvme_start
from tools.bench.measure import FULL, Effort
from tools.bench.rows import Row, row_of

BLOCKS = 100_000
PROMISE_S = 0.5
CONFIG = """\
[[host]]
capacity = "64 MiB"

[[nvme]]
capacity = {capacity}
segment = {segment}
"""


def _config(blocks: int) -> str:
    spec = nvme_start.spec_for(blocks)
    return CONFIG.format(capacity=spec.capacity_bytes, segment=spec.segment_bytes)


def _fill(daemon: Daemon, blocks: int) -> None:
    """Puts this many blocks, of a namespace that the daemon knows, into its store's journal."""
    daemon.start()
    with Client(daemon.target) as client:
        namespace = client.open_namespace(NamespaceSpec(model="bench", tokens_per_block=16, block_bytes=4096))
    daemon.stop()
    spec, directory = nvme_start.spec_for(blocks), Path(daemon.root) / "state" / "nvme-0"
    store = nvme_start.prepare(spec, directory, None)
    records = nvme_start.records_of(blocks, store, namespace=namespace.id)
    nvme_start.prepare(spec, directory, records)


def _start_s(daemon: Daemon) -> float:
    begun = time.perf_counter()
    daemon.start()
    elapsed = time.perf_counter() - begun
    daemon.stop()
    return elapsed


def rows(effort: Effort = FULL) -> list[Row]:
    """The row `daemon_start_100k`: full minus empty, pair by pair, against the promise of 0.5 s."""
    blocks, config = effort.pick(BLOCKS, 1000), _config(effort.pick(BLOCKS, 1000))
    with Daemon(config) as full, Daemon(config) as empty:
        full.stop()
        empty.stop()
        _fill(full, blocks)
        added = []
        for _ in range(effort.pick(7, 1)):
            empty_s = _start_s(empty)
            added.append(_start_s(full) - empty_s)
        log = full.log
    if f"blocks={blocks}" not in log:
        raise RuntimeError(f"daemon_start: the daemon did not take in {blocks} blocks; its log:\n{log[-2000:]}")
    meaning = f"what {blocks:,} blocks on NVMe add to the start of an empty daemon"
    return [row_of("daemon_start_100k", added, unit="s", limits=[PROMISE_S] * len(added), meaning=meaning)]
