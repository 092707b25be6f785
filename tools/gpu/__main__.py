"""`make gpu`: probes, checks and benchmarks on a machine with a GPU, within eight minutes.

It writes build/gpu.json and cuda/RESULTS.md, and updates both files after each result.

    python -m tools.gpu [PART ...]     some parts alone write build/RESULTS.md
    python -m tools.gpu --waiting      cuda/RESULTS.md before any run
    python -m tools.gpu --small        tiny sizes, for `python -m tools.fake_cuda`; no figure counts

The exit status is 1 if a check failed, a promise was missed, or a part gave no result. If a package
of NEEDED is missing, it names that one and exits with 1. A machine without network may get copies.
"""

from __future__ import annotations

import importlib
import sys

NEEDED = {
    "numpy": "numpy",
    "ml_dtypes": "ml_dtypes",
    "array_api_compat": "array-api-compat",
    "msgpack": "msgpack",
    "xxhash": "xxhash",
    "google.protobuf": "protobuf",
    "cuda.bindings": "cuda-bindings",
}
"""All imports from outside this repository, by the names of modules and of packages."""


def main() -> int:
    """The exit status."""
    missing = [package for module, package in NEEDED.items() if not _is_there(module)]
    if missing:
        print(
            f"make gpu: {', '.join(missing)}: not installed; nothing was checked. Install with `pip install {' '.join(missing)}`, or carry them there",
            file=sys.stderr,
        )
        return 1
    return int(importlib.import_module("tools.gpu.run").main())


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
