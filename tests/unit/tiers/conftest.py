"""A separate NVMe store for each test, and memory for an arena's files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.unit.tiers.store_world import World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """An open store, with segment 1 begun."""
    made = World.at(tmp_path / "store")
    await made.open()
    await made.begin(1)
    yield made
    await made.store.close(release=False)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory, as an arena's is."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tierd-test-"))
    yield path
    shutil.rmtree(path)
