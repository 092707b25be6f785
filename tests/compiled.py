"""Lets a test do without the compiled loops only on a machine that has no C++ compiler."""

from __future__ import annotations

import pytest

from tierd.native import find_library
from tools.native import find_compiler

NO_COMPILER = "this machine has no C++ compiler for tierd/native; install g++ and run `make`"
NEEDS_LIBRARY = pytest.mark.skipif(find_library() is None and find_compiler() is None, reason=NO_COMPILER)


def check_library() -> None:
    """Skips on a machine without a compiler. Fails if there is a compiler and the library is
    missing, or of another source."""
    if find_library() is None:
        if find_compiler() is None:
            pytest.skip(NO_COMPILER)
        pytest.fail(
            "tierd/native: a C++ compiler is here, and plane.so is missing or of another source; run `python -m tools.native`"
        )
