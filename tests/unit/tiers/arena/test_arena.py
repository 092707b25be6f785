"""The arena's files: their places, the files that survive, and the files that are refused."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from tierd import failpoint
from tierd.checksum import record_checksum, slice_sums
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import EXTENT, SegmentAssignment, StructArray, TierKind, TierSpec
from tierd.core.plan import Plan
from tierd.errors import AlreadyOwned, ConfigError, TierFailed, VersionMismatch
from tierd.linux.mapping import address_of
from tierd.tiers.arena import arena_files
from tierd.tiers.arena.arena import Arena
from tierd.tiers.arena.catalogue import pack_head, read_head
from tierd.tiers.fsck.purge import list_arenas, purge
from tierd.tiers.tier import Recovered

MIB = 1 << 20
SOON_S = 10.0
SPEC = TierSpec(TierKind.HOST, 0, 4 * MIB, MIB, writer_owned=True)
CLASS_BYTES = 64 << 10


def segment(number: int, place: int = 0, **changes: object) -> SegmentAssignment:
    given = SegmentAssignment(0, place, number, 1, CLASS_BYTES, 16, 7, None, False)
    return replace(given, **changes)  # type: ignore[arg-type]


def page(number: int, *, slot: int = 0, generation: int = 1) -> StructArray:
    row = np.zeros(1, dtype=EXTENT)
    row["segment"], row["slot"], row["generation"], row["length"] = number, slot, generation, 9000
    row["offset"] = slot * CLASS_BYTES
    return row


def put(arena: Arena, row: StructArray, *, time_ms: int = 1) -> None:
    """Reserves, writes and publishes one page."""
    arena.apply(Plan(reserved=row))
    arena.view(row[0])[:] = bytes([int(row["generation"][0])]) * CLASS_BYTES
    metas = new_meta(1)
    metas["stored_length"], metas["time_ms"] = 9000, time_ms
    arena.publish(row, metas, [slice_sums(arena.view(row[0]), [9000])])


async def opened(directory: Path, spec: TierSpec = SPEC, *segments: SegmentAssignment) -> tuple[Arena, Recovered]:
    arena = Arena(spec, position=0, instance="t", arena_dir=str(directory))
    found = await arena.open()
    arena.apply(Plan(segments=list(segments)))
    await arena.prepare(segments)
    return arena, found


def arena_path(directory: Path) -> Path:
    return directory / f"tierd-{os.geteuid()}" / "t" / "host.0"


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that contains this address."""
    smaps = Path("/proc/self/smaps").read_text()
    for found in re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) ", smaps, re.MULTILINE):
        if int(found[1], 16) <= address < int(found[2], 16):
            flags = re.search(r"VmFlags: (.*)", smaps[found.end() :])
            return flags[1].split() if flags else []
    return []


# -- files


async def test_files_are_the_owners_alone_and_allocated(directory: Path) -> None:
    """Directories are 0700 and files 0600; data files have all their blocks before a descriptor is shared."""
    arena, _ = await opened(directory, SPEC, segment(1))
    here = arena_path(directory)
    modes = {p.name: p.stat().st_mode & 0o777 for p in here.iterdir()}
    assert {here.stat().st_mode & 0o777, here.parent.stat().st_mode & 0o777} == {0o700}
    assert set(modes.values()) == {0o600}
    fd, length = arena.descriptor(1, writable=False)
    assert os.fstat(fd).st_blocks * 512 >= length == MIB
    os.close(fd)
    await arena.close(release=True)


async def test_spare_files_are_ready_before_they_are_asked_for(directory: Path) -> None:
    """Soon after start, spare files cover the whole capacity, and a new segment takes one of them."""
    arena, _ = await opened(directory)
    await asyncio.to_thread(arena._data._thread.join)
    inodes = {p.stat().st_ino for p in arena_path(directory).glob("spare-*")}
    arena.apply(Plan(segments=[segment(1)]))
    assert len(inodes) == 4 and (arena_path(directory) / "1.data").stat().st_ino in inodes
    await arena.close(release=False)
    again, _ = await opened(directory, SPEC, segment(2))
    assert {p.stat().st_ino for p in arena_path(directory).glob("*.data")} == inodes, "spares are taken over"
    await again.close(release=True)


