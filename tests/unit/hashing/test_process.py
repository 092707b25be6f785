"""The hash process: the sums of `slice_sums`, in the order in which they were asked for, and nothing of memory that is not there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.maps import maps_of
from tests.still import stand_still
from tierd.core.block import slice_cut, slice_lengths
from tierd.core.layout import SLICE_WORDS_MAX
from tierd.hashing import wire
from tierd.hashing.process import HashProcess
from tierd.tiers.checksum import slice_sums

SOON_S = 10.0
"""The bound of every wait, never of a measurement."""
LENGTH = 3 << 20
SEGMENT = 7
BLOCKS = [(4096, 1), (1, 1), (300_000, 1), (1 << 20, 32), (1 << 20, 3), (LENGTH, 1), (12_288, 300)]
"""Length, layers."""


@contextlib.asynccontextmanager
async def begun() -> AsyncIterator[HashProcess]:
    """One that is ready."""
    process = HashProcess()
    process.start()
    try:
        await until(lambda: process.is_ready)
        yield process
    finally:
        await process.stop()


async def until(is_so: object) -> None:
    assert callable(is_so)
    async with asyncio.timeout(SOON_S):
        while not is_so():  # noqa: ASYNC110  # some of it rings no bell
            await asyncio.sleep(0.001)


def memory() -> tuple[np.ndarray, int]:
    """Some bytes, and a descriptor of them."""
    data = np.random.default_rng(3).integers(0, 256, LENGTH, dtype=np.uint8)
    descriptor = os.memfd_create("pages")
    os.write(descriptor, data.tobytes())
    return data, descriptor


def page(length: int, layers: int, *, offset: int = 0, segment: int = SEGMENT) -> wire.Page:
    return wire.Page(segment, offset, *slice_cut(length, layers))


async def test_sums_are_those_of_the_daemon() -> None:
    """Whatever the lengths and layers of blocks, and wherever they lie, each table is what `slice_sums` makes of the same bytes."""
    (data, descriptor), came = memory(), list[bytes | None]()
    async with begun() as process:
        pages = [page(length, layers, offset=LENGTH - length) for length, layers in BLOCKS]
        for at in range(len(pages)):
            assert process.hash(pages[at : at + 1], lambda _: (os.dup(descriptor), LENGTH), came.append)
        assert process.hash(pages, lambda _: (os.dup(descriptor), LENGTH), came.append)
        await until(lambda: len(came) == 2 * len(pages))
    os.close(descriptor)
    want = [slice_sums(data[LENGTH - n :], slice_lengths(n, layers)).tobytes() for n, layers in BLOCKS]
    assert came == want + want


async def test_memory_that_is_not_there_has_no_sums() -> None:
    """Of a segment whose file cannot be mapped the table is empty, and the others come."""
    (data, descriptor), came = memory(), list[bytes | None]()
    nowhere = os.open("/proc/self/stat", os.O_RDONLY)
    async with begun() as process:
        files = {SEGMENT: descriptor, 8: nowhere}
        both = [page(4096, 1, segment=8), page(4096, 1)]
        assert process.hash(both, lambda segment: (os.dup(files[segment]), LENGTH), came.append)
        await until(lambda: len(came) == 2)
        assert not process.hash([page(4096, 1, segment=9)], lambda segment: (files[segment], LENGTH), came.append)
    for fd in files.values():
        os.close(fd)
    assert came == [None, slice_sums(data[:4096], [4096]).tobytes()]


async def test_one_that_is_behind_lets_go_later() -> None:
    """A segment that ends while it takes no more messages is unmapped when it does, and costs neither the process nor a sum."""
    (data, descriptor), came = memory(), list[bytes | None]()
    async with begun() as process:
        pid = process.pid
        assert process.hash([page(4096, 1)], lambda _: (os.dup(descriptor), LENGTH), came.append)
        await until(lambda: came)
        stand_still(pid)
        assert process.hash([page(LENGTH, 1)], lambda _: (os.dup(descriptor), LENGTH), came.append)
        while process._send(wire.ask(0, [])):
            pass
        process.detach(SEGMENT)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: len(came) == 2)
        await until(lambda: not any("memfd:pages" in line for line in maps_of(pid)))
        assert (process.pid, came[1]) == (pid, slice_sums(data, slice_lengths(LENGTH, 1)).tobytes())
    os.close(descriptor)


async def test_one_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes to be had nothing is hashed, nothing waits, and later there is one."""
    monkeypatch.setattr("tierd.hashing.process.PAUSE_S", 0.01)
    process = HashProcess()
    process._pause_s = 0.01
    with monkeypatch.context() as broken:

        def refuse(*_: object, **__: object) -> None:
            raise BlockingIOError("no process")

        broken.setattr("tierd.children.subprocess.Popen", refuse)
        process.start()
        assert (process.pid, process.hash([page(1, 1)], lambda _: (0, 0), print)) == (0, False)
    await until(lambda: process.is_ready)
    await process.stop()


async def test_one_whose_priority_stays_serves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that refuses `nice`, as that of the unit in deploy/ does (~@resources), costs no sums."""
    refusing = "import os\ndef nice(_):\n    raise PermissionError(1, 'refused')\nos.nice = nice\n"
    (tmp_path / "sitecustomize.py").write_text(refusing)
    monkeypatch.syspath_prepend(tmp_path)
    async with begun() as process:
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)


async def test_signals_for_all_of_a_daemon_are_the_daemons_to_answer() -> None:
    """What a terminal or a supervisor sends does not end the process."""
    came = list[bytes | None]()
    async with begun() as process:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(process.pid, number)
        (_, descriptor) = memory()
        assert process.hash([page(4096, 1)], lambda _: (descriptor, LENGTH), came.append)
        await until(lambda: len(came) == 1)


TABLES = st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=40) | st.just([1] * SLICE_WORDS_MAX), max_size=60)


@given(job=st.integers(1, 2**64 - 1), tables=TABLES)
def test_answers_come_back_as_they_were(job: int, tables: list[list[int]]) -> None:
    """However many sums there are, they arrive in order, in messages that a reader takes whole."""
    messages = list(wire.answers(job, iter(tables)))
    assert all(len(message) <= wire.ANSWER_BYTES and message != wire.READY for message in messages)
    came = [table for message in messages for table in wire.answered(message)[1]]
    assert came == [np.array(table, "<u8").tobytes() for table in tables]
    assert {wire.answered(message)[0] for message in messages} <= {job}


def test_a_question_is_no_longer_than_is_read() -> None:
    """The most pages of one message come out of it as they went in."""
    pages = [page(1 << 20, 32, offset=i << 20) for i in range(wire.PAGES_MAX)]
    message = wire.ask(9, pages)
    assert len(message) <= wire.MESSAGE_BYTES
    job, came = wire.asked(message)
    assert (job, list(came)) == (9, pages)
