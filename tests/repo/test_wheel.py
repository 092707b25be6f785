"""The wheel, its fatbins if they are asked for, and the command that makes fatbins later."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.compilers import skip_without
from tests.repo.source import ROOT, tracked_files
from tierd.cli.man import pages
from tierd.kernels.arguments import HEAD_DIMS
from tools import fatbins
from tools.fake_cuda import MAGIC, kernels_of
from tools.fatbins import DIMS, PTX, UNITS, MissingNvcc, NvccError, Unit, build, for_wheel
from tools.kernels import MissingTool

NVCC = """#!/bin/sh
case "$1" in --version) test {fault} != unasked || kill -SEGV $$; echo "Cuda compilation tools, release {version}.0"; exit;; esac
case {fault} in refusal) echo "the compiler's words" >&2; exit 1;; crash) kill -SEGV $$;; hang) exec sleep 60;; esac
while [ $# -gt 0 ]; do case "$1" in -o) echo object > "$2";; -Xptxas) cat {registers} >&2;; --create=*) echo fatbin > "${{1#--create=}}";; esac; shift; done
"""
REGISTERS = """ptxas info    : Compiling entry function 'decode_plan' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""

Toolkit = Callable[..., Path]


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    """Makes a pretended toolkit the only one; `version=0`: there is none."""

    def made(*, version: int = 13, fault: str = "none") -> Path:
        tools = tmp_path / "toolkit" / "bin"
        tools.mkdir(parents=True, exist_ok=True)
        (registers := tmp_path / "registers").write_text(REGISTERS, encoding="utf-8")
        for name in ("nvcc", "fatbinary") if version else ():
            said = NVCC.format(version=version, fault=fault, registers=registers)
            (tools / name).write_text(said, encoding="utf-8")
            (tools / name).chmod(0o755)
        for variable in ("CUDA_PATH", "TIERD_FATBINS"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("CUDA_HOME", str(tools.parent))
        monkeypatch.setattr(fatbins, "HOMES", ())
        monkeypatch.setattr(fatbins, "OBJECTS", tmp_path / "objects")
        monkeypatch.setattr(shutil, "which", lambda _name: None)
        return tools / "nvcc"

    return made


def fatbins_of(made: Mapping[str, str]) -> set[str]:
    """The names of the fatbins that a wheel takes."""
    return {Path(path).stem for path in made.values() if path.startswith("tierd/kernels/fatbins/")}


@pytest.mark.parametrize(("asked", "are_made"), [("all", True), ("90,120", True), ("0", False), (None, False)])
def test_a_wheel_has_the_fatbins_that_are_asked_for(
    toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch, asked: str | None, are_made: bool
) -> None:
    """TIERD_FATBINS decides whether a wheel has fatbins; else a message names the command for them."""
    toolkit()
    if asked:
        monkeypatch.setenv("TIERD_FATBINS", asked)
    made, said = for_wheel("standard")
    assert fatbins_of(made) == ({unit.name for unit in UNITS} if are_made else set())
    assert all(Path(path).read_text(encoding="utf-8") == "fatbin\n" for path in made if path.endswith(".fatbin"))
    assert ("fatbins for" in said, "`tierd kernels build`" in said) == (are_made, not are_made)
    assert for_wheel("editable")[0] == {}


@pytest.mark.parametrize(
    ("version", "fault", "asked", "why"),
    [
        (0, "none", "all", "none of CUDA 13 or newer found that runs; install a toolkit, or set CUDA_HOME"),
        (12, "none", "all", "none of CUDA 13 or newer found that runs"),
        (13, "unasked", "all", "none of CUDA 13 or newer found that runs"),
        (13, "refusal", "all", "the compiler's words"),
        (13, "crash", "all", "ended with -11"),
        (13, "hang", "90", "has not ended after 0.2 s"),
        (13, "none", "yes", "TIERD_FATBINS=yes: names"),
        (13, "none", "91", "say `all`, `0` for none, or some of 80,89,90,100,120"),
    ],
)
def test_a_wheel_never_fails_for_want_of_kernels(
    toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch, version: int, fault: str, asked: str, why: str
) -> None:
    """A wheel is built without fatbins, and says why, if the compiler is missing, old or fails, or
    the switch is invalid."""
    toolkit(version=version, fault=fault)
    monkeypatch.setenv("TIERD_FATBINS", asked)
    monkeypatch.setattr(fatbins, "LIMIT_S", 0.2 if fault == "hang" else 20)
    made, said = for_wheel("standard")
    assert (fatbins_of(made), "tierd/kernels/sources/cuda/src/decode.cu" in made.values()) == (set(), True)
    assert why in said and f"TIERD_FATBINS={asked}" in said and "`tierd kernels build`" in said


def test_what_cannot_be_compiled_leaves_what_was_there(toolkit: Toolkit, tmp_path: Path) -> None:
    """Fatbins are replaced together: a build that fails changes none and adds no file beside them."""
    toolkit(fault="refusal")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "merge.fatbin").write_text("of before", encoding="utf-8")
    with pytest.raises(NvccError, match="the compiler's words"):
        list(build(tmp_path / "made"))
    assert [path.name for path in tmp_path.iterdir() if "made" in path.name] == ["made"]
    assert (tmp_path / "made" / "merge.fatbin").read_text(encoding="utf-8") == "of before"
    toolkit(version=12)
    with pytest.raises(MissingNvcc):
        list(build(tmp_path))


def test_only_what_changed_is_compiled_again(toolkit: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object is made once for its source, headers, flags and compiler."""
    toolkit()
    copy = Path(shutil.copytree(ROOT / "cuda", tmp_path / "cuda"))
    monkeypatch.setattr(fatbins, "SOURCES", copy)

    def compiled() -> set[str]:
        before = set(os.listdir(tmp_path / "objects")) if (tmp_path / "objects").exists() else set()
        list(build(tmp_path / "made", [90], [Unit("merge"), Unit("pages")]))
        return {name.split("-")[0] for name in set(os.listdir(tmp_path / "objects")) - before}

    assert compiled() == {"merge", "pages"}
    assert compiled() == set()
    (copy / "src" / "merge.cu").write_text("changed", encoding="utf-8")
    assert compiled() == {"merge"}
    (copy / "src" / "formats.h").write_text("changed", encoding="utf-8")
    assert compiled() == {"merge", "pages"}


def test_units_hold_every_kernel() -> None:
    """The units of a split source together have every kernel that it has, for every head dim."""
    split = [unit for unit in UNITS if unit.dim]
    try:
        whole = {kernel for source in {unit.source for unit in split} for kernel in kernels_of(Unit(source))}
        parts = {kernel for unit in split for kernel in kernels_of(unit)}
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")
    assert len(whole) > 40
    assert parts == whole
    assert DIMS == HEAD_DIMS
    assert {unit.source for unit in UNITS} == {path.stem for path in (ROOT / "cuda" / "src").glob("*.cu")}


def test_nvcc_makes_the_kernels_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc compiles a unit to machine code and PTX with its kernels' names and the loader's launch
    bound, joined to a fatbin."""
    monkeypatch.setattr(fatbins, "OBJECTS", tmp_path / "objects")
    try:
        list(build(tmp_path, [90], [Unit("merge")]))
    except MissingNvcc as error:
        skip_without(error, "nvcc")
    made = [path for path in (tmp_path / "objects").iterdir() if not path.suffix]
    objects = {path.name.split("-")[1]: path.read_bytes() for path in made}
    assert set(objects) == {"elf90", f"ptx{PTX}"}
    for kernel in kernels_of(Unit("merge")):
        assert f".text.{kernel}\0".encode() in objects["elf90"]
        assert f".entry {kernel}(".encode() in objects[f"ptx{PTX}"]
    assert objects[f"ptx{PTX}"].count(b".maxntid 128") == len(kernels_of(Unit("merge")))
    assert int.from_bytes((tmp_path / "merge.fatbin").read_bytes()[:4], "little") == MAGIC


def test_an_sdist_has_every_tracked_file(tmp_path: Path) -> None:
    """An sdist holds the whole repository: it builds, and its tests run, as in a checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=90)
    (made,) = tmp_path.iterdir()
    with tarfile.open(made) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    assert set(tracked_files()) <= names
    assert not [name for name in names if name.endswith((".so", ".fatbin", ".pyc"))]


def context_of(containerfile: Path, into: Path) -> None:
    """Makes a folder of the files that a Containerfile copies into its build, and nothing else."""
    for names, to in re.findall(r"^COPY (?!--)(.+) (\S+)$", containerfile.read_text(encoding="utf-8"), re.MULTILINE):
        for name in names.split():
            source, target = ROOT / name, into / to / (Path(name).name if to.endswith("/") else "")
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "fatbins"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)


def test_a_wheel_of_what_the_container_copies_compiles_its_kernels_later(toolkit: Toolkit, tmp_path: Path) -> None:
    """A wheel of the Containerfile's files is complete and installs. Its command `tierd kernels
    build` compiles its kernels; pip removes all; a new build has the requested fatbins."""
    env = os.environ | {
        "CUDA_HOME": str(toolkit().parents[1]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": "",
    }
    context_of(ROOT / "deploy" / "Containerfile", tmp_path / "context")

    def ran(*words: str, **more: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path / "context", env=env | more, capture_output=True, text=True, check=False, timeout=90
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout + done.stderr

    said = ran(sys.executable, "-m", "hatchling", "build", "--target", "wheel", TIERD_FATBINS="90,120")
    (wheel,) = (tmp_path / "context" / "dist").iterdir()
    assert "fatbins for 90, 120" in said
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in tracked_files() if name.startswith("tierd/")} <= set(names)
    assert {name.split("share/man/man1/")[1] for name in names if "/share/man/" in name} == pages().keys()
    held = {Path(name).stem for name in names if name.endswith(".fatbin")}
    assert held == {unit.name for unit in UNITS}
    said = ran(sys.executable, "-m", "hatchling", "build", "--target", "wheel")
    assert "`tierd kernels build`" in said

    ran(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env"))
    python = str(tmp_path / "env" / "bin" / "python")
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input")
    ran(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    (site / "beside.pth").write_text(str(Path(pytest.__file__).parents[1]), encoding="utf-8")  # tierd's dependencies
    assert (tmp_path / "env" / "share" / "man" / "man1" / "tierctl-status.1").exists()
    assert not (site / "tierd" / "kernels" / "fatbins").exists()
    said = ran(str(tmp_path / "env" / "bin" / "tierd"), "kernels", "build", "--architecture", "90")
    assert "for 90 into" in said and str(tmp_path / "cache" / "tierd") in said
    assert {path.stem for path in (site / "tierd" / "kernels" / "fatbins").iterdir()} == {unit.name for unit in UNITS}
    ran(*pip, "uninstall", "--yes", "--quiet", "tierd")
    assert not list(site.glob("tierd/**/*.fatbin"))