async def test_no_descriptor_stays_open(directory: Path) -> None:
    """A segment in use costs the daemon no file descriptor, so thousands of segments are possible."""

    def files_open() -> list[str]:
        return [Path(it.path).name for it in psutil.Process().open_files() if it.path.startswith(str(directory))]

    segments = [segment(n + 1, n, pages=1) for n in range(200)]
    arena, _ = await opened(directory, replace(SPEC, capacity_bytes=200 * 64 << 10, segment_bytes=64 << 10), *segments)
    assert files_open() == [arena_files.LOCK_NAME]
    await arena.close(release=True)
    assert files_open() == []


async def test_mappings_stay_out_of_core_dumps(directory: Path) -> None:
    """Pages of users' data are marked "do not dump"."""
    arena, _ = await opened(directory, SPEC, segment(1))
    arena.apply(Plan(reserved=page(1)))
    address = address_of(arena.view(page(1)[0]))
    assert "dd" in flags_of(address)
    await arena.close(release=True)


async def test_memory_goes_with_the_last_view(directory: Path) -> None:
    """A segment's mapping ends with the last view of it, and not before."""
    arena, _ = await opened(directory, SPEC, segment(1))
    view = arena.view(page(1)[0])
    await arena.close(release=True)

    def mapped() -> bool:
        return f"{directory}/" in Path("/proc/self/maps").read_text()

    assert mapped() and view[0] == 0
    del view
    assert not mapped()


# -- restart


async def test_shrinking_keeps_the_hot_segments(directory: Path) -> None:
    """With fewer places at the next start, the segments used last survive whole; a notice counts the rest."""
    arena, _ = await opened(directory, SPEC, *[segment(n + 1, n) for n in range(4)])
    for n, time_ms in enumerate((5, 9, 2, 7)):
        put(arena, page(n + 1, generation=n + 1), time_ms=time_ms)
    await arena.close(release=False)
    again, found = await opened(directory, replace(SPEC, capacity_bytes=2 * MIB))
    assert found.extents["segment"].tolist() == [4, 2]
    assert {(s.segment, s.slot) for s in found.segments} == {(2, 1), (4, 0)}
    assert any("2 segments dropped" in notice for notice in again.notices)
    assert bytes(again.view(page(4)[0])) == bytes([4]) * CLASS_BYTES
    assert len(list(arena_path(directory).glob("*.data"))) == 2
    await again.close(release=False)
    third, found = await opened(directory)
    assert {(s.segment, s.slot) for s in found.segments} == {(2, 1), (4, 0)}, "their new places are written down"
    assert (found.next_segment, found.next_generation) == (5, 5)
    await third.close(release=True)


async def test_other_segment_size_drops_all_and_says_so(directory: Path) -> None:
    """Segments of another size cannot be places of this tier: the arena drops them with a notice."""
    arena, _ = await opened(directory, SPEC, segment(1))
    put(arena, page(1))
    await arena.close(release=False)
    again, found = await opened(directory, replace(SPEC, segment_bytes=2 * MIB))
    assert found.segments == [] and any("1 segments dropped" in n and "2097152" in n for n in again.notices)
    await again.close(release=True)


