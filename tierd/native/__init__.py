"""Loops in C++, if a compiler built them when tierd was installed.

tools/native.py compiles them into two libraries: the data plane's (`plane.cpp`) and the codecs'
(`codecs.cpp`, and `codecs/`). Plain forms with the same results are in client/blocks and codecs. A
library of another source than the one beside it is not used.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARIES = FOLDER
"""Has plane.so and codecs.so."""
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_uint64
FUNCTIONS: dict[str, dict[str, list[type]]] = {
    "plane": {
        "tierd_sum_and_copy": [_POINTER, _NUMBER, _POINTER, _POINTER],
        "tierd_find": [_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER],
        "tierd_check": [_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER],
        "tierd_read_pieces": [_NUMBER, _POINTER, _NUMBER],
    },
    "codecs": {
        "tierd_use": [_NUMBER],
        "tierd_largest": [_POINTER, _NUMBER],
        "tierd_int8_encode": [_POINTER, _NUMBER, _POINTER, _POINTER],
        "tierd_int8_decode": [_POINTER, _NUMBER, _POINTER, _POINTER],
        "tierd_rotated_encode": [_POINTER, _POINTER, _POINTER, _POINTER],
        "tierd_rotated_decode": [_POINTER, _POINTER, _POINTER, _POINTER],
        "tierd_rans_encode": [_POINTER, _POINTER, _POINTER],
        "tierd_rans_decode": [_POINTER, _POINTER, _POINTER, _NUMBER, _POINTER],
        "tierd_lossless_sums": [_POINTER, _POINTER, _POINTER, _POINTER],
        "tierd_lossless_split": [_POINTER, _POINTER, _POINTER, _POINTER, _NUMBER],
        "tierd_lossless_pack": [_POINTER, _POINTER],
        "tierd_lossless_join": [_POINTER, _POINTER, _POINTER, _NUMBER, _POINTER],
        "tierd_kivi_encode": [_POINTER, _NUMBER, _POINTER, _POINTER],
        "tierd_kivi_decode": [_POINTER, _NUMBER, _POINTER, _POINTER],
        "tierd_transform_rows": [_POINTER, _POINTER, _POINTER],
        "tierd_transform_values": [_POINTER, _POINTER, _POINTER],
        "tierd_transform_split": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER],
        "tierd_transform_join": [_POINTER, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER],
        "tierd_has_tiles": [],
        "tierd_product_forward": [_POINTER, _POINTER, _POINTER, _POINTER],
        "tierd_product_values": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER],
        "tierd_product_errors": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER],
        "tierd_product_block": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER],
        "tierd_kvquant_encode": [_POINTER, _POINTER, _POINTER],
        "tierd_kvquant_decode": [_POINTER, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER],
    },
}
"""Library -> function -> arguments. Every function returns a u64."""


def sources_of(name: str, folder: Path = FOLDER) -> list[Path]:
    """The files of a library: `name`.cpp, and the headers in a folder of that name."""
    return [folder / f"{name}.cpp", *sorted((folder / name).glob("*.h"))]


def source_id(files: Iterable[Path]) -> str:
    """Names the source of a library."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def find_library(name: str = "plane") -> ctypes.CDLL | None:
    """The library; None if there is none for this source and this machine."""
    try:
        library = ctypes.CDLL(str(LIBRARIES / f"{name}.so"))
        library.tierd_source.restype = ctypes.c_char_p
        is_its = library.tierd_source().decode() == source_id(sources_of(name))
        if not is_its:
            return None
        for function, arguments in FUNCTIONS[name].items():
            getattr(library, function).argtypes, getattr(library, function).restype = arguments, _NUMBER
    except (OSError, AttributeError):
        return None
    return library
