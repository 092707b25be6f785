"""Copies: right bytes and right sums, by one thread or two, by the library or without it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compiled import NEEDS_LIBRARY, check_library
from tierd import native
from tierd.checksum import raw_tables, slice_sums
from tierd.client.blocks import copying
from tierd.client.connect.cancellation import Cancellation, Cancelled
from tierd.core.formats.block import slice_lengths
from tierd.errors import InvalidArgument
from tierd.native import find_library

MIB = 1 << 20
GUARD = 64


@pytest.fixture(params=["library", "plain"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both forms, if the library is built."""
    if request.param == "plain":
        monkeypatch.setattr(copying, "_library", None)
    else:
        check_library()
    return str(request.param)


def sources(count: int, length: int, seed: int = 0) -> np.ndarray:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, (count, length), dtype=np.uint8)


def copied(targets: np.ndarray, given: np.ndarray, layers: int = 0) -> list[bytes]:
    """Copies row by row; returns the sums of each row."""
    blocks = copying.blocks_of(rows(given), rows(targets), [given.shape[1]] * len(given), layers)
    sums = copying.sum_and_copy(blocks)
    return [part.tobytes() for part in np.split(sums, len(given))]


def rows(array: np.ndarray) -> np.ndarray:
    """The address of each row."""
    return np.uint64(array.ctypes.data) + np.arange(len(array), dtype=np.uint64) * np.uint64(array.strides[0])


def tables(given: np.ndarray, layers: int = 0) -> list[bytes]:
    """The sums of each row as the daemon computes them."""
    return raw_tables([slice_sums(row, slice_lengths(len(row), layers)) for row in given])


