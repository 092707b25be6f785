"""Compiles the kernels of cuda/ for GPUs with nvcc: `python -m tools.fatbins` puts them where a checkout's `Loaded` finds them; a wheel's build does the same.

Purpose: a fatbin for each unit of the kernels, of machine code for every architecture and PTX for those to come; what did not change is not compiled again.
Non-purpose: the emulator, which `tools.kernels` builds. Only the standard library is needed, since a wheel is built where nothing else is. TIERD_FATBINS=0: a
wheel gets none though there is an nvcc; TIERD_FATBINS=90,120: for these architectures alone, which saves most of the time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.registers import Taken, parsed, spilling

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "cuda"
OBJECTS = ROOT / "build" / "cuda" / "objects"
INSTALLED = ROOT / "tierd" / "kernels" / "fatbins"
ARCHITECTURES = (80, 89, 90, 100, 120)
PTX = 80
"""What a driver compiles for an architecture that is not among them."""
DIMS = (64, 96, 128, 256)
OLDEST_NVCC = 13
"""The first that knows every architecture."""
HOMES = (Path("/usr/local/cuda"),)
"""Where toolkits are, beside CUDA_HOME, CUDA_PATH and the path of programs."""
SWITCH = "TIERD_FATBINS"
CHECKED = "TIERD_CHECKED"
"""Environment: 1 for kernels that check page ids, slots and lengths, say what is wrong and end the launch. They are slower, may spill, and go to CHECKED_FOLDER."""
CHECKED_FOLDER = ROOT / "build" / "cuda" / "checked"
APPENDED = "NVCC_APPEND_FLAGS"
"""What nvcc itself reads: -lineinfo for a profiler, which makes fatbins three times as large."""
LIMIT_S = 1800


class MissingNvcc(Exception):
    """There is no CUDA toolkit on this machine."""


class NvccError(Exception):
    """What nvcc said of the sources."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What becomes one fatbin. dim: the head dim that it is for; None: all of its source."""

    source: str
    dim: int | None = None

    @property
    def name(self) -> str:
        """Of the fatbin."""
        return self.source if self.dim is None else f"{self.source}_{self.dim}"

    @property
    def path(self) -> Path:
        """Of the source."""
        return SOURCES / "src" / f"{self.source}.cu"

    @property
    def flags(self) -> list[str]:
        """For every compiler."""
        return (
            ["-std=c++20"]
            + ["-DTIERD_CHECKED"] * is_checked()
            + ([] if self.dim is None else [f"-DTIERD_DIMS(EACH)=EACH({self.dim})"])
        )


UNITS = (
    *(Unit(source, dim) for dim in reversed(DIMS) for source in ("prefill", "decode")),
    Unit("pages"),
    Unit("merge"),
    Unit("hash"),
    Unit("read"),
)
"""The slowest to compile first."""


def build(folder: Path, architectures: Sequence[int] = ARCHITECTURES, units: Sequence[Unit] = UNITS) -> Iterator[str]:
    """Fills the folder with a fatbin for each unit, as many compilers at a time as there are cores; a line for each that is done. Raises MissingNvcc, NvccError."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise MissingNvcc(f"nvcc: none of CUDA {OLDEST_NVCC} or newer found; install a toolkit, or set CUDA_HOME")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [[pool.submit(_object, nvcc, unit, kind) for kind in _kinds(architectures)] for unit in units]
        for unit, parts in zip(units, jobs, strict=True):
            begun = time.monotonic()
            made = _join(nvcc, folder / f"{unit.name}.fatbin", [part.result() for part in parts])
            yield f"{made.name}: {made.stat().st_size} bytes after {time.monotonic() - begun:.1f} s more"


def taken_by(nvcc: Path, unit: Unit, architecture: int) -> dict[str, Taken]:
    """Registers of a unit's kernels, by what nvcc said when it compiled it. Raises NvccError, also where one spills that must not."""
    _, made = _object(nvcc, unit, _Kind("elf", architecture))
    return parsed(made.with_suffix(".txt").read_text(encoding="utf-8"))


