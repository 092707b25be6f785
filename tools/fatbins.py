"""Compiles the kernels of cuda/ for GPUs with nvcc: `tierd kernels build`, `python -m
tools.fatbins`.

Purpose: one fatbin for each unit, with machine code for every architecture and PTX for later ones.
Unchanged units are not compiled again. Non-purpose: the emulator (`tools.kernels`). A wheel's build
has only the standard library, so this needs no more. A wheel has fatbins only if TIERD_FATBINS asks
for them: `all`, or architectures as in `90,120`. If a compiler fails, it has none, and says why.
"""

from __future__ import annotations

import argparse
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
from importlib.metadata import distribution
from pathlib import Path

from tools.registers import Taken, parsed, spilling

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "cuda"
IS_CHECKOUT = (ROOT / "pyproject.toml").exists()
BUILD = ROOT / "build" if IS_CHECKOUT else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierd"
OBJECTS = BUILD / "cuda" / "objects"
INSTALLED = ROOT / "tierd" / "kernels" / "fatbins"
ARCHITECTURES = (80, 89, 90, 100, 120)
PTX = 80
"""A driver compiles this PTX for an architecture that is not in ARCHITECTURES."""
DIMS = (64, 96, 128, 256)
OLDEST_NVCC = 13
"""The first that knows every architecture."""
HOMES = (Path("/usr/local/cuda"),)
"""Folders of toolkits, beside CUDA_HOME, CUDA_PATH and the path of programs."""
SWITCH = "TIERD_FATBINS"
CHECKED = "TIERD_CHECKED"
"""Environment: 1 builds kernels that check page ids, slots and lengths. On a fault they name it and
end the launch. They are slower, may spill, and go to CHECKED_FOLDER."""
CHECKED_FOLDER = ROOT / "build" / "cuda" / "checked"
APPENDED = "NVCC_APPEND_FLAGS"
"""nvcc itself reads it. With -lineinfo, for a profiler, fatbins are three times as large."""
PROGRAM = ("__init__.py", "fatbins.py", "registers.py")
"""The files of tools/ that compile kernels."""
LIMIT_S = 600
"""For one run of a compiler."""
VERSION_LIMIT_S = 30
LATER = "`tierd kernels build` compiles them into an installed tierd"


class MissingNvcc(Exception):
    """There is no CUDA toolkit on this machine."""


class NvccError(Exception):
    """nvcc's message about the sources."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The source of one fatbin. dim: the head dim that it is for; None: all of its source."""

    source: str
    dim: int | None = None

    @property
    def name(self) -> str:
        """The fatbin's name."""
        return self.source if self.dim is None else f"{self.source}_{self.dim}"

    @property
    def path(self) -> Path:
        """The source's path."""
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
    *(Unit("rot_decode", dim) for dim in (256, 128, 64)),
    Unit("sparse"),
    Unit("rot_pages"),
    Unit("pages"),
    Unit("merge"),
    Unit("hash"),
    Unit("read"),
)
"""The slowest to compile come first."""


def build(folder: Path, architectures: Sequence[int] = ARCHITECTURES, units: Sequence[Unit] = UNITS) -> Iterator[str]:
    """Fills the folder with a fatbin for each unit, on all cores. Yields a line for each unit.

    The fatbins get their names once all are made. Raises MissingNvcc, NvccError, OSError.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise MissingNvcc(
            f"nvcc: none of CUDA {OLDEST_NVCC} or newer found that runs; install a toolkit, or set CUDA_HOME"
        )
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        jobs = [[pool.submit(_object, nvcc, unit, kind) for kind in _kinds(architectures)] for unit in units]
        for unit, parts in zip(units, jobs, strict=True):
            begun = time.monotonic()
            made = _join(nvcc, unfinished / f"{unit.name}.fatbin", [part.result() for part in parts])
            yield f"{made.name}: {made.stat().st_size} bytes after {time.monotonic() - begun:.1f} s more"
        folder.mkdir(parents=True, exist_ok=True)
        for made in unfinished.iterdir():
            made.replace(folder / made.name)
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(unfinished)


def taken_by(nvcc: Path, unit: Unit, architecture: int) -> dict[str, Taken]:
    """The registers of a unit's kernels, by nvcc. Raises NvccError, also for a forbidden spill."""
    _, made = _object(nvcc, unit, _Kind("elf", architecture))
    return parsed(made.with_suffix(".txt").read_text(encoding="utf-8"))


