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

FOLDER = Path(__file__).resolve().parents[1] / "tierd" / "native"
LIBRARIES = {
    "plane": "copies are made by Python's own means",
    "codecs": "codecs run in numpy, at a tenth of the speed or less",
}
"""Name -> what happens without it."""
COMPILERS = ("c++", "g++", "clang++")
"""In this order, if CXX names none."""
OPTIONS = (
    *("-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno"),  # the same floats on all processors
)
LIMIT_S = 300


def find_compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)


def compile_native(folder: Path = FOLDER, *, options: Sequence[str] = OPTIONS) -> str:
    """Compiles the libraries into folder, and replaces those there. Returns "", or the reason why
    one is missing."""
    compiler = find_compiler()
    if compiler is None:
        plain = ", and ".join(LIBRARIES.values())
        return f"tierd: no C++ compiler found, so {plain}; install g++ and install tierd again"
    return "\n".join(filter(None, (_compiled(name, folder, compiler, options) for name in LIBRARIES)))


def _compiled(name: str, folder: Path, compiler: str, options: Sequence[str]) -> str:
    """Compiles one library. Returns "", or why not."""
    sources = [FOLDER / f"{name}.cpp", *sorted((FOLDER / name).glob("*.h"))]
    source_id = hashlib.sha256(b"".join(map(Path.read_bytes, sources))).hexdigest()[:16]  # tierd/native asks for it
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as place:
        made = Path(place) / f"{name}.so"
        command = [compiler, *options, f'-DTIERD_SOURCE="{source_id}"', "-o", str(made), str(sources[0])]
        failed = f"tierd: {compiler} did not compile {sources[0].name}"
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{failed} ({error}), so {LIBRARIES[name]}"
        if done.returncode:
            return f"{failed}, so {LIBRARIES[name]}\n{done.stderr}"
        made.replace(folder / made.name)
    return ""


if __name__ == "__main__":
    sys.exit(compile_native() or 0)
