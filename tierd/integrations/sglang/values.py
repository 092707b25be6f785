"""The values in SGLang's pages of keys and values: their shape, and the place of each in a page.

Codecs need both; plain copies need neither. Pools of dense keys and values have one shape. Each
layout of theirs has its own order of axes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tierd.core.formats.block import KVGeometry
from tierd.integrations.coding import Order
from tierd.integrations.sglang.pages import HostPages

AXES = {
    "layer_first": "plthd",
    "page_first": "ptlhd",
    "page_first_direct": "plthd",
    "page_head": "phtld",
}
"""Layout -> axes of a page in memory: pair of keys and values, layer, token, head, channel."""
BY_POINTER = AXES | {"layer_first": "lpthd"}
BLOCK = "lpthd"


def geometry_of(pages: HostPages) -> KVGeometry:
    """Geometry of a pool's pages; opaque unless they are dense keys and values in a known layout."""
    pool = pages.pool
    layers, heads, dim = (int(getattr(pool, name, 0) or 0) for name in ("layer_num", "head_num", "head_dim"))
    dtype = getattr(pool, "dtype", None)
    size = 2 * pages.page_tokens * layers * heads * dim * getattr(dtype, "itemsize", 0)
    is_dense = getattr(pool, "v_head_dim", dim) == dim and len(pages.lengths) % 2 * (pages.form == "pointers") == 0
    if not size or size != sum(pages.lengths) or not is_dense or getattr(pool, "layout", "") not in AXES:
        return KVGeometry()
    return KVGeometry(layers, heads, dim, str(dtype).removeprefix("torch."))


def order_of(pages: HostPages) -> Order:
    """The place in a page of each value of [layers, keys and values, tokens, kv_heads, head_dim]."""
    geometry = geometry_of(pages)
    axes = (BY_POINTER if pages.form == "pointers" else AXES)[pages.pool.layout]
    sizes: dict[str, Any] = {"p": 2, "l": geometry.layers, "t": pages.page_tokens}
    sizes |= {"h": geometry.kv_heads, "d": geometry.head_dim}
    shape = [sizes[axis] for axis in axes]
    places = np.arange(np.prod(shape)).reshape(shape)
    return np.ascontiguousarray(places.transpose([axes.index(axis) for axis in BLOCK])).reshape(-1).astype(np.intp)
