"""The reference kernels against attention written out one query at a time, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.kernels import PagedBatch, merge_attention, paged_attention, reference

F64 = NDArray[np.float64]


@dataclass
class Case:
    """A ragged batch in a pool whose unused places are all NaN."""

    q: F64
    pool: F64
    batch: PagedBatch


def make_case(shape: list[tuple[int, int]], *, group: int = 2, page_tokens: int = 4, seed: int = 0) -> Case:
    """shape: (query rows, kv tokens) of each sequence; two kv heads of eight channels."""
    rng = np.random.default_rng(seed)
    needed = [-(-kv // page_tokens) for _, kv in shape]
    pool = np.full((sum(needed) + 3, 2, page_tokens, 2, 8), np.nan)
    ids = iter(rng.permutation(len(pool)).tolist())
    tables = [[next(ids) for _ in range(n)] for n in needed]
    for (_, kv), table in zip(shape, tables, strict=True):
        for position in range(kv):
            pool[table[position // page_tokens], :, position % page_tokens] = rng.standard_normal((2, 2, 8))
    starts = np.concatenate([[0], np.cumsum([rows for rows, _ in shape])]).tolist()
    q = rng.standard_normal((starts[-1], 2 * group, 8))
    return Case(q, pool, PagedBatch(starts, [kv for _, kv in shape], tables))


def expected(case: Case, sequence: int, row: int, head: int) -> tuple[F64, float, F64]:
    """(out, log-sum-exp, weight per page) of one query row of one head, the slow way."""
    page_tokens, kv_heads = case.pool.shape[2], case.pool.shape[3]
    starts, kv_len, table = case.batch.query_starts, case.batch.kv_lens[sequence], case.batch.tables[sequence]
    rows = starts[sequence + 1] - starts[sequence]
    kv_head = head // (case.q.shape[1] // kv_heads)
    mass = np.zeros(len(table))
    scores, values, tokens = [], [], []
    position = kv_len - rows + row
    for j in range(max(0, position + 1)):
        if not is_seen(case.batch, sequence, kv_head, token=j, position=position, page_tokens=page_tokens):
            continue
        k, v = case.pool[table[j // page_tokens], :, j % page_tokens, kv_head]
        scores.append(float(case.q[starts[sequence] + row, head] @ k) / math.sqrt(len(k)))
        values.append(v)
        tokens.append(j)
    if not scores:
        return np.zeros(case.q.shape[-1]), -math.inf, mass
    lse = max(scores) + math.log(sum(math.exp(s - max(scores)) for s in scores))
    weights = [math.exp(s - lse) for s in scores]
    for j, w in zip(tokens, weights, strict=True):
        mass[j // page_tokens] += w
    return np.sum([w * v for w, v in zip(weights, values, strict=True)], axis=0), lse, mass


def is_seen(batch: PagedBatch, sequence: int, kv_head: int, *, token: int, position: int, page_tokens: int) -> bool:
    """Whether a query sees a token that is not after it."""
    if batch.subsets is not None and token // page_tokens not in batch.subsets[sequence][kv_head]:
        return False
    return not batch.window or token < batch.sinks or token > position - batch.window


def check(case: Case) -> None:
    """Every output of the kernel equals the slow way."""
    got = paged_attention(case.q, case.pool, case.batch, with_mass=True)
    assert got.mass is not None
    for i, table in enumerate(case.batch.tables):
        mass = np.zeros((case.q.shape[1], len(table)))
        for row in range(case.batch.query_starts[i + 1] - case.batch.query_starts[i]):
            for head in range(case.q.shape[1]):
                out, lse, page_mass = expected(case, i, row, head)
                at = case.batch.query_starts[i] + row
                np.testing.assert_allclose(got.out[at, head], out, atol=1e-12)
                np.testing.assert_allclose(got.lse[at, head], lse, atol=1e-12)
                mass[head] += page_mass
        np.testing.assert_allclose(got.mass[i], mass, atol=1e-12)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(
    "shape",
    [
        [(1, 1)],
        [(1, 9), (1, 4), (1, 13)],
        [(5, 5)],
        [(3, 11), (1, 2), (6, 6)],
        [(0, 3), (2, 8)],
        [(4, 2)],
        [(1, 0), (1, 3)],
    ],
    ids=["one", "decode", "prefill", "mixed", "no-rows", "rows-before-keys", "empty"],
)
def test_equals_attention_written_out(shape: list[tuple[int, int]], group: int) -> None:
    """Decode, prefill and append over ragged tables equal the definition, with any bytes in stale places."""
    check(make_case(shape, group=group))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_any_batch_equals_attention_written_out(shape: list[tuple[int, int]], page_tokens: int, seed: int) -> None:
    """Any shape of batch and any page size equal the definition."""
    check(make_case(shape, page_tokens=page_tokens, seed=seed))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=3),
    st.integers(1, 40),
    st.sampled_from([{}, {"sinks": 2, "window": 5}]),
)
def test_steps_over_the_keys_equal_attention_written_out(
    shape: list[tuple[int, int]], scores: int, options: dict[str, int]
) -> None:
    """However few scores are held at once, results, log-sum-exps and page masses are the same."""
    case = make_case(shape)
    with patch.object(reference, "SCORES_AT_ONCE", scores):
        check(replace(case, batch=replace(case.batch, **options)))


@pytest.mark.parametrize(("sinks", "window"), [(0, 5), (4, 3), (3, 100), (7, 1)])
def test_a_window_with_sinks(sinks: int, window: int) -> None:
    """Each query sees the first tokens and the last ones up to its own, in decode and in a chunk."""
    case = make_case([(1, 19), (6, 17), (1, 2), (3, 3)])
    case.batch = replace(case.batch, sinks=sinks, window=window)
    check(case)


def test_a_subset_of_pages() -> None:
    """Each kv head sees its chosen pages, and a head with no chosen page sees nothing."""
    case = make_case([(1, 19), (4, 17), (1, 3)])
    case.batch = replace(case.batch, subsets=[[[0, 3], [4]], [[1, 2], [0, 4]], [[], [0]]])
    check(case)


def test_wild_unused_table_entries_are_ignored() -> None:
    """Table entries behind the last token are never read."""
    case = make_case([(1, 6)])
    want = paged_attention(case.q, case.pool, case.batch)
    wild = PagedBatch([0, 1], [6], [[*case.batch.tables[0], 10**9, -7]])
    np.testing.assert_array_equal(paged_attention(case.q, case.pool, wild).out, want.out)


def test_rows_do_not_depend_on_their_batch() -> None:
    """A row gives the same result in a chunk as alone."""
    case = make_case([(5, 12)])
    whole = paged_attention(case.q, case.pool, case.batch)
    for row in range(5):
        alone = PagedBatch([0, 1], [8 + row], case.batch.tables)
        np.testing.assert_allclose(
            paged_attention(case.q[row : row + 1], case.pool, alone).out[0], whole.out[row], atol=1e-12
        )


def test_half_precision_pages_are_summed_in_single() -> None:
    """float16 pages give the float64 result to within the rounding of their values."""
    case = make_case([(1, 19), (4, 10)])
    got = paged_attention(case.q.astype(np.float32), case.pool.astype(np.float16), case.batch)
    assert got.out.dtype == np.float32
    np.testing.assert_allclose(got.out, paged_attention(case.q, case.pool, case.batch).out, atol=5e-3)


def test_merge_of_parts_is_the_whole() -> None:
    """Parts merged by log-sum-exp equal attention over all keys; an empty part has no effect."""
    case = make_case([(1, 12)])
    table = case.batch.tables[0]
    whole = paged_attention(case.q, case.pool, case.batch)
    parts = [
        paged_attention(case.q, case.pool, PagedBatch([0, 1], [kv], [t]))
        for kv, t in ((8, table[:2]), (0, []), (4, table[2:]))
    ]
    outs = np.stack([p.out for p in parts])
    outs[1] = np.nan  # a kernel's output without keys does not matter
    merged = merge_attention(outs, np.stack([p.lse for p in parts]))
    np.testing.assert_allclose(merged.out, whole.out, atol=1e-12)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-12)


def test_merge_of_nothing_is_nothing() -> None:
    """Parts that all saw no key merge to zeros and -inf."""
    merged = merge_attention(np.full((2, 1, 3, 8), np.nan), np.full((2, 1, 3), -np.inf))
    assert not merged.out.any() and np.all(merged.lse == -np.inf)


@pytest.mark.parametrize(
    "batch",
    [
        PagedBatch([0, 2], [3], [[0]]),
        PagedBatch([0, 1], [5], [[0]]),
        PagedBatch([0, 1], [1, 1], [[0], [0]]),
        PagedBatch([0, 1], [3], [[0]], window=-1),
        PagedBatch([0, 1], [3], [[0]], window=2, subsets=[[[0], [0]]]),
    ],
    ids=["rows", "length", "counts", "window", "both"],
)
def test_a_batch_that_does_not_fit_is_refused(batch: PagedBatch) -> None:
    """Rows, lengths and tables that contradict one another raise instead of reading elsewhere."""
    case = make_case([(1, 3)])
    with pytest.raises(InvalidArgument):
        paged_attention(case.q, case.pool, batch)


def test_torch_gives_what_numpy_gives() -> None:
    """The same code on torch tensors gives the same numbers."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    case = make_case([(3, 11), (1, 6)])
    want = paged_attention(case.q, case.pool, case.batch, with_mass=True)
    got = paged_attention(torch.from_numpy(case.q), torch.from_numpy(case.pool), case.batch, with_mass=True)
    np.testing.assert_allclose(got.out.numpy(), want.out, atol=1e-12)
    np.testing.assert_allclose(got.lse.numpy(), want.lse, atol=1e-12)
    assert got.mass is not None and want.mass is not None
    np.testing.assert_allclose(got.mass[0].numpy(), want.mass[0], atol=1e-12)
