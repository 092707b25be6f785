"""An arena's memory in huge pages, which the kernel makes on request for files on a tmpfs."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tierd.client.session import mapping as client_mapping
from tierd.linux.huge_pages import HUGE_BYTES
from tierd.linux.mapping import address_of
from tierd.tiers.arena.arena_files import huge_share, measure_touch
from tierd.tiers.arena.data_files import DataFiles

KIB, MIB = 1 << 10, 1 << 20
PR_SET_THP_DISABLE = 41
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def makes_huge_pages() -> bool:
    """Whether this kernel makes huge pages of 2 MiB on request."""
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    size, shared = SETTINGS / "hpage_pmd_size", SETTINGS / "shmem_enabled"
    is_right = size.exists() and int(size.read_text()) == HUGE_BYTES and "[deny]" not in shared.read_text()
    return version >= (6, 1) and is_right


needs_huge_pages = pytest.mark.skipif(not makes_huge_pages(), reason="Linux before 6.1, or one without huge pages")


@pytest.fixture
def refused() -> Iterator[None]:
    """The kernel makes no huge page for this process."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        assert libc.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0


@needs_huge_pages
@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_segment_lies_in_huge_pages(directory: Path, *, is_ahead: bool) -> None:
    """A segment, made in advance or on demand, uses huge pages if they fit, all allocated and zero."""
    files = DataFiles(directory, segment_bytes=2 * HUGE_BYTES + 64 * KIB, places=1)
    if is_ahead:
        files.start()
        files._thread.join()
    memory = files.take(1)
    assert huge_share(memory) == 2 * HUGE_BYTES / memory.nbytes
    assert files.path(1).stat().st_blocks * 512 == memory.nbytes
    assert not np.frombuffer(memory, dtype=np.uint8).any()
    files.stop()


@needs_huge_pages
def test_a_client_maps_huge_pages_as_such(directory: Path) -> None:
    """A client that maps a segment reads it through huge pages, without a fault for each 4 KiB."""
    files = DataFiles(directory, segment_bytes=2 * HUGE_BYTES, places=1)
    files.take(1)
    fd = os.open(files.path(1), os.O_RDONLY)
    mapped = client_mapping.map_file(fd, 2 * HUGE_BYTES, writable=False)
    os.close(fd)
    assert not mapped[::HUGE_BYTES].any()
    assert huge_share(mapped.data) == 1
    files.stop()


@needs_huge_pages
def test_the_measure_is_of_memory_as_it_is_made(directory: Path) -> None:
    """An arena's reported share of huge pages is that of its segments."""
    touch = measure_touch(directory)
    assert touch is not None and touch.huge_share == 1


@pytest.mark.usefixtures("refused")
def test_small_pages_do_where_huge_ones_are_refused(directory: Path) -> None:
    """If the kernel refuses huge pages, a segment is still allocated whole."""
    files = DataFiles(directory, segment_bytes=4 * MIB, places=1)
    memory = files.take(1)
    assert huge_share(memory) == 0 and address_of(memory) % HUGE_BYTES == 0
    assert files.path(1).stat().st_blocks * 512 == memory.nbytes
    files.stop()
