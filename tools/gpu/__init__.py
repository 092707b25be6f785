"""`make gpu`: checks and benchmarks that need a GPU. Each part is a process with its own time
limit. Each row's forecast was written before any run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_TESTS = str(Path(__file__).resolve().parents[2] / "tests")
_FOUND = importlib.util.find_spec("tests")
if _FOUND is None or _TESTS not in (_FOUND.submodule_search_locations or ()):
    # Another package `tests` of this Python would come first: the project's own takes its place.
    _OURS = ModuleType("tests")
    _OURS.__path__ = [_TESTS]
    sys.modules["tests"] = _OURS
