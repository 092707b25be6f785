"""The hash table from keys to ids."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.core.arrays.table import LEAST_SLOTS, Table


def numbered(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1 << 64, count, dtype=np.uint64)


def put(table: Table, ids: np.ndarray, keys: np.ndarray) -> None:
    table.insert(ids, keys[ids])


def take(table: Table, ids: np.ndarray, keys: np.ndarray) -> None:
    table.remove(ids, keys[ids])


def find(table: Table, wanted: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return table.find(wanted, lambda rows, ids: keys[ids] == wanted[rows])


def test_finds_what_was_inserted_and_nothing_else() -> None:
    """Every inserted key leads to its id after several growths. Other keys lead to no id."""
    keys = numbered(50_000)
    table = Table()
    for start in range(0, 40_000, 1_700):
        put(table, np.arange(start, min(start + 1_700, 40_000)), keys)
        assert np.array_equal(find(table, keys[:start], keys), np.arange(start))
    assert (find(table, keys[40_000:], keys) == -1).all()
    assert np.array_equal(table.ids(), np.arange(40_000))


def test_equal_keys_are_told_apart_by_the_caller() -> None:
    """A lookup returns each of the ids with the same key to the caller that recognises it."""
    keys = np.full(100, 42, np.uint64)
    table = Table()
    put(table, np.arange(100), keys)
    found = table.find(keys, lambda rows, ids: rows == ids)
    assert np.array_equal(found, np.arange(100))
    take(table, np.arange(0, 100, 2), keys)
    found = table.find(keys, lambda rows, ids: rows == ids)
    assert np.array_equal(found, np.where(np.arange(100) % 2, np.arange(100), -1))


def test_a_key_that_is_alike_in_part_leads_nowhere() -> None:
    """A key that shares its upper 33 bits with another is a miss, alone or beside a key of two ids."""
    keys = np.array([5 << 32, 9 << 32, (9 << 32) + 1, (5 << 32) + 1, 77 << 32], np.uint64)
    table = Table()
    put(table, np.arange(3), keys)
    assert find(table, keys[3:4], keys).tolist() == [-1]
    assert find(table, keys[[1, 4]], keys).tolist() == [1, -1]
    assert find(table, keys[[0, 2, 1]], keys).tolist() == [0, 2, 1]


def test_removed_slots_do_not_pile_up() -> None:
    """Endless inserts and removals keep the table small."""
    keys = numbered(64)
    table = Table()
    for _ in range(500):
        put(table, np.arange(64), keys)
        take(table, np.arange(64), keys)
    assert table.count == 0
    assert table._slots.words.size == LEAST_SLOTS


def test_growth_is_paid_in_small_steps() -> None:
    """An insert moves a bounded number of slots, not the whole table."""
    keys = numbered(300_000)
    table = Table()
    put(table, np.arange(100_000), keys)
    while table._old is None:
        put(table, np.arange(table.count, table.count + 1_000), keys)
    before = table._moved
    put(table, np.arange(table.count, table.count + 1_000), keys)
    assert 0 < table._moved - before <= 8_000
    assert np.array_equal(find(table, keys[: table.count], keys), np.arange(table.count))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 400), max_size=120)), max_size=40), st.integers(1, 50))
def test_behaves_like_a_dict(steps: list[tuple[bool, set[int]]], spread: int) -> None:
    """The table returns the same as a dict for any batches of inserts and removals with many equal keys."""
    keys = (np.arange(401) % spread).astype(np.uint64)
    table, model = Table(), set()
    for insert, chosen in steps:
        ids = np.asarray(sorted(chosen - model if insert else chosen & model), np.int64)
        if insert:
            put(table, ids, keys)
            model |= chosen
        elif len(ids):
            take(table, ids, keys)
            model -= chosen
        found = table.find(keys, lambda rows, candidates: rows == candidates)
        assert set(found[found >= 0].tolist()) == model


def test_what_is_expected_comes_without_growth() -> None:
    """After `expect(n)` the array stays the same for n inserts, and earlier keys still lead to their ids."""
    keys = numbered(30_000)
    table = Table()
    put(table, np.arange(5_000), keys)
    table.expect(25_000)
    words = table._slots.words
    for start in range(5_000, 30_000, 2_500):
        put(table, np.arange(start, start + 2_500), keys)
    assert table._slots.words is words
    assert table._next is None
    assert np.array_equal(find(table, keys, keys), np.arange(30_000))
    take(table, np.arange(10_000), keys)
    assert np.array_equal(table.ids(), np.arange(10_000, 30_000))
    table.expect(5)
    assert table._slots.words is words
