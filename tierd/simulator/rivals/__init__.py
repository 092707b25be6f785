"""Classic eviction policies that no daemon offers, for the simulator.

A new one is a file here and a line in RIVALS. It must pass `tests/contract/test_eviction.py`, which
runs over the dict.
"""

from __future__ import annotations

from collections.abc import Callable

from tierd.core.eviction import Eviction
from tierd.core.index.blocks import Blocks
from tierd.simulator.rivals.gdsf import Gdsf
from tierd.simulator.rivals.hyperbolic import Hyperbolic
from tierd.simulator.rivals.s3_fifo import S3Fifo
from tierd.simulator.rivals.sieve import Sieve
from tierd.simulator.rivals.two_queue import TwoQueue
from tierd.simulator.rivals.w_tinylfu import WTinyLfu

RIVALS: dict[str, Callable[[Blocks], Eviction]] = {
    "2q": TwoQueue,
    "gdsf": Gdsf,
    "hyperbolic": Hyperbolic,
    "s3-fifo": S3Fifo,
    "sieve": Sieve,
    "w-tinylfu": WTinyLfu,
}