@pytest.mark.parametrize("damage", ["cat", "data", "missing", "swapped"])
async def test_damaged_segment_is_dropped_alone(directory: Path, damage: str) -> None:
    """A segment with a damaged catalogue or data file is gone after a restart; the others survive."""
    arena, _ = await opened(directory, SPEC, segment(1), segment(2, 1))
    put(arena, page(1, generation=1))
    put(arena, page(2, generation=2))
    await arena.close(release=False)
    here = arena_path(directory)
    if damage == "cat":
        os.truncate(here / "1.cat", 5000)
    elif damage == "data":
        os.truncate(here / "1.data", 4096)
    elif damage == "missing":
        (here / "1.data").unlink()
    else:
        (here / "1.cat").write_bytes((here / "2.cat").read_bytes())
    again, found = await opened(directory)
    assert found.extents["segment"].tolist() == [2] and not (here / "1.data").exists() and not (here / "1.cat").exists()
    await again.close(release=True)


async def test_segment_of_a_newer_tierd_is_refused_and_kept(directory: Path) -> None:
    """A catalogue of a later version stops the start, and every file is still there."""
    arena, _ = await opened(directory, SPEC, segment(1), segment(2, 1))
    await arena.close(release=False)
    path = arena_path(directory) / "2.cat"
    raw = bytearray(path.read_bytes())
    raw[8:12] = (9).to_bytes(4, "little")
    raw[120:128] = record_checksum(bytes(raw[:120])).to_bytes(8, "little")
    path.write_bytes(raw)
    os.truncate(arena_path(directory) / "1.cat", 10)
    before = sorted(p.name for p in arena_path(directory).iterdir())
    with pytest.raises(VersionMismatch, match="version 9"):
        await opened(directory)
    assert sorted(p.name for p in arena_path(directory).iterdir()) == before


@pytest.mark.parametrize("at", [*range(8), *range(12, 40), 43, 55])
async def test_arena_with_damaged_marks_begins_anew(directory: Path, at: int) -> None:
    """If arena.tbl is damaged, the arena unlinks its files, gives a notice, and reuses no number."""
    arena, _ = await opened(directory, SPEC, segment(1))
    await arena.close(release=False)
    raw = bytearray((arena_path(directory) / "arena.tbl").read_bytes())
    raw[at] ^= 0x80
    (arena_path(directory) / "arena.tbl").write_bytes(raw)
    again, found = await opened(directory)
    assert not found.segments and not list(arena_path(directory).glob("[0-9]*"))
    assert any("starts empty" in notice for notice in again.notices)
    assert found.next_segment > 1 << 19 and found.next_generation > 1 << 39
    await again.close(release=True)


@pytest.mark.parametrize("writer", [7, 8])
async def test_file_found_at_start_gets_no_second_life(directory: Path, writer: int) -> None:
    """Former clients may still map a file from before the start; the next segment there gets another."""
    arena, _ = await opened(directory, SPEC, segment(1))
    fd, length = arena.descriptor(1, writable=True)
    await arena.close(release=False)
    again, _ = await opened(directory)
    successor = segment(2, replaces=1, writer=writer)
    again.apply(Plan(segments=[successor], reserved=page(2)))
    await again.prepare([successor])
    with mmap.mmap(fd, length) as client:
        client[:5] = b"wrote"
    os.close(fd)
    assert bytes(again.view(page(2)[0])[:5]) != b"wrote"
    await again.close(release=True)


async def test_torn_name_of_a_namespace_ends_the_log(directory: Path) -> None:
    """A half-written record is cut off, the earlier ones survive, and the log goes on."""
    arena, _ = await opened(directory)
    await arena.keep_namespace(b"first")
    await arena.keep_namespace(b"second")
    await arena.close(release=False)
    path = arena_path(directory) / "namespaces.log"
    os.truncate(path, path.stat().st_size - 2)
    again, found = await opened(directory)
    assert found.namespaces == [b"first"]
    await again.keep_namespace(b"third")
    await again.close(release=False)
    last, found = await opened(directory)
    assert found.namespaces == [b"first", b"third"]
    await last.close(release=True)


