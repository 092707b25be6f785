"""The files of an arena whose tier grows and shrinks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.blocks import await_true
from tierd.errors import TierFailed
from tierd.tiers.arena.data_files import LOOK_S, LOOKS, DataFiles

SIZE = 64 << 10


@pytest.fixture
def files(tmp_path: Path) -> Iterator[DataFiles]:
    """Files of three places, all made."""
    made = DataFiles(tmp_path, segment_bytes=SIZE, places=3)
    made.start()
    await_true(lambda: made.spares == 3, "three files are made")
    yield made
    made.stop()


def on_disk(directory: Path) -> int:
    return len(list(directory.glob("*.data")))


def test_more_places_get_files(files: DataFiles, tmp_path: Path) -> None:
    """Files for more places are made ahead, also if the thread that made the first has ended."""
    files.grow(2)
    await_true(lambda: files.spares == 5, "five files are made")
    for segment in range(5):
        assert len(files.take(segment)) == SIZE
    with pytest.raises(TierFailed, match="in use"):
        files.take(5)
    assert on_disk(tmp_path) == 5 and files.unready_bytes == 0


def test_fewer_places_have_fewer_files(files: DataFiles, tmp_path: Path) -> None:
    """The files of closed places go, those of segments stay, and no other file can be had."""
    files.take(7)
    files.take(8)
    files.discard(7)
    files.shrink(2)
    assert [path.name for path in tmp_path.glob("*.data")] == ["8.data"]
    with pytest.raises(TierFailed, match="in use"):
        files.take(9)


def test_a_shrink_takes_unmade_files_first(tmp_path: Path) -> None:
    """A tier whose memory is not made yet shrinks without making it."""
    files = DataFiles(tmp_path, segment_bytes=SIZE, places=3)
    files.shrink(2)
    files.start()
    await_true(lambda: files.spares == 1 and not files.unready_bytes, "one file is made")
    files.stop()
    assert on_disk(tmp_path) == 1


def test_a_shrink_waits_for_a_file_that_is_being_made(tmp_path: Path) -> None:
    """Shrinking while files are made leaves as many as there are places."""
    files = DataFiles(tmp_path, segment_bytes=SIZE, places=40)
    files.start()
    files.shrink(39)
    await_true(lambda: files.spares == 1 and not files.unready_bytes, "one file is left")
    files.stop()
    assert on_disk(tmp_path) == 1


def test_a_shrink_waits_for_a_file_that_comes_back(files: DataFiles, tmp_path: Path) -> None:
    """A file that a thread gave to a segment that has ended meanwhile goes when it comes back."""
    for segment in range(3):
        files.take(segment)
    with ThreadPoolExecutor(1) as pool:
        shrinks = pool.submit(files.shrink, 1)
        files.discard(1)
        shrinks.result(10)
    assert on_disk(tmp_path) == 2
    with pytest.raises(TierFailed, match="in use"):
        files.take(3)


def test_files_are_counted_while_they_get_other_names(files: DataFiles) -> None:
    """Segments that begin and end while the bytes are counted raise no error."""
    files.take(1)
    done = threading.Event()

    def rename() -> None:
        while not done.is_set():
            files.rename(1, 2)
            files.rename(2, 1)

    with ThreadPoolExecutor(1) as pool:
        renames = pool.submit(rename)
        try:
            assert all(2 * SIZE <= files.held_bytes() <= 4 * SIZE for _ in range(300))
        finally:
            done.set()
        renames.result(10)


def test_a_shrink_ends_with_its_arena(files: DataFiles) -> None:
    """A shrink that still waits for a file does not hold up the end of the daemon."""
    for segment in range(3):
        files.take(segment)
    with ThreadPoolExecutor(1) as pool:
        shrinks = pool.submit(files.shrink, 1)
        files.stop()
        shrinks.result(LOOK_S * LOOKS / 2)
