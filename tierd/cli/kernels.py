"""`tierd kernels build`: compiles the kernels for NVIDIA GPUs into the installed tierd.

It runs tools/fatbins.py, which a wheel contains beside the sources. Workers on a GPU load the
result. pip removes the compiled files with tierd.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from tierd.cli.help import Listing, example

PACKAGE = Path(__file__).resolve().parents[1]
FATBINS = PACKAGE / "kernels" / "fatbins"
SOURCES = (PACKAGE / "kernels" / "sources", PACKAGE.parent)
"""In a wheel; in a checkout."""


@click.group(cls=Listing)
def kernels() -> None:
    """Compiles the attention kernels for NVIDIA GPUs."""


@kernels.command(epilog=example("tierd kernels build --architecture 90"))
@click.option(
    "--architecture",
    type=int,
    multiple=True,
    help="Such as 90 for an H100; repeat it for more. Without it, all architectures.",
)
def build(architecture: tuple[int, ...]) -> None:
    """Compiles the kernels into this installation, with nvcc of CUDA 13 or newer.

    Each architecture takes minutes on a few cores. A kernel that did not change is not compiled
    again.
    """
    root = next(path for path in SOURCES if (path / "tools" / "fatbins.py").exists())
    asked = {"TIERD_FATBINS": ",".join(map(str, architecture)) or "all", "PYTHONPATH": str(root)}
    words = [sys.executable, "-m", "tools.fatbins", "--into", str(FATBINS)]
    done = subprocess.run(words, cwd=root, env=os.environ | asked, check=False)
    raise click.exceptions.Exit(done.returncode)
