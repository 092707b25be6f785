"""Lets a test do without the compiled loops only on a machine that has no C++ compiler."""

from __future__ import annotations

import pytest

from tierd.native import FUNCTIONS, find_library
from tools.native import find_compiler

NO_COMPILER = "this machine has no C++ compiler for tierd/native; install g++ and run `make`"
HAS_ALL = all(find_library(name) is not None for name in FUNCTIONS)
NEEDS_LIBRARY = pytest.mark.skipif(not HAS_ALL and find_compiler() is None, reason=NO_COMPILER)


def check_library() -> None:
    """Skips on a machine without a compiler. Fails if there is a compiler and the library is
    missing, or of another source."""
    if not all(find_library(name) is not None for name in FUNCTIONS):
        if find_compiler() is None:
            pytest.skip(NO_COMPILER)
        pytest.fail(
            "tierd/native: a C++ compiler is here, and plane.so or codecs.so is missing or of another "
            "source; run `python -m tools.native`"
        )
