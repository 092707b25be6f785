"""The mappings of processes."""

from __future__ import annotations

from pathlib import Path

import pytest


def maps_of(pid: int) -> list[str]:
    """Lines of /proc/PID/maps. Skips the test if they are unreadable: only root reads those of a
    process that hides its memory."""
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except PermissionError:
        pytest.skip(f"/proc/{pid}/maps is root's alone to read: this process lets nobody see its memory")
