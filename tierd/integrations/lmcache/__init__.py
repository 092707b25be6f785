"""The class that an L2 adapter of LMCache of type "plugin" names.

LMCache's `module_path` and `class_name` point here. Only access to one of the names imports
LMCache. Its version is checked before any of its interfaces is used.
"""

from __future__ import annotations

import importlib
from typing import Any

from tierd.integrations.versions import check_version

FACES = {"TierdL2": "adapter"}
"""Name -> module of this package."""
__all__ = ["TierdL2"]


def __getattr__(name: str) -> Any:
    """Loads a class for LMCache by name. Raises Unsupported for an unknown version of LMCache."""
    if name not in FACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import lmcache  # noqa: PLC0415

    check_version("lmcache", lmcache.__version__)
    return getattr(importlib.import_module(f"{__name__}.{FACES[name]}"), name)
