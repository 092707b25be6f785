"""Which weights an engine serves, as far as their files tell without being read.

Purpose: a name or a directory may come to stand for other weights; their files' names, sizes and times then differ. Non-purpose: reading weights, which takes as
long as loading them. Invariant: only what is seen; nothing of a model that is known by its name alone.
"""

from __future__ import annotations

from pathlib import Path


def files_of(model: str, pattern: str = "*.safetensors") -> list[tuple[str, int, int]]:
    """Name, size and time (ns) of a local checkpoint's weights; [] of a model that is known by its name."""
    directory = Path(model)
    found = [(path.name, path.stat()) for path in directory.glob(pattern)] if directory.is_dir() else []
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
