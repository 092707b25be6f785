"""Block tables: grow, write, commit, fork, release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.worker.conftest import StoringPages
from tierd.errors import InvalidArgument, Overloaded
from tierd.kernels.buffers import Buffer
from tierd.worker.backend import Backend
from tierd.worker.blocks import BlockTable
from tierd.worker.pages import LocalPages, Page, PageShape
from tierd.worker.spec import LlamaSpec

SMALL = LlamaSpec(vocab_size=8, hidden_size=8, intermediate_size=8, layers=1, q_heads=1, kv_heads=1, head_dim=2)
NewSource = Callable[..., Any]


def fill(table: BlockTable, tokens: list[int], upto: int) -> None:
    """Writes token ids as keys and values of positions table.length to upto, all layers."""
    values = np.asarray(tokens[table.length : upto], dtype=np.float32)[:, None, None]
    start = table.length
    table.grow(upto)
    layers, _, _, heads, dim = table.pages[0].array.shape
    rows = np.broadcast_to(values, (upto - start, heads, dim))
    for layer in range(layers):
        table.write(layer, start, k=rows, v=-rows)
    table.advance(upto)


def contents(table: BlockTable) -> list[int]:
    """The token ids that `fill` wrote, read back from the pages' first keys."""
    keys = np.concatenate([p.array[0, 0, :, 0, 0] for p in table.pages]) if table.pages else np.zeros(0)
    return [int(k) for k in keys[: table.length]]


def test_rows_land_in_their_places(shape: PageShape) -> None:
    """Keys and values of a run that crosses pages are stored at their positions, layer by layer."""
    table = BlockTable(LocalPages(shape))
    table.grow(10)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 10, 2, 8), dtype=np.float32)
    for layer in range(2):
        table.write(layer, 0, k=k[layer, :7], v=v[layer, :7])
        table.write(layer, 7, k=k[layer, 7:], v=v[layer, 7:])
    stored = np.concatenate([p.array for p in table.pages], axis=2)[:, :, :10]
    np.testing.assert_array_equal(stored, np.stack([k, v], axis=1))


def test_only_grown_positions_are_writable(shape: PageShape) -> None:
    """Positions that are complete or without a page are refused."""
    table = BlockTable(LocalPages(shape))
    table.grow(4)
    table.advance(2)
    rows = np.zeros((1, 2, 8), dtype=np.float32)
    for position in (1, 4):
        with pytest.raises(InvalidArgument):
            table.write(0, position, k=rows, v=rows)


def test_a_fork_copies_the_page_that_it_continues(shape: PageShape) -> None:
    """Two forks write different tokens after a common start; they share full pages and copy the last once."""
    source = LocalPages(shape)
    one = BlockTable(source)
    fill(one, [1, 2, 3, 4, 5, 6], 6)
    two = one.fork()
    fill(one, [1, 2, 3, 4, 5, 6, 7], 7)
    fill(two, [1, 2, 3, 4, 5, 6, 8], 7)
    assert contents(one) == [1, 2, 3, 4, 5, 6, 7]
    assert contents(two) == [1, 2, 3, 4, 5, 6, 8]
    assert one.pages[0] is two.pages[0]
    assert source.in_use == 3


def test_a_duplicate_commit_goes_on_with_the_page_that_exists(new_source: NewSource) -> None:
    """The second of two equal sequences switches to the first one's pages and releases its own."""
    source = new_source()
    tokens = list(range(10))
    one, two = BlockTable(source), BlockTable(source)
    for table in (one, two):
        fill(table, tokens, 10)
        table.commit(tokens)
    assert [a is b for a, b in zip(one.pages, two.pages, strict=True)] == [True, True, False]
    assert contents(two) == tokens
    one.release()
    two.release()
    assert source.held == 0


def test_a_block_that_finds_no_room_ends_the_chain(new_source: NewSource) -> None:
    """After the first block that could not be stored no block is named, and all pages stay readable."""
    tokens = list(range(22))
    table = BlockTable(new_source(room=2))
    fill(table, tokens, 22)
    assert table.commit(tokens) == 2
    assert [p.is_private for p in table.pages] == [False, False, True, True, True, True]
    assert not table.commit_tail(tokens)
    assert contents(table) == tokens


def test_a_stored_tail_is_continued_in_a_private_copy(new_source: NewSource) -> None:
    """A short block comes back as a writable private page, and the stored one stays."""
    source = new_source()
    tokens = list(range(6))
    first = BlockTable(source)
    fill(first, tokens, 6)
    first.commit(tokens)
    assert first.commit_tail(tokens)
    first.release()
    for last in (30, 31):
        again = BlockTable(source, source.acquire([*tokens, last], marks=[6]))
        assert again.length == 6
        fill(again, [*tokens, last], 7)
        assert contents(again) == [*tokens, last]
        again.release()
    assert source.held == 0


