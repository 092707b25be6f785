"""Prefixes that sequences share: which are found, and that attention to them is attention to all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.test_reference_attention import Case, make_case
from tierd.errors import InvalidArgument
from tierd.kernels import paged_attention
from tierd.kernels.prefixes import SharedPrefix, shared_prefixes

TABLES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=7)


def found(tables: list[list[int]], least: int = 1) -> list[tuple[list[int], int]]:
    """Groups with their shared pages, by their first sequences."""
    prefixes = shared_prefixes([np.array(table, np.int64) for table in tables], least=least)
    return sorted((list(one.sequences), one.pages) for one in prefixes)


@given(TABLES, st.integers(1, 12))
def test_groups_share_what_they_say(tables: list[list[int]], least: int) -> None:
    """Groups are disjoint, share exactly so many leading pages, and save enough."""
    named: list[int] = []
    for sequences, pages in found(tables, least):
        named += sequences
        heads = {tuple(tables[i][: pages + 1]) for i in sequences}
        assert len({head[:pages] for head in heads}) == 1
        assert len(heads) > 1 or min(len(tables[i]) for i in sequences) == pages, "they share more"
        assert len(sequences) > 1 and (len(sequences) - 1) * pages >= least
    assert len(set(named)) == len(named)


def test_a_group_is_split_if_that_saves_more() -> None:
    """Of sequences with one common page, those with more become groups of their own; else all are one."""
    assert found([[1, 2, 3, 4, 5], [1, 9], [1, 2, 3, 4, 6]]) == [([0, 2], 4)]
    assert found([[1, 2], [1, 9], [1, 2], [1, 3]]) == [([0, 1, 2, 3], 1)]
    assert found([[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 5, 6]]) == [([0, 2], 2), ([1, 3], 3)]
    assert found([[1], [2], []]) == []


def forked(lens: list[int], pages: int, *, seed: int, loud: float = 1.0) -> Case:
    """A chunk, and decodes of these lengths that begin with the same pages of four tokens."""
    case = make_case([(3, 9), *((1, length) for length in lens)], seed=seed)
    first = case.batch.tables[1][:pages]
    tables = [case.batch.tables[0], *([*first, *table[pages:]] for table in case.batch.tables[1:])]
    case.batch = replace(case.batch, tables=tables, shared=[SharedPrefix(range(1, len(tables)), pages)])
    case.q *= loud
    return case


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.integers(0, 99),
    st.sampled_from([1, 1e3]),
)
def test_shared_pages_are_attended_to_as_own_ones(pages: int, more: list[int], seed: int, loud: float) -> None:
    """Queries over a shared prefix, merged with each one's rest, equal one softmax over all keys."""
    case = forked([4 * pages + some for some in more], pages, seed=seed, loud=loud)
    want = paged_attention(case.q, case.pool, replace(case.batch, shared=()))
    got = paged_attention(case.q, case.pool, case.batch)
    np.testing.assert_allclose(got.out, want.out, atol=1e-12)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-12)


def test_shared_pages_are_read_once() -> None:
    """Each shared page is looked at once, however many sequences share it."""
    case, reads = forked([13, 15, 14], 3, seed=1), list[int]()

    class Pages(list[np.ndarray]):
        def __getitem__(self, page: int) -> np.ndarray:  # type: ignore[override]
            reads.append(page)
            return super().__getitem__(page)

    paged_attention(case.q, Pages(case.pool), case.batch)
    for page in case.batch.tables[1][:3]:
        assert reads.count(page) == 1 + (page == 0)  # the first of all tells the shape


@pytest.mark.parametrize(
    "options", [{"window": 5, "sinks": 1}, {"subsets": [[[0, 1], [2]]] * 3}], ids=["window", "subsets"]
)
def test_choices_of_tokens_are_kept(options: dict[str, object]) -> None:
    """Windows, subsets and page masses give the same whether pages are said to be shared or not."""
    case = forked([13, 14], 3, seed=2)
    batch = replace(case.batch, **options)
    for with_mass in (False, True):
        want, got = (
            paged_attention(case.q, case.pool, one, with_mass=with_mass) for one in (replace(batch, shared=()), batch)
        )
        np.testing.assert_array_equal(got.out, want.out)
        assert (got.mass is None) != with_mass


@pytest.mark.parametrize(
    "shared",
    [[SharedPrefix([0, 1], 1)], [SharedPrefix([1, 2], 4)], [SharedPrefix([1, 2], 1), SharedPrefix([2, 1], 2)]],
    ids=["chunk", "own-row", "twice"],
)
def test_what_cannot_be_shared_is_refused(shared: list[SharedPrefix]) -> None:
    """Chunks, pages with a query's own token, and sequences of two groups raise InvalidArgument."""
    case = forked([13, 16], 3, seed=3)
    with pytest.raises(InvalidArgument, match="^shared: sequence"):
        paged_attention(case.q, case.pool, replace(case.batch, shared=shared))
