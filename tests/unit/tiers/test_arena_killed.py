"""The arena after its daemon was killed by SIGKILL."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.checksum import verify

VICTIM = Path(__file__).with_name("arena_victim.py")
_spec = importlib.util.spec_from_file_location("arena_victim", VICTIM)
assert _spec is not None and _spec.loader is not None
victim = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(victim)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tierd-test-"))
    yield path
    shutil.rmtree(path)


def survivors(directory: Path) -> set[int]:
    """The generations that a new daemon recovers; every one of them is intact, byte for byte."""

    async def read() -> set[int]:
        arena = victim.make_arena(str(directory))
        found = await arena.open()
        generations = found.extents["generation"].tolist()
        for row, table in zip(found.extents, arena.slices(found.extents), strict=True):
            assert table is not None and verify(arena.view(row), table, victim.SLICES), row
            assert bytes(arena.view(row)) == victim.content(int(row["generation"])), row
            assert found.next_generation > int(row["generation"])
        await arena.close(release=True)
        return set(generations)

    return asyncio.run(read())


@pytest.mark.parametrize("seed", range(6))
def test_kill_while_publishing_leaves_every_block_intact_or_absent(directory: Path, seed: int) -> None:
    """After SIGKILL at a random moment, all recovered blocks are right, and no published one is lost."""
    lines = random.Random(seed).randrange(50, 2000)
    command = [sys.executable, str(VICTIM), "churn", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(lines)]
        child.kill()
        said += child.stdout.read().splitlines()
    published = {int(s) for s in said if s.strip() and s[0] == "+"}
    published -= {-int(s) for s in said if s.strip() and s[0] == "-"}
    found = survivors(directory)
    assert published <= found, f"seed {seed}: published and lost {published - found}"


def kill_at_lines(directory: Path, step: int) -> int:
    """Returns the number of kill points. Each arena's blocks are right or absent."""
    command = [sys.executable, str(VICTIM), "lines", str(directory), str(step)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    for point in sorted(int(path.name) for path in directory.iterdir()):
        found = survivors(directory / str(point))
        assert found <= {1, 2, 3, 4, 11, 12, 20, 21, 30, 31}, point
        assert {3, 4} <= found or not found & {1, 2, 11, 12}, f"point {point}: lost without reuse, {found}"
    return int(said.split()[-1])  # after its log lines


def test_kill_at_chosen_lines_of_the_arena(directory: Path) -> None:
    """Killed at lines all over reuse, begin, prepare and publish, an arena recovers only right blocks."""
    assert kill_at_lines(directory, 13) > 15


@pytest.mark.slow
def test_kill_at_every_line_of_the_arena(directory: Path) -> None:
    """The same at every line."""
    assert kill_at_lines(directory, 1) > 200
