"""The oldest kernel on which tierd runs."""

from __future__ import annotations

LEAST = (5, 15)


def release_of(text: str) -> tuple[int, ...]:
    """Major and minor number of a kernel release such as "6.1.0-18-amd64"."""
    return tuple(int(part) for part in text.split("-", maxsplit=1)[0].split(".")[:2] if part.isdecimal())
