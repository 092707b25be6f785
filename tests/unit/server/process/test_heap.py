"""The use of freed memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

ROUNDS = """
import resource
from tierd.server.process import heap
said = heap.keep_freed() if {kept} else True

def rounds(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        chunks = [bytearray(1 << 20) for _ in range(4)]
        del chunks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

rounds(5)
print(int(said), rounds(20))
"""


def faults(*, kept: bool) -> tuple[bool, int]:
    """Whether the C library accepts the setting, and a child's page faults in 20 rounds of 4 MiB."""
    script = ROUNDS.format(kept=kept)
    told = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    said, count = told.stdout.split()
    return bool(int(said)), int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library of this machine is not glibc")
def test_memory_of_chunks_is_faulted_in_once() -> None:
    """Short-lived buffers of a few MiB cost page faults at their first use, not at each."""
    said, kept = faults(kept=True)
    assert said
    assert kept < 20 * 4
    assert faults(kept=False)[1] > 10 * kept
