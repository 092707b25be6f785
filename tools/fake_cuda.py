"""The fake driver of cuda/fake, and fatbins for it: `python -m tools.fake_cuda` builds both.

It prints the environment in which NVIDIA's bindings run on them. Purpose: to run host code for GPUs
without one. Non-purpose: speed, and faults that only a GPU shows. build/cuda keeps the results by
content.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.fatbins import UNITS, Unit
from tools.kernels import BUILT, COMMON, SOURCES, CompilerError, MissingTool, build_emulator, find_headers

FAKE = SOURCES / "fake"
CUFILE = FAKE / "cufile.cpp"
"""A separate library."""
FLAGS = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")
"""A fortified longjmp refuses to leave the emulator's fibers."""
MAGIC = 0xBA55ED50
SYMBOL = re.compile(r"int (\w+)\(unsigned x, unsigned y")
LIMIT_S = 300


def build_driver() -> Path:
    """The folder of libcuda.so.1 and libcufile.so.0. Raises MissingTool, CompilerError."""
    sources = sorted(FAKE.iterdir())
    folder = BUILT / f"fake-{_digest(path.read_bytes() for path in sources)}"
    units = [str(path) for path in sources if path.suffix == ".cpp" and path != CUFILE]
    with _made_once(folder) as unfinished:
        for name, parts in (("libcuda.so.1", units), ("libcufile.so.0", [str(CUFILE)])) if unfinished else ():
            _run(
                *FLAGS,
                f"-I{find_headers()}",
                "-shared",
                f"-Wl,-soname,{name}",
                *parts,
                "-ldl",
                "-o",
                f"{unfinished}/{name}",
            )
    return folder


def build_fatbins() -> Path:
    """A folder of fatbins with the true units' kernel names. Raises MissingTool, CompilerError."""
    emulated = build_emulator()
    folder = BUILT / f"{emulated.stem}.fatbins"
    with _made_once(folder) as unfinished:
        for unit in UNITS if unfinished else ():
            payload = "".join(f"{line}\n" for line in (emulated, *kernels_of(unit))).encode()
            image = struct.pack("<IHHQ", MAGIC, 1, 16, len(payload)) + payload
            (unfinished / f"{unit.name}.fatbin").write_bytes(image)
    return folder


def kernels_of(unit: Unit) -> list[str]:
    """The kernels of a unit's preprocessed source. Raises MissingTool, CompilerError."""
    text = _run(*COMMON, *unit.flags, f"-I{find_headers()}", "-E", str(unit.path))
    return sorted(set(SYMBOL.findall(text)))


@contextmanager
def _made_once(folder: Path) -> Iterator[Path | None]:
    """Yields a folder to fill, and renames it to this name; None if that exists. Of several
    processes the first to finish wins."""
    if folder.exists():
        yield None
        return
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if not folder.exists():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _digest(texts: Iterator[bytes]) -> str:
    digest = hashlib.sha256(repr(FLAGS).encode())
    for text in texts:
        digest.update(text)
    return digest.hexdigest()[:16]


def _run(*arguments: str) -> str:
    if not shutil.which("g++"):
        raise MissingTool("g++: not found; install it")
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise CompilerError(f"g++ {' '.join(arguments)}\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(f"LD_LIBRARY_PATH={build_driver()} TIERD_FATBINS_FOLDER={build_fatbins()}")
    except (MissingTool, CompilerError) as error:
        sys.exit(str(error))