def find_nvcc() -> Path | None:
    """The first nvcc that is new enough."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    on_path = shutil.which("nvcc")
    found = [*(home / "bin" / "nvcc" for home in (*homes, *HOMES)), *([Path(on_path)] if on_path else [])]
    return next((nvcc.resolve() for nvcc in found if nvcc.exists() and _version(nvcc) >= OLDEST_NVCC), None)


def asked_architectures(told: str) -> Sequence[int]:
    """The architectures in TIERD_FATBINS: `all`, `0` for none, or a list. Raises ValueError."""
    if told == "all":
        return ARCHITECTURES
    try:
        asked = [int(number) for number in told.split(",") if int(number)]
    except ValueError:
        asked = [0]
    if unknown := set(asked) - set(ARCHITECTURES):
        known = ",".join(map(str, ARCHITECTURES))
        raise ValueError(f"{SWITCH}={told}: names {sorted(unknown)}; say `all`, `0` for none, or some of {known}")
    return asked


def is_checked() -> bool:
    """Whether the environment asks for kernels with checks."""
    return os.environ.get(CHECKED, "0") != "0"


def for_wheel(version: str) -> tuple[dict[str, str], str]:
    """The files that a wheel takes (path here, path in it), and a message about its kernels.

    It has the sources and this program, which can make fatbins later. An editable install has none.
    """
    if version == "editable":
        return {}, "kernels for GPUs: none in an editable install; `tierd kernels build` compiles them"
    sources = [
        *SOURCES.glob("src/*"),
        *SOURCES.glob("include/*"),
        *(Path(__file__).with_name(name) for name in PROGRAM),
    ]
    taken = {str(path): f"tierd/kernels/sources/{path.relative_to(ROOT)}" for path in sources}
    folder = OBJECTS.with_name("wheel")
    told = os.environ.get(SWITCH, "0")
    if is_checked():
        return taken, f"kernels for GPUs: none, since {CHECKED} is set and a wheel takes no checked ones\n{LATER}"
    try:
        architectures = asked_architectures(told)
        list(build(folder, architectures) if architectures else ())
        said = (
            f"fatbins for {', '.join(map(str, architectures))}"
            if architectures
            else f"none, since {SWITCH} asks for none"
        )
        names = [f"{unit.name}.fatbin" for unit in UNITS] if architectures else []
    except (MissingNvcc, NvccError, OSError, ValueError) as error:
        names, said = [], f"none, though {SWITCH}={told} asks for them: {error}"
    said = f"kernels for GPUs: {said}" + ("" if names else f"\n{LATER}")
    return taken | {str(folder / name): f"tierd/kernels/fatbins/{name}" for name in names}, said


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
    """Compiles one unit for one architecture, unless the result for this content exists."""
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
    """The digest of all inputs of an object: also the compiler, whose path names its version."""
    digest = hashlib.sha256(repr((str(nvcc), flags, os.environ.get(APPENDED))).encode())
    for path in sorted((unit.path, *SOURCES.glob("include/*.h"), *SOURCES.glob("src/*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version(nvcc: Path) -> int:
    """0 if it does not run."""
    try:
        told = re.search(r"release (\d+)", _run(str(nvcc), "--version", limit_s=VERSION_LIMIT_S))
    except NvccError:
        return 0
    return int(told[1]) if told else 0


def _run(*command: str, limit_s: float | None = None) -> str:
    words, limit_s = " ".join(command), limit_s or LIMIT_S
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise NvccError(f"{words}\nhas not ended after {limit_s:g} s, and was ended") from None
    except OSError as error:
        raise NvccError(f"{words}\ncannot be run: {error}") from None
    if done.returncode:
        raise NvccError(f"{words}\nended with {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout + done.stderr


def record(folder: Path) -> None:
    """Adds the folder's files to an installed tierd's RECORD, so that pip removes them with it."""
    told = distribution("tierd")
    site, files = Path(str(told.locate_file(""))).resolve(), told.files or []
    records = [file for file in files if file.name == "RECORD"]
    if records and folder.resolve().is_relative_to(site):
        known = {str(file) for file in files}
        new = sorted({str(path.resolve().relative_to(site)) for path in folder.iterdir()} - known)
        with open(str(told.locate_file(records[0])), "a", encoding="utf-8") as lines:
            lines.writelines(f"{name},,\n" for name in new)


def main() -> None:
    """Builds all units, or the units that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tools.fatbins", description=__doc__)
    parser.add_argument("units", nargs="*", choices=[[], *(unit.name for unit in UNITS)], metavar="UNIT")
    folder = CHECKED_FOLDER if is_checked() else INSTALLED
    parser.add_argument("--into", type=Path, default=folder, help="the folder of fatbins")
    given = parser.parse_args()
    architectures = asked_architectures(os.environ.get(SWITCH, "all"))
    print(
        f"compiles for {', '.join(map(str, architectures))} into {given.into}: takes minutes; what is done is kept in {OBJECTS}",
        flush=True,
    )
    for line in build(
        given.into, architectures, [unit for unit in UNITS if not given.units or unit.name in given.units]
    ):
        print(line, flush=True)
    if is_checked():
        print(f"TIERD_FATBINS_FOLDER={given.into}")
    if not IS_CHECKOUT:
        record(given.into)


if __name__ == "__main__":
    try:
        main()
    except (MissingNvcc, NvccError, OSError, ValueError) as error:
        sys.exit(f"kernels: {error}")
