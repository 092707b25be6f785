"""Caches for transformers' `generate()` that other and later processes continue from.

Only access to one of the names imports transformers. Its version is checked before any of its
interfaces is used.

    with TierdStore(model) as store:
        cache = TierdCache.restore(store, input_ids)
        out = model.generate(input_ids, past_key_values=cache)
        cache.save(out)
"""

from __future__ import annotations

import importlib
from typing import Any

from tierd.integrations.versions import check_version

FACES = {"TierdStore": "store", "TierdCache": "cache", "PagedTierdCache": "paged", "weights_digest": "identity"}
"""Name -> module of this package."""
__all__ = ["PagedTierdCache", "TierdCache", "TierdStore", "weights_digest"]


def __getattr__(name: str) -> Any:
    """Imports a class by name. Raises Unsupported for an unknown version of transformers."""
    if name not in FACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import transformers  # noqa: PLC0415

    check_version("transformers", transformers.__version__)
    importlib.import_module(f"{__name__}.attention")  # registers tierd_paged
    return getattr(importlib.import_module(f"{__name__}.{FACES[name]}"), name)