@pytest.mark.parametrize("layers", [0, 1, 4, 7, 480, (1 << 32) - 1])
@pytest.mark.parametrize(
    ("count", "length"),
    [(1, 1), (3, 4096), (2, MIB), (5, 3 * MIB // 2), (16, 300_000), (4, 28 * 4096), (1, 480 * 4096)],
)
def test_bytes_and_sums_are_right(count: int, length: int, layers: int) -> None:
    """Each target has its source's bytes and the daemon's sums, for all block sizes and layer counts."""
    given = sources(count, length)
    targets = np.zeros_like(given)
    assert copied(targets, given, layers) == tables(given, layers)
    assert (targets == given).all()


@given(
    length=st.one_of(st.integers(0, 1300), st.integers(1300, 70_000)),
    offsets=st.tuples(st.integers(0, 64), st.integers(0, 64)),
    layers=st.integers(0, 9),
)
def test_whatever_the_length_and_the_address(length: int, offsets: tuple[int, int], layers: int) -> None:
    """Every length and alignment gives right bytes and sums, and no byte beside the target is written."""
    source = sources(1, length + offsets[0], seed=length)[0][offsets[0] :]
    target = np.full(offsets[1] + length + GUARD, 7, np.uint8)
    blocks = copying.blocks_of([source.ctypes.data], [target.ctypes.data + offsets[1]], [length], layers)
    assert copying.sum_and_copy(blocks).tobytes() == tables(source[None], layers)[0]
    assert (target[offsets[1] : offsets[1] + length] == source).all()
    assert (target[: offsets[1]] == 7).all() and (target[offsets[1] + length :] == 7).all()


@pytest.mark.parametrize("sizes", [[4096] * 3, [8192, 4096], [12288]])
def test_blocks_in_pieces(sizes: list[int]) -> None:
    """Pieces that hold whole layers get a block's bytes and its sums; others are refused."""
    given, pieces = sources(2, 12288), [[np.zeros(size, np.uint8) for size in sizes] for _ in range(2)]
    blocks = copying.blocks_of(rows(given), [0] * 2, [12288] * 2, 3)
    if sizes != [4096] * 3:
        with pytest.raises(InvalidArgument, match=r"buffer 0: pieces of .* for a block of 12288 in 3 layers; pass"):
            copying.in_pieces(blocks, pieces)
        return
    sums = copying.sum_and_copy(copying.in_pieces(blocks, pieces))
    assert [part.tobytes() for part in np.split(sums, 2)] == tables(given, 3)
    assert [np.concatenate(its).tobytes() for its in pieces] == [row.tobytes() for row in given]


def test_what_has_no_target_is_summed() -> None:
    """A block without a target is summed, and no byte is written."""
    given = sources(3, 5000)
    blocks = copying.blocks_of(rows(given), [0] * 3, [5000] * 3, 0)
    assert copying.sum_and_copy(blocks).tobytes() == b"".join(tables(given))
    assert len(copying.sum_and_copy(blocks[:0])) == 0


def test_long_copies_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads share a long copy; it runs alone if it is short or that thread is busy."""
    seen, inner = set[str](), copying._do

    def do(*part: Any) -> None:
        seen.add(threading.current_thread().name)
        inner(*part)

    monkeypatch.setattr(copying, "_do", do)
    monkeypatch.setattr(copying._SECOND_THREAD, "_is_of_use", True)
    given, mine = sources(8, copying.HELPED_BYTES // 8), threading.current_thread().name

    def copy(count: int) -> list[bool]:
        seen.clear()
        targets = np.zeros_like(given[:count])
        assert copied(targets, given[:count]) == tables(given[:count])
        assert (targets == given[:count]).all()
        return [mine in seen, len(seen) == 2]

    assert copy(8) == [True, True]
    assert copy(7) == [True, False]
    with copying._SECOND_THREAD._turn:
        assert copy(8) == [True, False]
    assert copy(8) == [True, True]


def test_a_copy_that_gets_no_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can start, the copy runs alone, and a later thread does not repeat it."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying._SECOND_THREAD, "_is_of_use", True)
    monkeypatch.setattr(copying._SECOND_THREAD, "_pool", None)
    given = sources(8, copying.HELPED_BYTES // 8)
    targets, others = np.zeros_like(given), np.zeros_like(given)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert copied(targets, given) == tables(given)
    assert (targets == given).all()
    targets[:] = 0
    assert copied(others, given) == tables(given)
    assert not targets.any()


@pytest.mark.parametrize("length", [4096, copying.HELPED_BYTES], ids=["alone", "with a second thread"])
def test_a_copy_that_is_stopped_goes_no_further(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped copy ends with its current block, and no thread copies after the stop."""
    stop, inner = Cancellation(), copying._do

    def do(blocks: np.ndarray, sums: np.ndarray, is_over: np.ndarray) -> None:
        inner(blocks[:1], sums, is_over)
        stop.set()
        inner(blocks[1:], sums, is_over)

    monkeypatch.setattr(copying, "_do", do)
    targets, given = np.zeros((8, length), np.uint8), np.ones((8, length), np.uint8)
    with pytest.raises(Cancelled):
        stop.around(lambda: copied(targets, given))
    assert 1 <= targets[:, 0].sum() <= 2
    assert not copying._SECOND_THREAD._turn.locked()


def test_a_copy_does_not_begin_for_nobody() -> None:
    """A put whose caller cancels while the commit is sent copies nothing."""
    stop, targets = Cancellation(), np.zeros((1, 4096), np.uint8)

    def verb() -> None:
        stop.set()
        copied(targets, np.ones_like(targets))

    with pytest.raises(Cancelled):
        stop.around(verb)
    assert not targets.any()


def test_a_child_copies_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child has its own second thread, even if its parent's was busy."""
    monkeypatch.setattr(copying._SECOND_THREAD, "_is_of_use", True)
    given = sources(8, MIB)

    def is_right() -> bool:
        targets = np.zeros_like(given)
        return copied(targets, given) == tables(given) and bool((targets == given).all())

    assert is_right()
    with copying._SECOND_THREAD._turn:
        assert _in_child(is_right)


@NEEDS_LIBRARY
def test_a_library_of_another_source_is_not_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not match its source is ignored, and so is a file that is not a library."""
    assert find_library() is not None
    changed = tmp_path / "plane.cpp"
    changed.write_bytes(native.sources_of("plane")[0].read_bytes() + b"\n")
    monkeypatch.setattr(native.sources_of, "__defaults__", (tmp_path,))
    assert find_library() is None
    monkeypatch.undo()
    (tmp_path / "plane.so").write_bytes(b"none")
    monkeypatch.setattr(native, "LIBRARIES", tmp_path)
    assert find_library() is None


def _in_child(work: Callable[[], bool]) -> bool:
    pid = os.fork()
    if not pid:
        os._exit(not work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
