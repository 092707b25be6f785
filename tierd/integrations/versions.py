"""Versions of engines that this release was tested with, and the refusal of others.

An engine with an unknown interface is refused with an error before any of it is used. Differences
within a window are for the engine's own module to detect. The table lists only versions that ran.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Window:
    """Versions of an engine: `first` <= version < `end`, both as (major, minor). The tests ran on
    the versions in `ran`; others in the window are believed to fit."""

    first: tuple[int, int]
    end: tuple[int, int]
    ran: tuple[str, ...]

    def __str__(self) -> str:
        return f">={self.first[0]}.{self.first[1]},<{self.end[0]}.{self.end[1]}"


WINDOWS = {
    "vllm": Window((0, 31), (0, 34), ran=("0.31", "0.32")),
    "sglang": Window((0, 5), (0, 6), ran=("0.5.23",)),
    "transformers": Window((5, 19), (6, 0), ran=("5.19", "5.23")),
    "lmcache": Window((0, 5), (0, 6), ran=("0.5.6",)),
}


def check_version(engine: str, found: str) -> None:
    """Raises Unsupported for a version outside the engine's window; KeyError for an unknown engine."""
    window = WINDOWS[engine]
    if not window.first <= release_of(found) < window.end:
        raise Unsupported(
            f"{engine} {found}: tierd supports {engine}{window} (run on {', '.join(window.ran)}); install one of these, or a tierd that knows yours"
        )


def has_run(engine: str, found: str) -> bool:
    """Whether this release's tests ran on that version."""
    return any(found == ran or found.startswith((f"{ran}.", f"{ran}+")) for ran in WINDOWS[engine].ran)


def release_of(version: str) -> tuple[int, int]:
    """Major and minor of a version; (0, 0) if it is no release, such as "dev"."""
    parts = version.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(part.isdigit() for part in parts) else (0, 0)