async def test_name_that_finds_no_room_harms_no_other(directory: Path) -> None:
    """A record for which the file system has no room raises an error; later records survive a restart."""
    arena, _ = await opened(directory)
    await asyncio.to_thread(arena._data._thread.join)  # its thread would hit the limit too
    await arena.keep_namespace(b"first")
    with (
        file_size_limit((arena_path(directory) / "namespaces.log").stat().st_size + 20),
        pytest.raises(TierFailed, match="File too large"),
    ):
        await arena.keep_namespace(b"second")
    await arena.keep_namespace(b"third")
    await arena.close(release=False)
    again, found = await opened(directory)
    assert found.namespaces == [b"first", b"third"]
    await again.close(release=True)


@pytest.mark.parametrize("is_used", [False, True])
async def test_files_that_somebody_removed_are_made_anew(directory: Path, is_used: bool) -> None:
    """Data files that another process removed cost their segments, but no place of the tier."""
    arena, _ = await opened(directory, SPEC, *([segment(n + 1, n) for n in range(4)] if is_used else []))
    arena._data._thread.join()
    for path in arena_path(directory).glob("*.data"):
        path.unlink()
    for life, before in ((10, 1 if is_used else None), (20, 10)):
        begun = [segment(life + n, n, replaces=None if before is None else before + n) for n in range(4)]
        arena.apply(Plan(segments=begun))
    await arena.prepare(begun)
    put(arena, page(23))
    await arena.close(release=True)


