"""A program that the arena's tests kill: it reserves, writes and publishes pages until it dies.

Not a test. `python arena_victim.py churn DIR` prints a line per step until it is killed.
`python arena_victim.py lines DIR STEP` runs one fixed scenario in a child per kill point. The child
of point n sends itself SIGKILL at the n-th line that the arena's modules execute; its arena is
DIR/n. Page contents follow from the generation, so a reader knows every right byte.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from tierd.checksum import slice_sums
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import EXTENT, FREED, SegmentAssignment, StructArray, TierKind, TierSpec
from tierd.core.plan import Plan
from tierd.tiers.arena.arena import Arena

SEGMENT_BYTES = 256 << 10
CLASS_BYTES = 16 << 10
PAGES = SEGMENT_BYTES // CLASS_BYTES
SLICES = [5_000, 5_000]
SPEC = TierSpec(TierKind.HOST, 0, 4 * SEGMENT_BYTES, SEGMENT_BYTES, writer_owned=True)
WATCHED = ("arena.py", "segments.py", "catalogue.py", "data_files.py", "marks.py")


def make_arena(directory: str) -> Arena:
    return Arena(SPEC, position=0, instance="t", arena_dir=directory)


def segment(number: int, *, place: int = 0, replaces: int | None = None, fresh: bool = False) -> SegmentAssignment:
    return SegmentAssignment(0, place, number, 1, CLASS_BYTES, PAGES, 7, replaces, fresh)


def pages(number: int, slots: list[int], generations: list[int]) -> StructArray:
    rows = np.zeros(len(slots), dtype=EXTENT)
    rows["segment"], rows["slot"], rows["generation"], rows["length"] = number, slots, generations, sum(SLICES)
    rows["offset"] = np.array(slots, dtype=np.uint64) * CLASS_BYTES
    return rows


def freed(extents: StructArray) -> StructArray:
    rows = np.zeros(len(extents), dtype=FREED)
    rows["extent"], rows["was_ready"] = extents, True
    return rows


def content(generation: int) -> bytes:
    return np.random.default_rng(generation).bytes(CLASS_BYTES)


def put(arena: Arena, extents: StructArray) -> None:
    """Writes and publishes pages."""
    tables = []
    for row in extents:
        view = arena.view(row)
        view[:] = content(int(row["generation"]))
        tables.append(slice_sums(view, SLICES))
    metas = new_meta(len(extents))
    metas["stored_length"], metas["time_ms"] = sum(SLICES), 1
    arena.publish(extents, metas, tables)


async def churn(directory: str) -> None:
    """Prints "+generation" after a page is published and "-generation" before it is freed."""
    arena = make_arena(directory)
    await arena.open()
    arena.apply(Plan(segments=[segment(1)]))
    await arena.prepare([segment(1)])
    held: StructArray | None = None
    for turn in range(1_000_000):
        slots = [(turn * 3 + i) % PAGES for i in range(3)]
        new = pages(1, slots, [turn * 3 + i + 1 for i in range(3)])
        old = held[np.isin(held["slot"], slots)] if held is not None else new[:0]
        say([f"-{g}" for g in old["generation"].tolist()])
        arena.apply(Plan(freed=freed(old), reserved=new))
        put(arena, new)
        say([f"+{g}" for g in new["generation"].tolist()])
        held = new if held is None else np.concatenate([held[~np.isin(held["slot"], slots)], new])


def say(lines: list[str]) -> None:
    if lines:
        os.write(1, ("\n".join(lines) + "\n").encode())


async def scenario(directory: str, watch: Callable[[], None]) -> None:
    """Reuses pages, then a whole segment, once with its file and once with a fresh one."""
    arena = make_arena(directory)
    await arena.open()
    arena.apply(Plan(segments=[segment(1)], reserved=pages(1, [0, 1, 2, 3], [1, 2, 3, 4])))
    await arena.prepare([segment(1)])
    put(arena, pages(1, [0, 1, 2, 3], [1, 2, 3, 4]))
    watch()
    second = pages(1, [0, 1], [11, 12])
    arena.apply(Plan(freed=freed(pages(1, [0, 1], [1, 2])), reserved=second))
    put(arena, second)
    for number, fresh in ((2, False), (3, True)):
        new = pages(number, [0, 3], [number * 10, number * 10 + 1])
        begin = segment(number, replaces=number - 1, fresh=fresh)
        arena.apply(Plan(segments=[begin], reserved=new))
        await arena.prepare([begin])
        put(arena, new)
    await arena.close(release=False)


def die_at(line: int) -> None:
    """Sends SIGKILL to this process at the given line, counted over the watched modules."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    import threading

    threading.settrace(trace)  # `prepare` works in a thread
    sys.settrace(trace)


def run_lines(directory: str, step: int) -> None:
    """Runs children with kill points 1, 1 + step, ... until one ends by itself; prints the number killed."""
    killed, point, status = 0, 1, signal.SIGKILL
    while status == signal.SIGKILL:
        here = os.path.join(directory, str(point))
        os.mkdir(here, 0o700)
        child = os.fork()
        if not child:
            asyncio.run(scenario(here, lambda point=point: die_at(point)))  # type: ignore[misc]
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed += status == signal.SIGKILL
        point += step
    print(killed if status == 0 else f"child failed: {status}")


if __name__ == "__main__":
    if sys.argv[1] == "churn":
        asyncio.run(churn(sys.argv[2]))
    else:
        run_lines(sys.argv[2], int(sys.argv[3]))
