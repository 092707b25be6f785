"""`make gpu`: what only a GPU can tell. Each part is a process with a bound of its own; what is expected of each row was written down before any run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_TESTS = str(Path(__file__).resolve().parents[2] / "tests")
_FOUND = importlib.util.find_spec("tests")
if _FOUND is None or _TESTS not in (_FOUND.submodule_search_locations or ()):
    # A machine's own Python may have a package of that name, which would come before a folder that is none.
    _OURS = ModuleType("tests")
    _OURS.__path__ = [_TESTS]
    sys.modules["tests"] = _OURS
