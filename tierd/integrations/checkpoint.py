"""Identifies the weights that an engine serves by their files' metadata.

A name or a directory may later hold other weights; their files' names, sizes and times then differ.
Nothing reads the weights: that takes as long as loading them. A model that is known only by its
name has no files here.
"""

from __future__ import annotations

from pathlib import Path

FILES = ("config.json", "params.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""The files of a local checkpoint that its KV depends on."""
ADAPTER_FILES = ("adapter_*",)


def files_of(model: str, patterns: tuple[str, ...] = FILES) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time (ns) of the matching files of a directory, or of a file itself. () for a
    model known only by its name. Raises OSError."""
    place = Path(model)
    found = [path for name in patterns for path in place.glob(name)] if place.is_dir() else []
    found += [place] if place.is_file() else []
    return tuple(sorted((path.name, stat.st_size, stat.st_mtime_ns) for path in found for stat in [path.stat()]))