def test_a_prefix_that_finds_no_page_for_its_tail_is_let_go_of(
    new_source: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no page is free, as on a full GPU, the table releases the prefix."""
    source, tokens = new_source(), list(range(6))
    first = BlockTable(source)
    fill(first, tokens, 6)
    first.commit(tokens)
    first.commit_tail(tokens)
    first.release()

    def full(_: int) -> list[Any]:
        raise Overloaded("cuda:0: no memory is left")

    held = source.acquire([*tokens, 7], marks=[6])
    monkeypatch.setattr(source, "reserve", full)
    with pytest.raises(Overloaded):
        BlockTable(source, held)
    assert source.held == 0


@pytest.mark.parametrize("length", [10, 8, 6, 4, 1, 0])
def test_a_cropped_table_goes_on(length: int, new_source: NewSource) -> None:
    """A table cropped anywhere, even in a named page, takes other tokens, and stored blocks do not change."""
    source, tokens = new_source(), list(range(10))
    table = BlockTable(source)
    fill(table, tokens, 10)
    assert table.commit(tokens[:9]) == 2
    table.crop(length)
    assert contents(table) == tokens[:length]
    other = [*tokens[:length], *range(20, 29)]
    fill(table, other, len(other))
    assert contents(table) == other
    assert contents(BlockTable(source, source.acquire(tokens))) == tokens[:8]
    table.commit(other)
    assert contents(BlockTable(source, source.acquire(other))) == other[: len(other) // 4 * 4]


class ForksOfTables(RuleBasedStateMachine):
    """After any grows, crops, forks and releases, tables read their own tokens, and no page leaks."""

    @initialize()
    def start(self) -> None:
        self.source = LocalPages(PageShape(SMALL.geometry("float32"), 3, Backend()))
        self.tables: list[tuple[BlockTable, list[int]]] = [(BlockTable(self.source), [])]
        self.next = 0

    @rule(which=st.integers(0, 99), count=st.integers(1, 5))
    def grow(self, which: int, count: int) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        tokens += range(self.next, self.next + count)
        self.next += count
        fill(table, tokens, len(tokens))

    @rule(which=st.integers(0, 99), count=st.integers(1, 5))
    def crop(self, which: int, count: int) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        del tokens[max(0, len(tokens) - count) :]
        table.crop(len(tokens))

    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        self.tables.append((table.fork(), list(tokens)))

    @precondition(lambda self: len(self.tables) > 1)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.tables.pop(which % len(self.tables))[0].release()

    @invariant()
    def each_reads_its_own(self) -> None:
        for table, tokens in getattr(self, "tables", []):
            assert contents(table) == tokens

    @invariant()
    def pages_in_use_are_those_in_tables(self) -> None:
        if hasattr(self, "source"):
            held = {id(page) for table, _ in self.tables for page in table.pages}
            assert self.source.in_use == len(held)


TestForksOfTables = ForksOfTables.TestCase
TestForksOfTables.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


class MovingPages(StoringPages):
    """StoringPages whose committed pages turn, in place, into others, as a daemon's may."""

    def _store(self, page: Page, key: bytes) -> None:
        page.become(Page(page.array.copy()))
        super()._store(page, key)


def at(table: BlockTable) -> list[int]:
    """The addresses of its pages, all looked up now."""
    return [page.array.__array_interface__["data"][0] for page in table.pages]


STEPS = st.tuples(st.sampled_from(["grow", "fork", "crop", "commit", "look"]), st.integers(0, 40))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=20))
@example([("grow", 16), ("look", 0), ("crop", 4), ("grow", 12)])
def test_addresses_are_those_of_the_pages(shape: PageShape, steps: list[tuple[str, int]]) -> None:
    """After any changes, also by a fork that holds the same pages, addresses are those of the pages."""
    source = MovingPages(shape)
    tables = [BlockTable(source)]
    for what, number in steps:
        table = tables[number % len(tables)]
        if what == "grow":
            table.grow(table.length + number)
            table.advance(table.length + number)
        elif what == "fork":
            tables.append(table.fork())
        elif what == "crop":
            table.crop(number)
        elif what == "commit":
            table.commit([number % 3] * table.length)
        elif table.pages:
            assert table.located().addresses.tolist() == at(table)
    for table in tables:
        assert not table.pages or table.located().addresses.tolist() == at(table)


def test_only_new_pages_are_looked_up(shape: PageShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's address is looked up once, however often a table of many pages is asked."""
    looks = 0
    look = Buffer.of

    def counted(name: str, array: Any) -> Buffer:
        nonlocal looks
        looks += 1
        return look(name, array)

    monkeypatch.setattr(Buffer, "of", counted)
    table = BlockTable(LocalPages(shape))
    for length in range(1, 200):
        table.grow(length)
        table.advance(length)
        table.commit([0] * length)
        assert len(table.located()) == len(table.pages)
    assert looks == len(table.pages) == 50
