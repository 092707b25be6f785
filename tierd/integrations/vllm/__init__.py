"""The classes that vLLM's configuration names.

vLLM's `module_path` and `kv_connector_module_path` point here. Only access to one of the names
imports vLLM. Its version is checked before any of its interfaces is used.
"""

from __future__ import annotations

import importlib
from typing import Any

from tierd.integrations.versions import check_version

FACES = {"TierdConnector": "connector", "TierdTier": "tier"}
"""Name -> module of this package."""
__all__ = ["TierdConnector", "TierdTier"]


def __getattr__(name: str) -> Any:
    """Loads a class for vLLM by name. Raises Unsupported for an unknown version of vLLM."""
    if name not in FACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm  # noqa: PLC0415

    check_version("vllm", vllm.__version__)
    return getattr(importlib.import_module(f"{__name__}.{FACES[name]}"), name)
