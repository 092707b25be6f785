"""The fault socket counts a process's malloc bytes, without caches that only look like growth."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

KEPT = {
    "freed arrays": "for n in range(1, 1024): [np.empty(n, np.uint8) for _ in range(9)]",
    "interned strings": "for n in range(60_000): sys.intern(f'interned {n}')",
    "names of attributes": "names = [f'attribute {n}' for n in range(20_000)]; [hasattr(gc, name) for name in names]; del names",
}
COUNT = """
import gc, sys
import numpy as np
from tierd.server.process.fault_socket import allocated_bytes
before = allocated_bytes()
{use}
print(allocated_bytes() - before)
"""
NOISE_BYTES = 100_000


@pytest.mark.parametrize("what", KEPT)
def test_what_libraries_keep_is_no_growth(what: str) -> None:
    """Memory that numpy and CPython cache for dead objects is counted from the first request on."""
    counted = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    script = [sys.executable, "-c", COUNT.format(use=KEPT[what])]
    said = subprocess.run(script, env=os.environ | counted, capture_output=True, check=True, timeout=60)
    assert abs(int(said.stdout)) < NOISE_BYTES
