"""Compiles tierd/native for this machine: the wheel's hook runs it, and so does `python -m tools.native` in a checkout.

Purpose: `compile_native`. Non-purpose: which form is used (tierd/native). Only the standard library is needed, since a wheel is built where nothing else is. No fault of a compiler
fails a wheel: the plain forms take its place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "tierd" / "native" / "plane.cpp"
COMPILERS = ("c++", "g++", "clang++")
"""In this order, where CXX names none."""
OPTIONS = ("-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden")
LIMIT_S = 120


def command(compiler: str, out: Path, options: Sequence[str] = OPTIONS) -> list[str]:
    """What compiles it."""
    sys.path.insert(0, str(SOURCE.parents[2]))
    from tierd.native import source_id

    return [compiler, *options, f'-DTIERD_SOURCE="{source_id()}"', "-o", str(out), str(SOURCE)]


def find_compiler() -> str | None:
    """A compiler of C++, if there is one."""
    named = os.environ.get("CXX")
    return named or next(filter(None, map(shutil.which, COMPILERS)), None)


def compile_native(target: Path | None = None) -> str:
    """Compiles into target, beside the source if None, in place of what is there. What is to be said of it: empty, or why there is no library."""
    target = target or SOURCE.with_name("plane.so")
    compiler = find_compiler()
    if compiler is None:
        return "tierd: no C++ compiler found, so copies are made by Python's own means; install g++ and install tierd again"
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".plane-") as folder:
        made = Path(folder) / "plane.so"
        try:
            done = subprocess.run(command(compiler, made), check=False, capture_output=True, text=True, timeout=LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"tierd: {compiler} did not compile {SOURCE.name} ({error}); copies are made by Python's own means"
        if done.returncode:
            return (
                f"tierd: {compiler} did not compile {SOURCE.name}; copies are made by Python's own means\n{done.stderr}"
            )
        made.replace(target)
    return ""


if __name__ == "__main__":
    sys.exit(compile_native() or 0)
