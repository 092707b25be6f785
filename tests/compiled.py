"""When a test may do without the compiled loops: on a machine that has no C++ compiler, and on no other."""

from __future__ import annotations

import pytest

from tierd.native import find_library
from tools.native import find_compiler

NO_COMPILER = "this machine has no C++ compiler for tierd/native; install g++ and run `make`"
NEEDS_LIBRARY = pytest.mark.skipif(find_library() is None and find_compiler() is None, reason=NO_COMPILER)


def check_library() -> None:
    """Skips where nobody can compile the library. Fails where somebody could and it is missing, or of another
    source."""
    if find_library() is None:
        if find_compiler() is None:
            pytest.skip(NO_COMPILER)
        pytest.fail(
            "tierd/native: a C++ compiler is here, and plane.so is missing or of another source; run `python -m tools.native`"
        )
