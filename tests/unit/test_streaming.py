"""Copies past the caches, where a library has them."""

from __future__ import annotations

import ctypes.util
import importlib
import platform
import sys
from collections.abc import Callable

import numpy as np
import pytest

from tierd import streaming
from tierd.streaming import PLAIN, Streaming

HAS_STRINGZILLA = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="StringZilla is installed on x86-64 Linux alone"
)


HAS_LIBPMEM = pytest.mark.skipif(
    streaming._libpmem() is None, reason="libpmem1 is not installed, or this is no x86-64; see README.md"
)


@pytest.fixture
def no_libpmem(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody has installed it."""
    monkeypatch.setattr(streaming, "PMEM_LIBRARY", "libnone.so")


@pytest.mark.parametrize("shift", [(0, 0), (1, 0), (0, 63), (17, 40)])
@pytest.mark.parametrize(
    "find",
    [
        streaming.find_streaming,
        pytest.param(streaming._stringzilla, marks=HAS_STRINGZILLA),
        pytest.param(streaming._libpmem, marks=HAS_LIBPMEM),
    ],
)
def test_long_copies_at_any_address(find: Callable[[], Streaming], shift: tuple[int, int]) -> None:
    """Every byte arrives, and none beside them changes, however source and target lie to a line of the cache, by each library that is here."""
    copier = find()
    length = 3 * copier.from_bytes + 129
    source = np.arange(length + 64, dtype=np.uint32).astype(np.uint8)
    target = np.full(length + 128, 255, np.uint8)
    copier.copy_bytes(target.ctypes.data + 32 + shift[0], source.ctypes.data + shift[1], length)
    begin = 32 + shift[0]
    assert np.array_equal(target[begin : begin + length], source[shift[1] : shift[1] + length])
    assert (target[:begin] == 255).all()
    assert (target[begin + length :] == 255).all()


@pytest.mark.usefixtures("no_libpmem")
def test_without_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is installed copies are the C library's."""
    monkeypatch.setitem(sys.modules, "stringzilla", None)
    assert streaming.find_streaming() is PLAIN


@HAS_STRINGZILLA
@pytest.mark.usefixtures("no_libpmem")
@pytest.mark.parametrize(
    ("processor", "name"), [("haswell", "StringZilla"), ("skylake", "StringZilla"), ("westmere", "libc")]
)
def test_stringzilla_alone(monkeypatch: pytest.MonkeyPatch, processor: str, name: str) -> None:
    """With AVX2 and with AVX-512 long copies are its own; its others are no better than the C library's."""
    library = importlib.import_module("stringzilla")
    monkeypatch.setattr(library, "__capabilities__", ("serial", processor))
    assert streaming.find_streaming().name == name


@HAS_STRINGZILLA
@HAS_LIBPMEM
@pytest.mark.parametrize(("processor", "name"), [("haswell", "libpmem"), ("skylake", "StringZilla")])
def test_beside_libpmem(monkeypatch: pytest.MonkeyPatch, processor: str, name: str) -> None:
    """Without AVX-512 StringZilla does not stream, and libpmem does."""
    library = importlib.import_module("stringzilla")
    monkeypatch.setattr(library, "__capabilities__", ("serial", processor))
    assert streaming.find_streaming().name == name


@HAS_LIBPMEM
def test_no_libpmem_on_other_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its stores do not stream it is not used."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert streaming._libpmem() is None


@HAS_STRINGZILLA
@pytest.mark.usefixtures("no_libpmem")
def test_a_library_that_no_longer_shows_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel that exports no such function is done without."""
    library = importlib.import_module("stringzilla")
    monkeypatch.setattr(library, "__capabilities__", ("skylake",))
    monkeypatch.setattr(library, "__file__", ctypes.util.find_library("m"))
    assert streaming.find_streaming() is PLAIN
