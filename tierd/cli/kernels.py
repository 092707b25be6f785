"""`tierd kernels build`: compiles the kernels for NVIDIA GPUs into the installed tierd.

It runs tools/fatbins.py, which a wheel carries beside the sources; workers on a GPU find the
result. The compiled files go when pip removes tierd.
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
"""Of a wheel; of a checkout."""


@click.group(cls=Listing)
def kernels() -> None:
    """Compiles the kernels that attend to pages on NVIDIA GPUs."""


@kernels.command(epilog=example("tierd kernels build --architecture 90"))
@click.option(
    "--architecture", type=int, multiple=True, help="Such as 90, an H100; more than one may be given. All without it."
)
def build(architecture: tuple[int, ...]) -> None:
    """Compiles the kernels into this installation, by nvcc of CUDA 13 or newer.

    It takes minutes for each architecture on a few cores. What was compiled before is not compiled again.
    """
    root = next(path for path in SOURCES if (path / "tools" / "fatbins.py").exists())
    asked = {"TIERD_FATBINS": ",".join(map(str, architecture)) or "all", "PYTHONPATH": str(root)}
    words = [sys.executable, "-m", "tools.fatbins", "--into", str(FATBINS)]
    done = subprocess.run(words, cwd=root, env=os.environ | asked, check=False)
    raise click.exceptions.Exit(done.returncode)
