"""The data plane's loops in C++ (`plane.cpp`), if a compiler built them when tierd was installed.

tools/native.py compiles them. Plain forms with the same results are in client/blocks/copying.py and
one_sided_get.py. A library of another source than the one beside it is not used.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

SOURCE = Path(__file__).with_name("plane.cpp")
LIBRARY = Path(__file__).with_name("plane.so")


def source_id(source: Path = SOURCE) -> str:
    """Names the source of a library."""
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


def find_library() -> ctypes.CDLL | None:
    """The library; None if there is none for this source and this machine."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.tierd_source.restype = ctypes.c_char_p
        is_its = library.tierd_source().decode() == source_id()
    except (OSError, AttributeError):
        return None
    if not is_its:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    for name, arguments in {
        "tierd_sum_and_copy": [pointer, number, pointer, pointer],
        "tierd_find": [pointer, number, pointer, number, pointer, pointer, pointer],
        "tierd_check": [pointer, number, pointer, number, pointer],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    return library
