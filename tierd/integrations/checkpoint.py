"""Which weights an engine serves, as far as their files tell without being read.

Purpose: a name or a directory may come to stand for other weights; their files' names, sizes and times then differ. Non-purpose: reading weights, which takes as
long as loading them. Invariant: only what is seen; nothing of a model that is known by its name alone.
"""

from __future__ import annotations

from pathlib import Path

FILES = ("config.json", "params.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Of a local checkpoint, what its KV depends on."""
ADAPTER_FILES = ("adapter_*",)


def files_of(model: str, patterns: tuple[str, ...] = FILES) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time (ns) of a directory's files of these names, or of a file itself; () of a model that is known by its name. Raises OSError."""
    place = Path(model)
    found = [path for name in patterns for path in place.glob(name)] if place.is_dir() else []
    found += [place] if place.is_file() else []
    return tuple(sorted((path.name, stat.st_size, stat.st_mtime_ns) for path in found for stat in [path.stat()]))
