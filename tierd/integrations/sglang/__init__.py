"""The class that SGLang's --hicache-storage-backend-extra-config names.

`module_path` and `class_name` of its "dynamic" storage backend point here. Only access to one of
the names imports SGLang. Its version is checked before any of its interfaces is used.
"""

from __future__ import annotations

import importlib
from typing import Any

from tierd.integrations.versions import check_version

FACES = {"TierdHiCache": "hicache"}
"""Name -> module of this package."""
__all__ = ["TierdHiCache"]


def __getattr__(name: str) -> Any:
    """Loads a class for SGLang by name. Raises Unsupported for an unknown version of SGLang."""
    if name not in FACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.version import __version__  # noqa: PLC0415

    check_version("sglang", __version__)
    return getattr(importlib.import_module(f"{__name__}.{FACES[name]}"), name)
