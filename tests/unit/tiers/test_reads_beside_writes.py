"""Reads are served while writes hang, at any point of their way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.tiers.store_world import READY, World, content
from tierd.tiers.store import slots
from tierd.tiers.store.buffered import BufferedIO
from tierd.tiers.store.moves import Batch, WriteRun

SOON_S, LONG_S = 10.0, 30.0


class Gate:
    """Holds up threads from `shut` on. entered: a thread has arrived since."""

    def __init__(self) -> None:
        self._open, self.entered = threading.Event(), threading.Event()
        self._open.set()

    def shut(self) -> None:
        """From now on all threads wait."""
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        """All threads go on."""
        self._open.set()

    def wait(self) -> None:
        """Waits in the calling thread."""
        self.entered.set()
        assert self._open.wait(LONG_S)


@pytest.fixture
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate for writes while they are hashed, at the disk, or in the page cache."""
    gate, hashed, write_at, buffered = Gate(), WriteRun._hashed, slots.write_at, BufferedIO._write

    def hash_late(job: WriteRun, rows: Sequence[int]) -> list[int]:
        gate.wait()
        return hashed(job, rows)

    def write_late(*given: object) -> None:
        gate.wait()
        write_at(*given)  # type: ignore[arg-type]

    async def buffer_late(its: BufferedIO, *given: object) -> None:
        await asyncio.get_running_loop().run_in_executor(its._threads, gate.wait)
        await buffered(its, *given)  # type: ignore[arg-type]

    late = {"hashed": (WriteRun, "_hashed", hash_late), "on": (slots, "write_at", write_late)}
    late["off"] = (BufferedIO, "_write", buffer_late)
    monkeypatch.setattr(*late[request.param])
    return gate


@pytest.mark.parametrize(("direct", "gate"), [("on", "hashed"), ("on", "on"), ("off", "off")], indirect=["gate"])
async def test_a_read_waits_for_no_writes(tmp_path: Path, gate: Gate, direct: str) -> None:
    """With all possible writes held up and others queued, a read is done, hashed and served at once."""
    made = World.at(tmp_path / "store", queue_depth=1, direct=direct)
    made.knows = False  # so that a write is hashed before it goes out
    await made.open()
    await made.begin(1)
    assert await made.write([1], segment=1, slots=[0]) == [READY]
    gate.shut()
    writes = [asyncio.create_task(made.write([key], segment=1, slots=[key])) for key in range(2, 7)]
    assert await asyncio.to_thread(gate.entered.wait, SOON_S)
    assert await asyncio.wait_for(made.read([1]), SOON_S) == [content(1)]
    gate.open()
    assert await asyncio.gather(*writes) == [[READY]] * 5
    await made.store.close(release=False)


@pytest.mark.parametrize("gate", ["on"], indirect=True)
async def test_writes_are_ready_for_a_disk_that_ends_many_at_one_time(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk holds all the writes that it may, eight more are hashed and wait for it."""
    hashed, ready, inner = list[Batch](), threading.Event(), Batch.stamp

    def stamped(batch: Batch, rows: Sequence[int]) -> None:
        inner(batch, rows)
        hashed.append(batch)
        if len(hashed) == 1 + 8:
            ready.set()

    monkeypatch.setattr(Batch, "stamp", stamped)
    made = World.at(tmp_path / "store", queue_depth=1, direct="on")
    made.knows = False
    await made.open()
    await made.begin(1)
    await made.begin(2, place=1)
    gate.shut()
    writes = [asyncio.create_task(made.write([key], segment=1 + key // 6, slots=[key % 6])) for key in range(12)]
    try:
        assert await asyncio.to_thread(ready.wait, SOON_S)
    finally:
        gate.open()
    assert await asyncio.gather(*writes) == [[READY]] * 12
    await made.store.close(release=False)
