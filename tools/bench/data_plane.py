"""Puts and gets of a local client on a real daemon, against the memory copy limit of the same run.

Every repetition copies, puts and gets in turn, each with a source that no cache still holds, so that ratios survive a noisy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tierd.client import Client, NamespaceSpec
from tierd.testing import Daemon, chain
from tools.bench.rows import Row, row_of

MIB = 1 << 20
BLOCK_BYTES, BATCH, REPEATS = 2 * MIB, 16, 9
COLD_BYTES = 384 * MIB
CONFIG = """\
[[host]]
capacity = "1 GiB"
segment = "64 MiB"
"""


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def rows() -> list[Row]:
    """`put_2MiB_x16` and `get_copy_2MiB_x16`, GB/s."""
    noise = np.random.default_rng(0)
    cold = noise.integers(0, 256, COLD_BYTES, dtype=np.uint8)
    target = np.ones(BATCH * BLOCK_BYTES, dtype=np.uint8)
    size = BATCH * BLOCK_BYTES
    copies, puts, gets = [], [], []
    with Daemon(CONFIG) as daemon, Client(daemon.target) as client:
        namespace = client.open_namespace(NamespaceSpec(model="bench", tokens_per_block=16, block_bytes=BLOCK_BYTES))
        for number in range(REPEATS + 2):
            at = number * size % (COLD_BYTES - size)
            source = cold[at : at + size]
            hashes, out = chain(number, BATCH), list(target.reshape(BATCH, BLOCK_BYTES))
            copy_s = _timed(lambda: np.copyto(target, source))  # noqa: B023  # called at once
            put_s = _timed(lambda: client.put(namespace, hashes, list(source.reshape(BATCH, BLOCK_BYTES))))  # noqa: B023
            get_s = _timed(lambda: client.get(namespace, hashes, out=out))  # noqa: B023
            assert np.array_equal(target, source)
            if number >= 2:  # the first ones touch fresh memory
                copies.append(size / copy_s / 1e9)
                puts.append(size / put_s / 1e9)
                gets.append(size / get_s / 1e9)
    return [
        row_of(
            "put_2MiB_x16", puts, unit="GB/s", limits=copies, meaning="in place, hashed by the daemon, against memcpy"
        ),
        row_of(
            "get_copy_2MiB_x16", gets, unit="GB/s", limits=copies, meaning="into the caller's buffers, against memcpy"
        ),
    ]
