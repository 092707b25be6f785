"""The wheel, and the fatbins that it carries where there is an nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compilers import skip_without
from tests.repo.source import ROOT
from tierd.kernels.arguments import HEAD_DIMS
from tools import fatbins
from tools.fake_cuda import MAGIC, kernels_of
from tools.fatbins import DIMS, PTX, UNITS, MissingNvcc, NvccError, Unit, build, for_wheel
from tools.kernels import MissingTool

NVCC = """#!/bin/sh
case "$1" in --version) echo "Cuda compilation tools, release {version}.0"; exit;; esac
test {fault} = 0 || {{ echo "the compiler's words" >&2; exit 1; }}
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

    def made(*, version: int = 13, fault: int = 0) -> Path:
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


def test_a_wheel_has_fatbins_where_there_is_a_compiler(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an nvcc a fatbin of each unit; none for an editable install, none by the switch, none with an nvcc that is too old, none without one."""
    toolkit()
    assert set(for_wheel("standard").values()) == {f"tierd/kernels/fatbins/{unit.name}.fatbin" for unit in UNITS}
    assert all(Path(made).read_text(encoding="utf-8") == "fatbin\n" for made in for_wheel("standard"))
    assert for_wheel("editable") == {}
    monkeypatch.setenv("TIERD_FATBINS", "0")
    assert for_wheel("standard") == {}
    toolkit(version=12)
    assert for_wheel("standard") == {}


def test_without_a_compiler_there_are_no_fatbins(toolkit: Toolkit, tmp_path: Path) -> None:
    """A wheel is made all the same; who asks for fatbins is told what is missing."""
    toolkit(version=0)
    assert for_wheel("standard") == {}
    with pytest.raises(MissingNvcc, match="none of CUDA 13 or newer found; install a toolkit, or set CUDA_HOME"):
        list(build(tmp_path))


def test_what_a_compiler_refuses_fails_the_build(toolkit: Toolkit) -> None:
    """A wheel does not go without what its compiler could not make: the compiler's own words are in the error."""
    toolkit(fault=1)
    with pytest.raises(NvccError, match="the compiler's words"):
        for_wheel("standard")


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
    """The units of a source that is split hold together every kernel that it has, for every head dim."""
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
    """By nvcc a unit becomes machine code and PTX with its kernels, by their names and with the launch bound that the loader asks for, joined to a fatbin."""
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


@pytest.mark.parametrize("switch", ["0", "90"])
def test_hatchling_builds_the_wheel(toolkit: Toolkit, tmp_path: Path, switch: str) -> None:
    """The wheel that hatchling builds holds the package, and the fatbins that the hook made."""
    home = toolkit().parents[1]
    copy = tmp_path / "checkout"
    for name in ("tierd", "cuda", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "fatbins"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel"],
        cwd=copy,
        env=os.environ | {"TIERD_FATBINS": switch, "CUDA_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (copy / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert "tierd/kernels/loaded.py" in names
    held = {Path(name).stem for name in names if name.endswith(".fatbin")}
    assert held == ({unit.name for unit in UNITS} if switch == "90" else set())
