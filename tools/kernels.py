"""Builds the kernels of cuda/ for the CPU with g++: `python -m tools.kernels emulator`.

`... registers` lists registers by nvcc. Purpose: compiler calls, by content: unchanged sources are
not built again. Non-purpose: running kernels. The headers of number formats are NVIDIA's: of a
toolkit, or of the wheels nvidia-cuda-runtime and nvidia-cuda-crt.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.table import Table

from tools import fatbins
from tools.registers import Taken, spilling

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "cuda"
BUILT = ROOT / "build" / "cuda"
UNITS = ("decode", "prefill", "rot_decode", "rot_pages", "sparse", "merge", "pages", "hash", "read")
SANITIZERS = {
    "": ("-O1",),
    "checked": ("-O1", "-DTIERD_CHECKED"),
    "thread": ("-O1", "-g", "-fsanitize=thread"),
    "address": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
COMMON = (
    "-std=c++20",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-maybe-uninitialized",
    "-fPIC",
    "-fno-gnu-unique",
    "-x",
    "c++",
)
RUNTIMES = {"": (), "checked": (), "thread": ("libtsan.so",), "address": ("libasan.so", "libstdc++.so")}
OPTIONS = {"TSAN_OPTIONS": "exitcode=66 history_size=4", "ASAN_OPTIONS": "detect_leaks=0", "OPENBLAS_NUM_THREADS": "1"}
LIMIT_S = 1800


class MissingTool(Exception):
    """There is no compiler, or no toolkit, on this machine."""


class CompilerError(Exception):
    """The compiler's message about the sources."""


def find_headers() -> Path:
    """The folder of cuda_fp8.h. Raises MissingTool."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    homes = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    for place in (*homes, Path("/usr/local/cuda/include"), *packages.glob("*/include")):
        if (place / "cuda_fp8.h").exists() and (place / "crt" / "host_config.h").exists():
            return place
    raise MissingTool("cuda_fp8.h: not found; install a CUDA toolkit, or set CUDA_HOME")


def build_emulator(
    sanitizer: str = "",
    *,
    dims: Sequence[int] = (),
    units: Sequence[str] = UNITS,
    sources: Path = SOURCES,
    into: Path = BUILT,
) -> Path:
    """Builds the kernels for the CPU as one library.

    sanitizer: of SANITIZERS; dims: head dims to build for, all if none; units: source files. Raises
    MissingTool, CompilerError.
    """
    if not shutil.which("g++"):
        raise MissingTool("g++: not found; install it")
    flags = [*SANITIZERS[sanitizer], *COMMON, f"-I{find_headers()}"]
    if dims:
        flags.append("-DTIERD_DIMS(EACH)=" + " ".join(f"EACH({dim})" for dim in dims))
    library = into / f"emulated-{sanitizer or 'plain'}-{_digest(sources, [*flags, *units])}.so"
    into.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "wb") as turn:
        _await_turn(turn, library)
        if not library.exists():
            _compile(library, flags, sanitizer, units=units, sources=sources)
    return library


def _await_turn(turn: IO[bytes], library: Path) -> None:
    """Waits for another process's build of it: two at one time take twice as long.

    Raises CompilerError.
    """
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            return fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise CompilerError(
                    f"{library}: another process has compiled it for {LIMIT_S} s; end that process, then build again"
                ) from None
            time.sleep(0.1)


def _compile(library: Path, flags: Sequence[str], sanitizer: str, *, units: Sequence[str], sources: Path) -> None:
    """Makes the library completely or not at all. Raises CompilerError."""
    objects = library.with_suffix(f".{os.getpid()}")
    objects.mkdir(parents=True)
    try:
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(
                lambda unit: _run("g++", *flags, "-c", f"{sources / 'src' / unit}.cu", "-o", f"{objects / unit}.o"),
                units,
            ):
                pass
        made = objects / library.name
        _run("g++", *SANITIZERS[sanitizer], "-shared", *(f"{objects / unit}.o" for unit in units), "-o", str(made))
        made.rename(library)
    finally:
        shutil.rmtree(objects)


def sanitized_environment(sanitizer: str) -> dict[str, str]:
    """For a process that loads such a library: the sanitizer's runtime must come first."""
    paths = [_run("gcc", f"-print-file-name={name}").strip() for name in RUNTIMES[sanitizer]]
    return os.environ | OPTIONS | ({"LD_PRELOAD": " ".join(paths)} if paths else {})


def resources(architecture: int) -> dict[str, Taken]:
    """Each kernel's registers, as nvcc's assembler prints them. Raises MissingTool, NvccError."""
    nvcc = fatbins.find_nvcc()
    if nvcc is None:
        raise MissingTool(
            f"nvcc: none of CUDA {fatbins.OLDEST_NVCC} or newer found; install a toolkit, or set CUDA_HOME"
        )
    found: dict[str, Taken] = {}
    for unit in fatbins.UNITS:
        found |= fatbins.taken_by(nvcc, unit, architecture)
    return found


def _digest(sources: Path, flags: Sequence[str]) -> str:
    digest = hashlib.sha256(repr(flags).encode())
    for path in sorted(sources.rglob("*")):
        if path.suffix in (".h", ".cu"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise CompilerError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


@click.group()
def main() -> None:
    """Builds the kernels of cuda/."""


@main.command()
@click.option(
    "--sanitizer",
    type=click.Choice(list(SANITIZERS)),
    default="",
    help="Also look for races, for bad addresses, or (checked) for page ids, slots and lengths that do not fit.",
)
def emulator(sanitizer: str) -> None:
    """With g++, for the CPU; prints the library's path, which TIERD_KERNELS_LIBRARY takes."""
    print(build_emulator(sanitizer))


@main.command()
@click.option("--architecture", type=int, multiple=True, help="Such as 90; those of fatbins if none is given.")
def registers(architecture: tuple[int, ...]) -> None:
    """With nvcc: prints kernels' registers and spilled bytes. Fails if one of SPILL_FREE spills."""
    chosen = architecture or fatbins.ARCHITECTURES
    found = {number: resources(number) for number in chosen}
    made = Table("kernel", *(f"sm_{number}" for number in chosen))
    for name in found[chosen[0]]:
        made.add_row(name, *(_told(found[number][name]) for number in chosen))
    Console().print(made)
    if spilled := {name for kernels in found.values() for name in spilling(kernels)}:
        raise click.ClickException(f"{', '.join(sorted(spilled))}: must not spill")


def _told(taken: Taken) -> str:
    return str(taken.registers) + (f" [red]{taken.spilled} spilled[/]" if taken.spilled else "")


if __name__ == "__main__":
    try:
        main()
    except (MissingTool, CompilerError) as error:
        sys.exit(str(error))
