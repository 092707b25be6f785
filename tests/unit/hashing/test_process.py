"""The hash process: the sums of `slice_sums`, in the order in which they were asked for, and nothing of memory that is not there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.maps import maps_of
from tests.still import stand_still
from tierd.core.block import slice_cut, slice_lengths
from tierd.hashing import wire
from tierd.hashing.process import PAGE, HashProcess
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
    return wire.Page(segment, offset, 0, *slice_cut(length, layers))


def pages_of(*pages: wire.Page) -> np.ndarray:
    return np.array([tuple(page) for page in pages], PAGE)


async def test_sums_are_those_of_the_daemon() -> None:
    """Whatever the lengths and layers of blocks, and wherever they lie, each table is what `slice_sums` makes of the same bytes."""
    (data, descriptor), came = memory(), list[bytes | None]()
    async with begun() as process:
        pages = [page(length, layers, offset=LENGTH - length) for length, layers in BLOCKS]
        for at in range(len(pages)):
            assert process.hash(pages_of(pages[at]), lambda _: (os.dup(descriptor), LENGTH), came.extend)
        assert process.hash(pages_of(*pages), lambda _: (os.dup(descriptor), LENGTH), came.extend)
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
        assert process.hash(pages_of(*both), lambda segment: (os.dup(files[segment]), LENGTH), came.extend)
        await until(lambda: len(came) == 2)
        assert not process.hash(
            pages_of(page(4096, 1, segment=9)), lambda segment: (files[segment], LENGTH), came.extend
        )
    for fd in files.values():
        os.close(fd)
    assert came == [None, slice_sums(data[:4096], [4096]).tobytes()]


async def test_one_that_is_behind_lets_go_later() -> None:
    """A segment that ends while it takes no more messages is unmapped when it does, and costs neither the process nor a sum."""
    (data, descriptor), came = memory(), list[bytes | None]()
    async with begun() as process:
        pid = process.pid
        assert process.hash(pages_of(page(4096, 1)), lambda _: (os.dup(descriptor), LENGTH), came.extend)
        await until(lambda: came)
        stand_still(pid)
        assert process.hash(pages_of(page(LENGTH, 1)), lambda _: (os.dup(descriptor), LENGTH), came.extend)
        while process._send(wire.ask(0, b"")):
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
        assert (process.pid, process.hash(pages_of(page(1, 1)), lambda _: (0, 0), print)) == (0, False)
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
        assert process.hash(pages_of(page(4096, 1)), lambda _: (descriptor, LENGTH), came.extend)
        await until(lambda: len(came) == 1)


@given(
    number=st.integers(1, 2**64 - 1),
    tables=st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=40), min_size=1, max_size=60),
)
def test_an_answer_comes_back_as_it_was(number: int, tables: list[list[int]]) -> None:
    """Number and sums; it is never taken for the word that the process is ready."""
    message = wire.answer(number, tables)
    assert message != wire.READY
    assert wire.answered(message) == (number, [np.array(table, "<u8").tobytes() for table in tables])


def test_a_question_is_no_longer_than_is_read() -> None:
    """The most pages of one message come out of it as they went in."""
    pages = [page(1 << 20, 32, offset=i << 20) for i in range(wire.PAGES_MAX)]
    message = wire.ask(9, pages_of(*pages).tobytes(), where=wire.Word(3, 4, 5))
    assert len(message) <= wire.MESSAGE_BYTES
    assert wire.asked(message) == (9, (3, 4, 5), pages)


async def test_what_is_dropped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that nobody writes try nobody's patience; of those that are dropped the sums are nothing, at once, and the process does not look at them any more."""
    monkeypatch.setattr("tierd.hashing.process.PATIENCE_S", 0.05)
    (data, descriptor), came = memory(), list[bytes | None]()
    async with begun() as process:
        pid = process.pid
        number = process.hash(
            pages_of(page(4096, 1), page(4096, 1)),
            lambda _: (os.dup(descriptor), LENGTH),
            came.extend,
            where=wire.Word(SEGMENT, 0, 0),
        )
        others = list[bytes | None]()
        data[:8] = 0
        os.pwrite(descriptor, bytes(8), 0)
        assert process._patience is None
        process.drop(number)
        assert came == [None, None]
        assert process.hash(pages_of(page(4096, 1)), lambda _: (os.dup(descriptor), LENGTH), others.extend)
        await until(lambda: others)
        assert (process.pid, len(came)) == (pid, 2)
    os.close(descriptor)


