"""Compiles tierd/native for this machine: the wheel's hook runs it, and so does `python -m tools.native` in a checkout.

Purpose: `compile_native`. Non-purpose: which form is used (tierd/native). Only the standard library is needed, since
a wheel is built where nothing else is. No fault of a compiler
fails a wheel: the plain forms take its place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "tierd" / "native" / "plane.cpp"
LIBRARY = SOURCE.with_name("plane.so")
COMPILERS = ("c++", "g++", "clang++")
"""In this order, where CXX names none."""
OPTIONS = ("-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden")
LIMIT_S = 120
PLAIN = "copies are made by Python's own means"


def find_compiler() -> str | None:
    """A compiler of C++, if there is one."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)


def compile_native(target: Path = LIBRARY, *, options: Sequence[str] = OPTIONS) -> str:
    """Compiles into target, in place of what is there. What is to be said of it: empty, or why there is no library."""
    compiler = find_compiler()
    if compiler is None:
        return f"tierd: no C++ compiler found, so {PLAIN}; install g++ and install tierd again"
    source_id = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]  # as tierd/native asks for it
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".plane-") as folder:
        made = Path(folder) / target.name
        command = [compiler, *options, f'-DTIERD_SOURCE="{source_id}"', "-o", str(made), str(SOURCE)]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"tierd: {compiler} did not compile {SOURCE.name} ({error}), so {PLAIN}"
        if done.returncode:
            return f"tierd: {compiler} did not compile {SOURCE.name}, so {PLAIN}\n{done.stderr}"
        made.replace(target)
    return ""


if __name__ == "__main__":
    sys.exit(compile_native() or 0)
