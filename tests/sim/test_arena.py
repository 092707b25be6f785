"""Simulated memory records mappings as a machine would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.sim.arena import STORE, DataFile, Memory, SimArena, Watch
from tierd.core.formats.model import SegmentAssignment, TierKind, TierSpec
from tierd.tiers.arena.catalogue import Catalogue, CatalogueHead

SEGMENT_BYTES, CLASS_BYTES, LIVES, ENDS = 1 << 16, 4096, 11, 12


def filled() -> tuple[Memory, SimArena]:
    """Memory of one segment that both sessions map, and a daemon over it."""
    assignment = SegmentAssignment(0, 0, 1, 1, CLASS_BYTES, SEGMENT_BYTES // CLASS_BYTES, ENDS, None, fresh=False)
    head = CatalogueHead(store=STORE, segment_bytes=SEGMENT_BYTES, assignment=assignment)
    table = memoryview(bytearray(head.layout.total_bytes))
    Catalogue(table, head=head).write_head(head)
    memory = Memory({1: table}, {1: DataFile(memoryview(bytearray(SEGMENT_BYTES)))})
    spec = TierSpec(TierKind.HOST, 0, SEGMENT_BYTES, SEGMENT_BYTES)
    arena = SimArena(spec, position=0, memory=memory, watch=Watch(pytest.fail, lambda _plan: None, lambda: False))
    asyncio.run(arena.open())
    for session in (LIVES, ENDS):
        arena.map(1, session=session)
    return memory, arena


@pytest.mark.parametrize(
    "late",
    [lambda _back, arena: arena.map(1, session=ENDS), lambda back, _arena: back()],
    ids=["what the daemon still sends it", "what is put back after the daemon's own end"],
)
def test_a_process_that_has_ended_maps_nothing(late: Callable[[Callable[[], None], SimArena], object]) -> None:
    """An ended process maps no segment again, by a late descriptor or by a restored state of
    memory."""
    memory, arena = filled()
    assert memory.data[1].maps == {LIVES: False, ENDS: True}
    back = memory.photograph()
    memory.forget(ENDS)
    late(back, arena)
    assert memory.data[1].maps == {LIVES: False}
