"""Prefill by FlashAttention-3 and FlashInfer: what they are given, on stand-ins that check it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierd.errors import ConfigError
from tierd.kernels import PagedBatch
from tierd.kernels.attention import KernelAttention
from tierd.kernels.library import Emulated
from tierd.kernels.prefills import FlashAttention3, FlashInfer, Prefill, find_prefill
from tierd.kernels.reference import paged_attention

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tierd[worker]'")
HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 64, 16
BATCH = PagedBatch([0, 20, 37, 39], [60, 17, 33], [[4, 0, 6, 2], [5, 1], [3, 7, 8]])
"""A chunk behind stored tokens, a prompt, and two tokens."""
Pages = tuple[Any, list[Any]]


def attended(q: Any, kv: tuple[Any, Any], starts: Any, lens: Any, tables: list[list[int]]) -> tuple[Any, Any]:
    """By the reference. kv: [pages, tokens, kv heads, dim] each, as the other project gets them."""
    assert (starts.dtype, q.is_contiguous()) == (torch.int32, True)
    assert kv[0].shape[1:] == kv[1].shape[1:] == (TOKENS, KV_HEADS, DIM) and kv[0].dtype == kv[1].dtype == q.dtype
    used = sorted({page for table in tables for page in table})
    pages = [torch.stack([side[page] for side in kv]) for page in used]
    batch = PagedBatch(starts.tolist(), [int(n) for n in lens], [[used.index(page) for page in t] for t in tables])
    done = paged_attention(q.float(), [page.float() for page in pages], batch)
    return done.out.to(q.dtype), done.lse


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    causal: bool,
    return_softmax_lse: bool,
) -> tuple[Any, ...]:
    """FlashAttention-3's, with log-sum-exps by heads."""
    assert (causal, return_softmax_lse, max_seqlen_q) == (True, True, int(cu_seqlens_q.diff().max()))
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    tables = [row[: -(-n // TOKENS)] for row, n in zip(page_table.tolist(), cache_seqlens.tolist(), strict=True)]
    out, lse = attended(q, (k_cache, v_cache), cu_seqlens_q, cache_seqlens, tables)
    return out, lse.T


@dataclass
class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's: a plan of the host, then runs with log-sum-exps to base 2."""

    workspace: Any
    layout: str
    planned: Any = None
    plans: list[Any] = field(default_factory=list)

    def plan(self, *given: Any, causal: bool, q_data_type: Any, kv_data_type: Any) -> None:
        """By FlashInfer's order of arguments."""
        assert (causal, self.layout, q_data_type, self.workspace.dtype) == (True, "NHD", kv_data_type, torch.uint8)
        assert given[4:] == (HEADS, KV_HEADS, DIM, TOKENS)
        self.plans.append(given[:4])

    def run(self, q: Any, kv: tuple[Any, Any], *, return_lse: bool) -> tuple[Any, Any]:
        """Of one layer."""
        starts, page_starts, numbers, last = (array.to(torch.int32) for array in self.plans[-1])
        assert return_lse and last.min() >= 1 and last.max() <= TOKENS
        tables = [numbers[a:b].tolist() for a, b in itertools.pairwise(page_starts)]
        lens = [(len(table) - 1) * TOKENS + int(n) for table, n in zip(tables, last, strict=True)]
        out, lse = attended(q, kv, starts, lens, tables)
        return out, lse / np.log(2)


MODULES = {
    "fa3": SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache, __version__="3.0"),
    "flashinfer": SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper, __version__="0.6"),
}  # fmt: skip
KINDS: dict[str, Callable[[], Prefill]] = {
    "fa3": lambda: FlashAttention3(torch, MODULES["fa3"], "fa3 3.0"),
    "flashinfer": lambda: FlashInfer(torch, MODULES["flashinfer"], "flashinfer 0.6"),
}


def case(dtype: Any = None) -> Pages:
    """Queries, and pages of two layers in one pool, with a gap between them."""
    torch.manual_seed(3)
    pool = torch.randn((9, 3, 2, TOKENS, KV_HEADS, DIM)).to(dtype or torch.bfloat16)
    return torch.randn((39, HEADS, DIM)).to(pool.dtype), [page[:2] for page in pool]


@pytest.mark.parametrize("kind", KINDS)
def test_others_get_the_pages_in_place(library: Emulated, kind: str) -> None:
    """Their outputs and log-sum-exps over both layers are those of tierd's kernel."""
    q, pages = case()
    single = replace(BATCH, query_starts=[0, 1, 18, 20], kv_lens=[60, 17, 33])
    for batch, rows in ((BATCH, 39), (single, 20)):
        ours, theirs = KernelAttention(library), KernelAttention(library, KINDS[kind]())
        assert theirs.name == f"tierd, prefill by {KINDS[kind]().name}"
        passes = [one.over(pages, batch, slots=np.full(rows, -1)) for one in (ours, theirs)]
        for layer in (0, 1):
            want, got = (one.attend(layer, q[:rows]) for one in passes)
            assert float((got.out.float() - want.out.float()).norm() / want.out.float().norm()) < 5e-3
            torch.testing.assert_close(got.lse, want.lse, rtol=0, atol=2e-3)
        assert theirs.prefill is not None, "it did not fail"


def test_passes_that_take_turns_plan_anew(library: Emulated) -> None:
    """FlashInfer's plan is one pass's: another pass between two layers gives neither the other's pages."""
    q, pages = case()
    other = KINDS["flashinfer"]()
    attention, plain = KernelAttention(library, other), KernelAttention(library)
    batches = [BATCH, replace(BATCH, tables=[[4, 0, 6, 8], [1, 5], [7, 3, 2]])]
    passes = [[one.over(pages, batch, slots=np.full(39, -1)) for batch in batches] for one in (attention, plain)]
    for layer in (0, 1):
        for got, want in zip(*passes, strict=True):
            torch.testing.assert_close(got.attend(layer, q).lse, want.attend(layer, q).lse, rtol=0, atol=2e-3)
    assert len(other._wrapper.plans) == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("limits", [{"window": 20}, {"subsets": [[[0, 1]] * KV_HEADS] * 3}], ids=str)
def test_what_they_lack_stays_with_our_kernel(library: Emulated, limits: dict[str, Any]) -> None:
    """Windows and chosen pages never reach another project's kernel."""
    q, pages = case(torch.float16)
    batch = replace(BATCH, kv_lens=[60, 20, 33], **limits)
    want, got = (KernelAttention(library, other)(q, pages, batch) for other in (None, KINDS["fa3"]()))
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_one_that_fails_is_not_asked_again(library: Emulated, caplog: pytest.LogCaptureFixture) -> None:
    """If the other project's kernel raises, the log says so and tierd's kernel attends, now and later."""
    q, pages = case()
    other = FlashAttention3(torch, SimpleNamespace(), "fa3 3.0")
    attention, want = KernelAttention(library, other), KernelAttention(library)(q, pages, BATCH)
    for _ in range(2):
        assert torch.equal(attention(q, pages, BATCH).out, want.out)
    assert attention.name == "tierd"
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("prefill by fa3 3.0 failed; tierd's kernel takes over")


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one that fits the GPU prefills, unless TIERD_PREFILL names another; it refuses others."""
    fits = SimpleNamespace(cuda=SimpleNamespace(get_device_capability=lambda _: (9, 0)))
    older = SimpleNamespace(cuda=SimpleNamespace(get_device_capability=lambda _: (8, 0)))

    def found(gpu: Any, asked: str = "") -> str:
        monkeypatch.setenv("TIERD_PREFILL", asked)
        chosen = find_prefill(gpu, "cuda:0")
        return chosen.name if chosen else "tierd"

    monkeypatch.setitem(sys.modules, "flash_attn_interface", MODULES["fa3"])
    monkeypatch.setitem(sys.modules, "flashinfer", MODULES["flashinfer"])
    assert [found(fits), found(older), found(fits, "tierd")] == ["flash_attn_interface 3.0", "flashinfer 0.6", "tierd"]
    assert found(fits, "flashinfer") == "flashinfer 0.6"
    with pytest.raises(ConfigError, match="fa3 is not installed, or not for cuda:0"):
        found(older, "fa3")
    with pytest.raises(ConfigError, match="is 'fa2'; set it to tierd, fa3 or flashinfer"):
        found(fits, "fa2")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert found(fits) == "tierd"
