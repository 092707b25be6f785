"""Copies past the caches, where a library has them."""

from __future__ import annotations

import ctypes.util
import importlib
import platform
import sys

import numpy as np
import pytest

from tierd import streaming

HAS_LIBRARY = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="StringZilla is installed on x86-64 Linux alone"
)


@pytest.mark.parametrize("shift", [(0, 0), (1, 0), (0, 63), (17, 40)])
def test_long_copies_at_any_address(shift: tuple[int, int]) -> None:
    """Every byte arrives, and none beside them changes, however source and target lie to a line of the cache."""
    length = 3 * streaming.STREAMED_BYTES + 129
    source = np.arange(length + 64, dtype=np.uint32).astype(np.uint8)
    target = np.full(length + 128, 255, np.uint8)
    streaming.copy_bytes(target.ctypes.data + 32 + shift[0], source.ctypes.data + shift[1], length)
    begin = 32 + shift[0]
    assert np.array_equal(target[begin : begin + length], source[shift[1] : shift[1] + length])
    assert (target[:begin] == 255).all()
    assert (target[begin + length :] == 255).all()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed copies are the C library's."""
    monkeypatch.setitem(sys.modules, "stringzilla", None)
    assert streaming.find_copy() is ctypes.memmove


@HAS_LIBRARY
@pytest.mark.parametrize("processor", ["haswell", "skylake"])
def test_on_processors_that_it_is_quicker_on(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """With AVX2 and with AVX-512 long copies are its own."""
    library = importlib.import_module("stringzilla")
    monkeypatch.setattr(library, "__capabilities__", ("serial", processor))
    assert streaming.find_copy() is not ctypes.memmove


@HAS_LIBRARY
def test_on_a_processor_that_it_is_not_quicker_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other copies are no better than the C library's."""
    library = importlib.import_module("stringzilla")
    monkeypatch.setattr(library, "__capabilities__", ("serial", "westmere"))
    assert streaming.find_copy() is ctypes.memmove


@HAS_LIBRARY
def test_a_library_that_no_longer_shows_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel that exports no such function is done without."""
    library = importlib.import_module("stringzilla")
    monkeypatch.setattr(library, "__capabilities__", ("skylake",))
    monkeypatch.setattr(library, "__file__", ctypes.util.find_library("m"))
    assert streaming.find_copy() is ctypes.memmove