def find_nvcc() -> Path | None:
    """The first that is new enough."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    on_path = shutil.which("nvcc")
    found = [*(home / "bin" / "nvcc" for home in (*homes, *HOMES)), *([Path(on_path)] if on_path else [])]
    return next((nvcc.resolve() for nvcc in found if nvcc.exists() and _version(nvcc) >= OLDEST_NVCC), None)


def asked_architectures() -> Sequence[int]:
    """What the environment says: all if it says nothing, none for 0, else those that it lists."""
    told = os.environ.get(SWITCH, "")
    return ARCHITECTURES if not told else [int(number) for number in told.split(",") if int(number)]


def is_checked() -> bool:
    """What the environment asks for."""
    return os.environ.get(CHECKED, "0") != "0"


def for_wheel(version: str) -> dict[str, str]:
    """What a wheel takes along: path here, path in it. Nothing for an editable install, without nvcc, or where the switch says so. Raises NvccError."""
    architectures = asked_architectures()
    if version == "editable" or not architectures or find_nvcc() is None:
        return {}
    if is_checked():
        raise NvccError(f"{CHECKED}: is set; a wheel takes no checked kernels, unset it")
    folder = OBJECTS.with_name("wheel")
    list(build(folder, architectures))
    names = [f"{unit.name}.fatbin" for unit in UNITS]
    return {str(folder / name): f"tierd/kernels/fatbins/{name}" for name in names}


@dataclass(frozen=True, slots=True)
class _Kind:
    """Machine code (elf) or PTX for an architecture."""

    form: str
    architecture: int

    @property
    def flags(self) -> list[str]:
        if self.form == "ptx":
            return ["-ptx", f"-arch=compute_{self.architecture}"]
        return ["-cubin", f"-arch=sm_{self.architecture}", "-Xptxas", "-v"]


def _kinds(architectures: Sequence[int]) -> list[_Kind]:
    return [*(_Kind("elf", number) for number in architectures), _Kind("ptx", PTX)]


def _object(nvcc: Path, unit: Unit, kind: _Kind) -> tuple[_Kind, Path]:
    """One unit for one architecture, by content."""
    flags = [*unit.flags, *kind.flags]
    made = OBJECTS / f"{unit.name}-{kind.form}{kind.architecture}-{_digest(nvcc, unit, flags)}"
    if not made.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_suffix(f".{os.getpid()}")
        said = _run(str(nvcc), *flags, str(unit.path), "-o", str(unfinished))
        if kind.form == "elf":
            if not is_checked():
                _check_registers(said, kind)
            made.with_suffix(".txt").write_text(said, encoding="utf-8")
        unfinished.rename(made)
    return kind, made


def _check_registers(said: str, kind: _Kind) -> None:
    """Raises NvccError if a kernel spills that must not."""
    try:
        spilled = spilling(parsed(said))
    except ValueError as error:
        raise NvccError(str(error)) from None
    if spilled:
        names = ", ".join(spilled)
        raise NvccError(f"{names}: must not spill a register, and on sm_{kind.architecture} it does; make it smaller")


def _join(nvcc: Path, to: Path, parts: Sequence[tuple[_Kind, Path]]) -> Path:
    images = [f"--image3=kind={kind.form},sm={kind.architecture},file={made}" for kind, made in parts]
    _run(str(nvcc.with_name("fatbinary")), f"--create={to}", "-64", *images)
    return to


def _digest(nvcc: Path, unit: Unit, flags: Sequence[str]) -> str:
    """Of all that an object is made of: the compiler too, whose path names its version."""
    digest = hashlib.sha256(repr((str(nvcc), flags, os.environ.get(APPENDED))).encode())
    for path in sorted((unit.path, *SOURCES.glob("include/*.h"), *SOURCES.glob("src/*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version(nvcc: Path) -> int:
    told = re.search(r"release (\d+)", _run(str(nvcc), "--version"))
    return int(told[1]) if told else 0


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise NvccError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def main() -> None:
    """All of them, or the units that are named."""
    names = sys.argv[1:]
    unknown = set(names) - {unit.name for unit in UNITS}
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no such unit; there are {', '.join(unit.name for unit in UNITS)}")
    folder = CHECKED_FOLDER if is_checked() else INSTALLED
    for line in build(folder, asked_architectures(), [unit for unit in UNITS if not names or unit.name in names]):
        print(line, flush=True)
    if is_checked():
        print(f"TIERD_FATBINS_FOLDER={folder}")


if __name__ == "__main__":
    try:
        main()
    except (MissingNvcc, NvccError) as error:
        sys.exit(str(error))
