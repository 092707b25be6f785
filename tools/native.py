"""Compiles tierd/native for this machine: `python -m tools.native`, or the wheel's hook.

Purpose: `compile_native`. Non-purpose: the choice of a form (tierd/native). A wheel's build has
only the standard library, so this program needs no more. If a compiler fails, the wheel still
builds, and the plain forms are used.
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
"""In this order, if CXX names none."""
OPTIONS = ("-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden")
LIMIT_S = 120
PLAIN = "copies are made by Python's own means"


def find_compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)


def compile_native(target: Path = LIBRARY, *, options: Sequence[str] = OPTIONS) -> str:
    """Compiles into target and replaces it. Returns "", or the reason why there is no library."""
    compiler = find_compiler()
    if compiler is None:
        return f"tierd: no C++ compiler found, so {PLAIN}; install g++ and install tierd again"
    source_id = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]  # tierd/native asks for this id
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
