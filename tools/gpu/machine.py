"""The machine of the results: `python -m tools.gpu.machine` prints it as JSON, or names a missing
part and exits with 1. It is a separate process, since a driver may hang."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from tierd.errors import TierdError
from tools.gpu.bench import ROOT
from tools.gpu.device import Gpu

PATIENCE_S = 60
DRIVER = Path("/proc/driver/nvidia/version")


class Missing(Exception):
    """There is no GPU to check, or the driver or a tool is missing."""


def asked() -> dict[str, object]:
    """By names for people. Raises Missing."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tools.gpu.machine"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Missing(f"the driver did not answer within {PATIENCE_S} s") from error
    if done.returncode:
        raise Missing(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"ended with {done.returncode}")
    told: dict[str, object] = json.loads(done.stdout)
    return told


def of(gpu: Gpu) -> dict[str, object]:
    """The GPU, its driver, the host, the sources and the day."""
    capability = [gpu.find_attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR")]
    version = int(gpu.ask("cuDriverGetVersion"))
    found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text()) if DRIVER.exists() else None
    return {
        "GPU": gpu.name,
        "architecture": f"sm_{capability[0]}{capability[1]}",
        "multiprocessors": gpu.multiprocessors,
        "memory": f"{int(gpu.ask('cuDeviceTotalMem', gpu.ordinal)) / 2**30:.0f} GiB",
        "driver": f"{found[0] if found else 'of unknown version'}, CUDA {version // 1000}.{version % 1000 // 10}",
        "host": f"{platform.machine()}, Linux {platform.release()}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "sources": digest(),
    }


def digest() -> str:
    """Of the kernels' sources and of their Python modules."""
    found = hashlib.sha256()
    for path in sorted(
        [*(ROOT / "cuda").rglob("*.h"), *(ROOT / "cuda").rglob("*.cu"), *(ROOT / "tierd/kernels").glob("*.py")]
    ):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    try:
        print(json.dumps(of(Gpu(with_kernels=False))))
    except TierdError as error:
        sys.exit(str(error))
