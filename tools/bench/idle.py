"""An idle daemon in its default configuration with one client: its share of a core, and its memory
without the arena."""

from __future__ import annotations

import time
from pathlib import Path

from tierd.client import Client, NamespaceSpec
from tierd.testing import Daemon
from tools.bench.measure import FULL, MIB, Effort, cpu_s, family
from tools.bench.rows import Row, row_of

CPU_PERCENT, MEMORY_MIB = 0.5, 150.0
"""The limits of the two."""
CONFIG = """\
[[host]]
capacity = "512 MiB"
[[nvme]]
path = "{root}/store"
capacity = "1 GiB"
"""


def memory_mib(pid: int) -> float:
    """Resident memory of a process and its children, without shared pages, which are the arena's."""
    total = 0
    for member in family(pid):
        told = dict(line.split(":", 1) for line in Path(f"/proc/{member}/status").read_text().splitlines())
        total += sum(int(told[name].split()[0]) for name in ("RssAnon", "RssFile"))
    return total * 1024 / MIB


def rows(effort: Effort = FULL) -> list[Row]:
    """`idle_cpu`, percent of a core; `idle_memory`, MiB."""
    slice_s, shares, sizes = effort.pick(1.5, 0.05), list[float](), list[float]()
    with Daemon(CONFIG) as daemon, Client(daemon.target) as client:
        client.open_namespace(NamespaceSpec(model="bench-idle", tokens_per_block=16, block_bytes=4096))
        time.sleep(slice_s)  # the rest of the start's work
        for _ in range(effort.runs):
            before, begun = cpu_s(daemon.pid), time.perf_counter()
            time.sleep(slice_s)
            shares.append(100 * (cpu_s(daemon.pid) - before) / (time.perf_counter() - begun))
            sizes.append(memory_mib(daemon.pid))
    cpu = "share of a core, a client connected, against what it may take"
    memory = "resident without the arena, against what it may take"
    return [
        row_of("idle_cpu", shares, unit="%", limits=[CPU_PERCENT] * len(shares), meaning=cpu),
        row_of("idle_memory", sizes, unit="MiB", limits=[MEMORY_MIB] * len(sizes), meaning=memory),
    ]
