"""What processes have mapped."""

from __future__ import annotations

from pathlib import Path

import pytest


def maps_of(pid: int) -> list[str]:
    """Lines of /proc/PID/maps. Skips the test where they are not ours to read: of a process that lets nobody see its memory they are root's alone."""
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except PermissionError:
        pytest.skip(f"/proc/{pid}/maps is root's alone to read: this process lets nobody see its memory")
