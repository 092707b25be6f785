"""The copy of a put: right bytes, right sums, by one thread or two."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from tierd.client import copying
from tierd.core.block import slice_lengths
from tierd.tiers.checksum import raw_tables, slice_sums

MIB = 1 << 20


def blocks(count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    """Of random bytes."""
    return list(np.random.default_rng(seed).integers(0, 256, (count, length), dtype=np.uint8))


def tables(sources: list[np.ndarray], layers: int) -> list[bytes]:
    """As the daemon sums them."""
    return raw_tables([slice_sums(source, slice_lengths(len(source), layers)) for source in sources])


def copied(targets: list[np.ndarray | None], sources: list[np.ndarray], layers: int = 0) -> list[bytes]:
    """Of blocks of one namespace."""
    return copying.sum_and_copy(targets, [*map(copying.piece_of, sources)], layers=[layers] * len(sources))


@pytest.mark.parametrize("layers", [0, 1, 4, 7])
@pytest.mark.parametrize(
    ("count", "length"), [(1, 1), (3, 4096), (2, MIB), (5, 3 * MIB // 2), (16, 300_000), (4, 28 * 4096)]
)
def test_bytes_and_sums_are_right(count: int, length: int, layers: int) -> None:
    """Each target has its source's bytes, and the sums are those that the daemon would make of it: of small blocks and long ones, of any number of layers."""
    sources = blocks(count, length)
    targets: list[np.ndarray | None] = [np.zeros(length, np.uint8) for _ in range(count)]
    assert copied(targets, sources, layers) == tables(sources, layers)
    assert all(np.array_equal(target, source) for target, source in zip(targets, sources, strict=True))  # type: ignore[arg-type]


def test_a_source_without_a_target_is_passed_over() -> None:
    """What is not to be stored has no sum either."""
    sources, target = blocks(3, 4096), np.zeros(4096, np.uint8)
    assert copied([None, target, None], sources) == [b"", *tables(sources[1:2], 0), b""]
    assert np.array_equal(target, sources[1])
    assert copied([None] * 3, sources) == [b""] * 3


def test_long_copies_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long copy is made by two threads; one that finds the other thread at work, or is short, by its own alone."""
    seen, inner = set[str](), copying._summed

    def summed(source: memoryview, layers: int) -> bytes:
        seen.add(threading.current_thread().name)
        return inner(source, layers)

    monkeypatch.setattr(copying, "_summed", summed)
    monkeypatch.setattr(copying._SECOND_THREAD, "_is_of_use", True)
    sources, mine = blocks(8, copying.HELPED_BYTES // 8), threading.current_thread().name

    def copy(count: int) -> list[bool]:
        seen.clear()
        targets: list[np.ndarray | None] = [np.zeros(len(source), np.uint8) for source in sources[:count]]
        assert copied(targets, sources[:count]) == tables(sources[:count], 0)
        return [mine in seen, len(seen) == 2]

    assert copy(8) == [True, True]
    assert copy(7) == [True, False]
    with copying._SECOND_THREAD._turn:
        assert copy(8) == [True, False]
    assert copy(8) == [True, True]


@pytest.mark.parametrize("at", [1, 6], ids=["its own part", "the other's"])
def test_a_target_of_another_length_fails_the_copy(at: int) -> None:
    """In whichever thread: ValueError, when neither copies any more."""
    sources = blocks(8, MIB)
    targets: list[np.ndarray | None] = [np.zeros(MIB - (row == at), np.uint8) for row in range(8)]
    with pytest.raises(ValueError, match=f"copy {at}: {MIB} bytes into {MIB - 1}"):
        copied(targets, sources)
    assert not copying._SECOND_THREAD._turn.locked()


def test_a_child_copies_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child has a second thread of its own, also where its parent's was at work."""
    monkeypatch.setattr(copying._SECOND_THREAD, "_is_of_use", True)
    sources = blocks(8, MIB)

    def is_right() -> bool:
        targets: list[np.ndarray | None] = [np.zeros(MIB, np.uint8) for _ in sources]
        return copied(targets, sources) == tables(sources, 0)

    assert is_right()
    with copying._SECOND_THREAD._turn:
        assert _in_child(is_right)


def _in_child(work: Callable[[], bool]) -> bool:
    pid = os.fork()
    if not pid:
        os._exit(not work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
