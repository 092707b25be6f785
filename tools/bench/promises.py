"""The promise of each row: a bar that holds, and a goal beyond it, both of the ratio to its limit."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tools.bench.traffic import PATTERNS


class Verdict(enum.Enum):
    """A row's ratio against its bar and goal."""

    NOTHING_PROMISED = "reported"
    BELOW_BAR = "below its bar"
    BELOW_GOAL = "below its goal"
    GOAL = "at its goal"


@dataclass(frozen=True, slots=True)
class Promise:
    """at_most: the ratio is a price, and less is better. bar None: no promise; goal None: the bar
    alone counts."""

    bar: float | None
    goal: float | None
    at_most: bool = False


def _at_least(bar: float, goal: float | None = None) -> Promise:
    return Promise(bar, goal)


def _at_most(bar: float | None = None, goal: float | None = None) -> Promise:
    return Promise(bar, goal, at_most=True)


CODECS = {
    "int8": (0.30, 0.50),
    "rot-8-4": (0.20, 0.40),
    "rot-4-4": (0.20, 0.40),
    "int3": (0.15, 0.30),
    "lossless": (0.04, 0.08),
}
"""Encoding and decoding."""
SHAPES = ("6x2x64x256", "32x8x128x16")
PROMISES = {
    # Misses, of LRU's misses and a point.
    **{f"policy_{name}_{tiers}": _at_most(1.0) for name in PATTERNS for tiers in ("one", "two")},
    # Of a memory copy.
    "put_2MiB_x16": _at_least(0.90, 1.1),
    "get_copy_2MiB_x16": _at_least(1.0, 1.3),
    "get_first_2MiB_x16": _at_least(1.0, 1.3),
    "put_128KiB_x64": _at_least(0.50, 0.75),
    "get_copy_128KiB_x64": _at_least(0.90, 1.1),
    "get_first_128KiB_x64": _at_least(0.90, 1.1),
    **{f"{verb}_{size}_p50": _at_most() for verb in ("put", "put_nowait", "get") for size in ("2MiB", "128KiB")},
    # Of raw echoes: the time of one block beyond its copy, a call, calls a second.
    "put_2MiB_beyond_copy": _at_most(1.5, 1.15),
    "get_2MiB_beyond_copy": _at_most(1.5, 1.15),
    "get_view_256": _at_most(1.5, 1.1),
    "lookup_empty": _at_most(1.3, 1.1),
    "lookup_256": _at_least(0.60, 0.80),
    # Of raw O_DIRECT at the best depth.
    "nvme_read_2MiB": _at_least(0.90, 0.97),
    "nvme_write_2MiB": _at_least(0.90, 0.97),
    "nvme_durable_2MiB_x16": _at_least(0.90, 0.97),
    "nvme_read_128KiB": _at_least(0.75, 0.90),
    "nvme_write_128KiB": _at_least(0.75, 0.90),
    # Of raw grpc streams.
    "remote_get_2MiB": _at_least(0.80, 0.95),
    "remote_put_2MiB": _at_least(0.80, 0.95),
    # Of the same under other circumstances.
    "get_while_demoting": _at_least(0.90, 0.95),
    "put_at_100K": _at_most(1.3, 1.1),
    "get_at_100K": _at_most(1.3, 1.1),
    "lookup_at_100K": _at_most(1.3, 1.1),
    "put_at_10M": _at_most(1.3, 1.1),
    "get_at_10M": _at_most(1.3, 1.1),
    "lookup_at_10M": _at_most(1.3, 1.1),
    "clients_4": _at_least(1.0),
    "clients_16": _at_least(1.0),
    "clients_64": _at_least(1.0),
    "lookups_4": _at_least(1.0),
    "lookups_16": _at_least(1.0),
    "lookups_64": _at_least(1.0),
    **{f"ttft_host_{prefix}K": _at_most(1.05) for prefix in (8, 16, 32, 64)},
    **{f"ttft_nvme_{prefix}K": _at_most(1.10) for prefix in (8, 16, 32, 64)},
    "page_gets": _at_least(0.98),
    "record_acquire_32": _at_least(0.98),
    "record_acquire_256": _at_least(0.98),
    "scrape_gets": _at_least(0.98),
    # Of the promised milliseconds.
    "scrape_loop": _at_most(1.0),
    "scrape_piece": _at_most(1.0),
    **{f"decisions_{verb}_{blocks}": _at_most(1.02) for verb in ("get", "put") for blocks in (1, 32)},
    # Of memcpy.
    **{f"{codec} encode {shape} native": _at_least(bar) for codec, (bar, _) in CODECS.items() for shape in SHAPES},
    **{f"{codec} decode {shape} native": _at_least(bar) for codec, (_, bar) in CODECS.items() for shape in SHAPES},
    # Of the row's limit.
    **{f"chain_cost_{length}": _at_most(1.5) for length in (64, 1024, 8192, 65_536)},
    **{f"chain_step_{length}": _at_most(1.0) for length in (64, 1024, 8192, 65_536)},
    **{f"chain_wait_{length}": _at_most(1.0) for length in (64, 1024, 8192, 65_536)},
    "idle_cpu": _at_most(1.0),
    "idle_memory": _at_most(1.0, 100 / 150),
    "daemon_start_100k": _at_most(1.0),
    "start_10m": _at_most(1.0, 8 / 15),
    "start_10m_serves": _at_most(1.0),
    "start_10m_memory": _at_most(1.3),
}
