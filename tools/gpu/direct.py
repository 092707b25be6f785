"""Whether a read from a disk comes to a slab without a detour over host memory, as a daemon finds it out: one read, and what cuFile counted of it.

Purpose: `results`. Non-purpose: how it is told (`tierd.gpu.probe`).

TIERD_DIRECT_FOLDER: where the file is made, for a disk that is not this checkout's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tierd.errors import Unsupported
from tierd.gpu.cufile import CuFile
from tierd.gpu.device import Device, Lane
from tierd.gpu.probe import direct_by
from tierd.gpu.probe_file import probe_file
from tierd.gpu.slabs import Slabs
from tools.gpu.bench import ROOT, Bench
from tools.gpu.results import Fact, Result


def results(bench: Bench) -> Iterator[Result]:
    """One fact."""
    folder = Path(os.environ.get("TIERD_DIRECT_FOLDER", ROOT / "build"))
    folder.mkdir(parents=True, exist_ok=True)
    device = Device(int(bench.gpu(with_kernels=False).ordinal))
    yield Fact("direct_read", f"{_way(device, folder)}; a file in {folder.name}")


def _way(device: Device, folder: Path) -> str:
    """By which the read came. Raises TierFailed if it brought other bytes."""
    try:
        with closing(CuFile()) as cufile, probe_file(folder) as descriptor:
            return f"direct, by {direct_by(cufile, device, Slabs(device, Lane(device)), descriptor)}"
    except (Unsupported, OSError) as error:
        return f"a detour: {error}"