async def test_segment_that_ends_while_it_is_prepared(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file goes to the next segment at that place and counts once: never more files than places."""
    arena, _ = await opened(directory)
    await asyncio.to_thread(arena._data._thread.join)
    allocate, is_begun, is_over = os.posix_fallocate, threading.Event(), threading.Event()

    def slowly(*given: int) -> None:
        allocate(*given)
        is_begun.set()
        assert is_over.wait(SOON_S)

    arena.apply(Plan(segments=[segment(1)]))
    monkeypatch.setattr(os, "posix_fallocate", slowly)
    preparing = asyncio.ensure_future(arena.prepare([segment(1)]))
    assert await asyncio.to_thread(is_begun.wait, SOON_S)
    monkeypatch.undo()
    arena.apply(Plan(segments=[segment(2, replaces=1)]))
    is_over.set()
    await preparing
    await takes_all_places(arena, directory)


@pytest.mark.parametrize(
    "stalls",
    [
        {"arena.spare.before_file": 0.5, "arena.prepare.before_memory": 0.3},
        {"arena.prepare.before_catalogue": 0.3},
    ],
    ids=["memory", "catalogue"],
)
async def test_a_segment_ends_while_it_is_made(directory: Path, stalls: dict[str, float]) -> None:
    """If a segment ends while its memory or catalogue is made, nothing fails and no place is lost."""
    for point, seconds in stalls.items():
        failpoint.arm(point, f"delay:{seconds}x1")
    try:
        arena, _ = await opened(directory)
        arena.apply(Plan(segments=[segment(1)]))
        preparing = asyncio.ensure_future(arena.prepare([segment(1)]))
        assert await asyncio.to_thread(failpoint.await_hits, [*stalls][-1], count=1, timeout_s=SOON_S)
        arena.apply(Plan(segments=[segment(2, replaces=1)]))
        await preparing
    finally:
        failpoint.disarm()
    await takes_all_places(arena, directory)


async def takes_all_places(arena: Arena, directory: Path) -> None:
    """Segment 2 holds the first of four places: three more segments get a file each, a fifth none."""
    rest = [segment(number, place=number - 2) for number in (2, 3, 4, 5)]
    arena.apply(Plan(segments=rest[1:]))
    await arena.prepare(rest)
    assert {path.name for path in arena_path(directory).glob("*.data")} == {f"{n}.data" for n in (2, 3, 4, 5)}
    arena.apply(Plan(segments=[segment(6, place=4)]))
    with pytest.raises(TierFailed, match="every file of the tier is in use"):
        await arena.prepare([segment(6, place=4)])
    await arena.close(release=True)


async def test_position_in_the_tier_list_may_change(directory: Path) -> None:
    """Segments belong to the tier by name: a tier placed before it changes only their position."""
    arena, _ = await opened(directory, SPEC, segment(1))
    put(arena, page(1))
    await arena.close(release=False)
    moved = Arena(SPEC, position=3, instance="t", arena_dir=str(directory))
    found = await moved.open()
    assert found.extents["tier"].tolist() == [3] and found.segments[0].tier == 3
    assert read_head((arena_path(directory) / "1.cat").read_bytes(), name="").assignment.tier == 3
    await moved.close(release=True)


# -- failures


@contextmanager
def file_size_limit(count: int) -> Iterator[None]:
    """Allocating beyond this many bytes of a file fails, as on a full file system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_segment_that_cannot_be_allocated_fails_in_prepare(directory: Path) -> None:
    """Without room for a fresh file, prepare names segment and reason; a later try with room succeeds."""
    arena, _ = await opened(directory, SPEC, *[segment(n + 1, n) for n in range(4)])
    successor = segment(9, replaces=1, fresh=True)
    with file_size_limit(MIB // 2):
        arena.apply(Plan(segments=[successor], reserved=page(9)))
        with pytest.raises(TierFailed, match=r"segment 9 cannot be allocated.*File too large"):
            await arena.prepare([successor])
    with pytest.raises(TierFailed, match="no memory"):
        arena.view(page(9)[0])
    put(arena, page(2, generation=5))
    await arena.prepare([successor])
    put(arena, page(9, generation=6))
    assert len(list(arena_path(directory).glob("*.data"))) == 4, "nothing is left of the attempt"
    await arena.close(release=True)


async def test_capacity_beyond_the_file_system_is_refused(directory: Path) -> None:
    """An arena larger than the free memory is refused with both sizes and the remedy; its lock is free."""
    huge = replace(SPEC, capacity_bytes=1 << 50)
    with pytest.raises(
        ConfigError, match=r"host\.0\.capacity: 1,073,741,824 MiB needs .* are free; lower the capacity"
    ):
        await opened(directory, huge)
    arena, _ = await opened(directory)
    await arena.close(release=True)


async def test_capacity_below_one_segment_is_refused(directory: Path) -> None:
    """A tier without a single segment is a configuration error."""
    with pytest.raises(ConfigError, match="hold no segment"):
        await opened(directory, replace(SPEC, capacity_bytes=MIB - 1))


# -- purge


async def test_purge_refuses_an_arena_in_use_and_frees_an_orphan(directory: Path) -> None:
    """An owned arena is listed with its owner and refuses a purge. An orphan is listed without, and
    a purge removes all its files."""
    arena, _ = await opened(directory, SPEC, segment(1))
    (arena_path(directory).parent / "sessions.tbl").write_bytes(b"x")
    (here,) = [a for a in list_arenas([str(directory)]) if a.data == arena_path(directory)]
    assert (here.instance, here.tier, here.owner) == ("t", "host.0", os.getpid()) and here.bytes >= MIB
    with pytest.raises(AlreadyOwned, match=str(os.getpid())):
        purge("t", arena_dirs=[str(directory)])
    put(arena, page(1))
    await arena.close(release=False)
    (orphan,) = [a for a in list_arenas([str(directory)]) if a.data == arena_path(directory)]
    assert orphan.owner is None
    assert purge("t", arena_dirs=[str(directory)]) >= MIB
    assert not arena_path(directory).parent.exists() and purge("t", arena_dirs=[str(directory)]) == 0


async def test_header_of_an_arena_is_rewritten_whole(directory: Path) -> None:
    """The header on disk is, byte for byte, the output of `pack_head` for the assignment."""
    arena, _ = await opened(directory, SPEC, segment(1, fresh=True))
    raw = (arena_path(directory) / "1.cat").read_bytes()
    assert raw[:128] == pack_head(read_head(raw, name="")) and not any(raw[128:4096])
    await arena.close(release=True)
