"""tierd for LMCache: what an L2 adapter of type "plugin" names.

Purpose: `module_path` and `class_name` of LMCache's plugin point here. Non-purpose: anything that can be imported without LMCache. Invariant: LMCache is
imported only when one of the names is asked for, and its version is checked before anything of its interfaces is touched.
"""

from __future__ import annotations

import importlib
from typing import Any

from tierd.integrations.versions import check_version

FACES = {"TierdL2": "adapter"}
"""Name -> module of this package."""
__all__ = ["TierdL2"]


def __getattr__(name: str) -> Any:
    """What LMCache loads by name. Raises Unsupported for a version of LMCache that is not known."""
    if name not in FACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import lmcache  # noqa: PLC0415

    check_version("lmcache", lmcache.__version__)
    return getattr(importlib.import_module(f"{__name__}.{FACES[name]}"), name)
