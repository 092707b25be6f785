"""tierd for SGLang: what --hicache-storage-backend-extra-config names.

Purpose: `module_path` and `class_name` of SGLang's "dynamic" storage backend point here. Non-purpose: anything that can be imported without SGLang.
Invariant: SGLang is imported only when one of the names is asked for, and its version is checked before anything of its interfaces is touched.
"""

from __future__ import annotations

import importlib
from typing import Any

from tierd.integrations.versions import check_version

FACES = {"TierdHiCache": "hicache"}
"""Name -> module of this package."""
__all__ = ["TierdHiCache"]


def __getattr__(name: str) -> Any:
    """What SGLang loads by name. Raises Unsupported for a version of SGLang that is not known."""
    if name not in FACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.version import __version__  # noqa: PLC0415

    check_version("sglang", __version__)
    return getattr(importlib.import_module(f"{__name__}.{FACES[name]}"), name)
