"""Processes that build the emulator at the same time: one compiles it, and waits are bounded."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tools import kernels
from tools.kernels import CompilerError, build_emulator


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The compiled libraries; compiling creates an empty file."""
    found = list[Path]()
    monkeypatch.setattr(kernels, "find_headers", lambda: tmp_path)
    monkeypatch.setattr(kernels.shutil, "which", lambda name: name)
    monkeypatch.setattr(kernels, "_compile", lambda library, *_a, **_k: (library.touch(), found.append(library)))
    return found


def test_it_is_compiled_once(made: list[Path], tmp_path: Path) -> None:
    """A later caller uses the existing library."""
    assert build_emulator(into=tmp_path) == build_emulator(into=tmp_path)
    assert len(made) == 1


def test_another_that_does_not_end_is_named(made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits longer than a compiler may take gets an error that names the process to end."""
    library = build_emulator(into=tmp_path)
    monkeypatch.setattr(kernels, "LIMIT_S", 0)
    with open(library.with_suffix(".lock"), "wb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with pytest.raises(CompilerError, match=f"{library.name}: another process .*; end that process, then build"):
            build_emulator(into=tmp_path)
    assert len(made) == 1