BOARD = 1 << 63


def opener(descriptor: int) -> Callable[[int], tuple[int, int]]:
    """Of the pages' file, and of a board of its own."""
    board = os.memfd_create("board")
    os.ftruncate(board, 512)

    def opened(number: int) -> tuple[int, int]:
        return (os.dup(board), 512) if number == BOARD else (os.dup(descriptor), LENGTH)

    return opened


async def test_one_that_is_behind_with_what_nobody_wrote_lets_go_later() -> None:
    """A board that ends while the process takes no more messages, and owes nothing, is unmapped when it does; the process is not killed for being behind."""
    (_, descriptor), came = memory(), list[bytes | None]()
    opened = opener(descriptor)
    async with begun() as process:
        pid = process.pid
        number = process.hash(pages_of(page(4096, 1)), opened, came.extend, where=wire.Word(BOARD, 0, 0))
        await until(lambda: any("memfd:board" in line for line in maps_of(pid)))
        stand_still(pid)
        while process._send(wire.ask(0, b"")):
            pass
        process.drop(number)
        process.detach(BOARD)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: not any("memfd:board" in line for line in maps_of(pid)))
        assert process.hash(pages_of(page(4096, 1)), opened, came.extend)
        await until(lambda: len(came) == 2)
        assert (process.pid, came[0], came[1] is not None) == (pid, None, True)
    os.close(descriptor)


async def test_one_that_lets_go_of_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory has ended, and who does not take that for so long as patience lasts."""
    monkeypatch.setattr("tierd.hashing.process.PATIENCE_S", 0.1)
    (_, descriptor), came = memory(), list[bytes | None]()
    async with begun() as process:
        pid = process.pid
        assert process.hash(pages_of(page(4096, 1)), opener(descriptor), came.extend)
        await until(lambda: came)
        stand_still(pid)
        while process._send(wire.ask(0, b"")):
            pass
        process.detach(SEGMENT)
        await until(lambda: process.pid != pid)
    os.close(descriptor)


async def test_what_was_dropped_while_it_was_behind_is_not_hashed() -> None:
    """It hears of it when it takes messages again, and looks at those pages no more."""
    (_, descriptor), came, numbers = memory(), list[bytes | None](), list[int]()
    opened = opener(descriptor)
    async with begun() as process:
        inner = process._take
        process._take = lambda number, tables: (numbers.append(number), inner(number, tables))  # type: ignore[method-assign,assignment,func-returns-value]
        number = process.hash(pages_of(page(4096, 1)), opened, came.extend, where=wire.Word(BOARD, 0, 0))
        await until(lambda: any("memfd:board" in line for line in maps_of(process.pid)))
        stand_still(process.pid)
        while process._send(wire.ask(0, b"")):
            pass
        process.drop(number)
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: process._send(wire.ask(0, b"")))
        process.detach(BOARD)
        await until(lambda: not any("memfd:board" in line for line in maps_of(process.pid)))
        last = process.hash(pages_of(page(4096, 1)), opened, came.extend)
        await until(lambda: len(came) == 2)
        assert numbers == [last]
    os.close(descriptor)


async def test_small_messages_do_not_wait_for_large_ones() -> None:
    """However many have come while the process was at large ones: it takes all that are there before it goes on, and answers them first."""
    (_, descriptor), came = memory(), list[str]()
    opened = opener(descriptor)
    async with begun() as process:
        stand_still(process.pid)
        for _ in range(4):
            assert process.hash(
                pages_of(*[page(LENGTH, 1)] * 10), opened, lambda its: came.extend(["large"] * len(its))
            )
        for _ in range(100):
            assert process.hash(pages_of(page(4096, 1)), opened, lambda its: came.extend(["small"] * len(its)))
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: len(came) == 140)
    assert came == ["small"] * 100 + ["large"] * 40
    os.close(descriptor)
