"""tierd for vLLM: what its configuration names.

Purpose: `module_path` and `kv_connector_module_path` of vLLM point here. Non-purpose: anything that can be imported without vLLM. Invariant: vLLM is imported
only when one of the names is asked for, and its version is checked before anything of its interfaces is touched.
"""

from __future__ import annotations

import importlib
from typing import Any

from tierd.integrations.versions import check_version

FACES = {"TierdConnector": "connector", "TierdTier": "tier"}
"""Name -> module of this package."""
__all__ = ["TierdConnector", "TierdTier"]


def __getattr__(name: str) -> Any:
    """What vLLM loads by name. Raises Unsupported for a version of vLLM that is not known."""
    if name not in FACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm  # noqa: PLC0415

    check_version("vllm", vllm.__version__)
    return getattr(importlib.import_module(f"{__name__}.{FACES[name]}"), name)
