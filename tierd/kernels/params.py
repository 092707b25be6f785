"""The structs that kernels take, field by field as in cuda/src.

`Library.launch` compares sizes; tests compare results.
"""

from __future__ import annotations

import ctypes

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


def word_of(kind: type[ctypes.Structure], path: str) -> int:
    """The 8 bytes of a struct that hold an address. path: of its field, such as `batch.tables`."""
    at = 0
    for name in path.split("."):
        at += getattr(kind, name).offset
        kind = dict(kind._fields_)[name]  # type: ignore[assignment, arg-type]
    return at // 8


class Pool(ctypes.Structure):
    """batch.h"""

    _fields_ = [
        ("k", _P),
        ("v", _P),
        ("page_stride", _L),
        ("token_stride", _L),
        ("head_stride", _L),
        *((name, _I) for name in ("page_tokens", "pages")),
    ]


class Batch(ctypes.Structure):
    """batch.h"""

    _fields_ = [
        *((name, _P) for name in ("kv_lens", "tables", "subsets", "subset_sizes")),
        *((name, _I) for name in ("requests", "kv_heads", "table_stride", "subset_stride", "sinks", "window")),
    ]


class Decode(ctypes.Structure):
    """decode.h"""

    _fields_ = [
        ("batch", Batch),
        ("pool", Pool),
        *((name, _P) for name in ("q", "to", "lse_to", "out", "lse", "launches", "arrived")),
        *((name, _P) for name in ("tile_lse", "mass", "k_scales", "v_scales")),
        ("q_heads", _I),
        ("ring", _I),
        ("scale_log2", _F),
    ]


class Clear(ctypes.Structure):
    """decode.cu"""

    _fields_ = [("words", _P), ("count", _I)]


class Mass(ctypes.Structure):
    """decode.cu"""

    _fields_ = [("batch", Batch), ("tile_lse", _P), ("lse", _P), ("mass", _P), ("q_heads", _I), ("page_tokens", _I)]


class Prefill(ctypes.Structure):
    """prefill.cu"""

    _fields_ = [
        ("batch", Batch),
        ("pool", Pool),
        *((name, _P) for name in ("q", "query_starts", "out", "lse", "k_scales", "v_scales")),
        ("q_heads", _I),
        ("scale_log2", _F),
    ]


class Merge(ctypes.Structure):
    """merge.cu; for parts in separate arrays, outs and lses are arrays of addresses"""

    _fields_ = [*((name, _P) for name in ("outs", "lses", "out", "lse")), ("rows", _L), ("parts", _I), ("dim", _I)]


class Store(ctypes.Structure):
    """pages.cu"""

    _fields_ = [
        ("k", _P),
        ("v", _P),
        ("k_stride", _L),
        ("v_stride", _L),
        *((name, _P) for name in ("slots", "k_to", "v_to")),
        *((name, _L) for name in ("page_stride", "token_stride", "head_stride")),
        ("k_scales", _P),
        ("v_scales", _P),
        *((name, _I) for name in ("page_tokens", "kv_heads", "dim", "pages")),
    ]


class Side(ctypes.Structure):
    """pages.cu"""

    _fields_ = [("base", _P), ("layers", _P), ("pages", _P), ("strides", _L * 5), ("count", _L)]


class Copy(ctypes.Structure):
    """pages.cu"""

    _fields_ = [("from_", Side), ("to", Side), ("counts", _I * 5), ("row_bytes", _I)]


class Runs(ctypes.Structure):
    """pages.cu"""

    _fields_ = [*((name, _P) for name in ("to", "from_", "lengths")), ("count", _I)]


class Summary(ctypes.Structure):
    """pages.cu"""

    _fields_ = [
        ("k", _P),
        *((name, _L) for name in ("page_stride", "token_stride", "head_stride")),
        *((name, _P) for name in ("pages", "tokens", "bounds")),
        *((name, _I) for name in ("kv_heads", "dim", "pool_pages", "page_tokens")),
    ]


class Sums(ctypes.Structure):
    """hash.cu"""

    _fields_ = [(name, _P) for name in ("addresses", "lengths", "sums")]


class Rotate(ctypes.Structure):
    """rot_pages.cu"""

    _fields_ = [
        *((name, _P) for name in ("plain", "coded", "found")),
        ("strides", _L * 4),
        *((name, _I) for name in ("pages", "layers", "kv_heads", "tokens", "key_bits", "value_bits")),
    ]


class Bound(ctypes.Structure):
    """sparse.cu"""

    _fields_ = [
        ("k", _P),
        *((name, _L) for name in ("page_stride", "token_stride", "head_stride")),
        *((name, _P) for name in ("slots", "tokens", "to")),
        *((name, _L) for name in ("to_granule_stride", "to_head_stride")),
        *((name, _I) for name in ("dim", "page_tokens", "pages")),
    ]


class Score(ctypes.Structure):
    """sparse.cu"""

    _fields_ = [
        *((name, _P) for name in ("q", "bounds")),
        *((name, _L) for name in ("granule_stride", "head_stride")),
        *((name, _P) for name in ("tables", "counts", "scores")),
        *((name, _I) for name in ("q_heads", "kv_heads", "table_stride", "granules")),
    ]


class Choose(ctypes.Structure):
    """sparse.cu"""

    _fields_ = [
        *((name, _P) for name in ("scores", "counts", "chosen", "sizes")),
        *((name, _I) for name in ("kv_heads", "table_stride", "k", "forced_first", "forced_last")),
    ]


class Resolve(ctypes.Structure):
    """sparse.cu"""

    _fields_ = [
        *((name, _P) for name in ("chosen", "sizes", "where", "owners", "used", "hands")),
        *((name, _P) for name in ("hits", "misses", "hit_sizes", "miss_sizes")),
        *((name, _I) for name in ("kv_heads", "table_stride", "k", "slots")),
    ]


class Fetch(ctypes.Structure):
    """sparse.cu"""

    _fields_ = [
        *((name, _P) for name in ("misses", "miss_sizes", "owners", "sources", "hot")),
        *((name, _L) for name in ("request_stride", "slot_stride", "head_stride")),
        *((name, _L) for name in ("source_offset", "source_head_stride")),
        *((name, _I) for name in ("kv_heads", "table_stride", "k", "slots", "parts", "part_bytes")),
    ]
