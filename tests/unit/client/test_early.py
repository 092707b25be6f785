"""What of an early copy counts, and what is remembered for one."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierd.client import Group, NamespaceSpec
from tierd.client.early import HANDLES_LIMIT, SEQUENCES_LIMIT, EarlyCopy, Known
from tierd.client.values import Need, OpenedNamespace
from tierd.core.model import HANDLE
from tierd.testing import chain

NOTES = 10_000


def handles(count: int) -> np.ndarray:
    """Some, each unlike the others."""
    made = np.zeros(count, HANDLE)
    made["generation"], made["slot"], made["length"] = np.arange(1, count + 1), np.arange(count), 4096
    return made


def copied(known: np.ndarray, out: Any = None) -> EarlyCopy:
    """An early copy that was made."""
    early = fresh(known, out)
    early.handles = known
    return early


def fresh(known: np.ndarray, out: Any = None) -> EarlyCopy:
    """An early copy that is still to be made."""
    return EarlyCopy(SimpleNamespace(), group(1), out, known=known, deadline=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", HANDLE.names)
def test_a_block_elsewhere_is_not_covered(field: str) -> None:
    """Whatever of a handle has changed, its block and those behind it are copied again."""
    known, answer = handles(5), handles(5)
    assert copied(known).covers(answer) == 5
    answer[field][3] += 1
    assert copied(known).covers(answer) == 3


def test_more_and_less_than_is_known() -> None:
    """A shorter answer is covered whole, of a longer one what is known; before the copy nothing is."""
    known = handles(5)
    assert copied(known).covers(known[:2]) == 2
    assert copied(known[:2]).covers(known) == 2
    assert fresh(known).covers(known) == 0
    assert copied(known).covers(known[:0]) == 0


def test_a_buffer_that_is_there_twice() -> None:
    """Where blocks share a buffer the last one of the answer stands in it: of many buffers a shorter answer is copied again."""
    known, buffer = handles(3), bytearray(4096)
    assert copied(known, [buffer, bytearray(4096), buffer]).covers(known[:2]) == 0
    assert copied(known, [buffer] * 3).covers(known) == 3
    assert copied(known, bytearray(3 * 4096)).covers(known[:2]) == 2


def group(number: int, count: int = 4, **changed: Any) -> Group:
    """A question about a sequence."""
    space = OpenedNamespace(NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096))
    return Group(space, chain(number, count), **changed)


def test_whole_sequences_are_remembered() -> None:
    """Only what was given whole, as a prefix, for the same ranks and namespace; what was given last counts."""
    known = Known()
    known.note(group(1), handles(3))
    assert known.find(group(1)) is None
    known.note(group(1), handles(4))
    newer = handles(4)
    newer["generation"] += 10
    known.note(group(1), newer)
    assert known.find(group(1)) is newer
    for other in (group(2), group(1, ranks=(1,)), group(1, 3), group(1, need=Need.LAST_TOKENS, need_tokens=16)):
        assert known.find(other) is None
    moved = group(1)
    moved.namespace.id = 9
    assert known.find(moved) is None


def test_what_is_remembered_is_bounded() -> None:
    """So many sequences, and so many handles in all."""
    known = Known()
    for number in range(SEQUENCES_LIMIT + 5):
        known.note(group(number, 1), handles(1))
    assert len(known._handles) == SEQUENCES_LIMIT
    assert known.find(group(0, 1)) is None and known.find(group(SEQUENCES_LIMIT, 1)) is not None
    each = HANDLES_LIMIT // 4
    for number in range(6):
        known.note(group(number, each), handles(each))
    assert known._count <= HANDLES_LIMIT and known.find(group(5, each)) is not None


def test_what_is_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is used: the sequence that goes is the one that was neither given nor found for the longest."""
    monkeypatch.setattr("tierd.client.early.SEQUENCES_LIMIT", 2)
    known = Known()
    known.note(group(1), handles(4))
    known.note(group(2), handles(4))
    assert known.find(group(1)) is not None
    known.note(group(3), handles(4))
    assert [known.find(group(number)) is not None for number in (1, 2, 3)] == [True, False, True]


def test_threads_may_note_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However their turns fall, none fails, and the count is that of what is remembered."""
    monkeypatch.setattr("tierd.client.early.SEQUENCES_LIMIT", 2)
    known, asked, faults = Known(), [group(number) for number in range(4)], list[BaseException]()

    def note() -> None:
        try:
            for number in range(NOTES):
                known.note(asked[number % 4], handles(4))
        except BaseException as error:
            faults.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=note) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert faults == []
    assert known._count == 4 * len(known._handles)
