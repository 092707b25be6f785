"""Side pools of hybrid models: states beside keys and values, under SGLang's own pool classes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "sglang", reason="sglang is not installed: make test-engines runs this in an environment of its own"
)

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from tests.engines.sglang.pools import PAGE, backend, buffers, fill, indices, mamba, mha, mla, page
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(300)
KEYS = ["a", "b", "c", "d", "e"]


def hybrid(daemon: Daemon, *, side: Any = None, anchor: Any = None, **given: Any) -> Any:
    """A backend with keys and values, and states beside them."""
    made = backend(daemon.target, anchor or mha("page_first"), **given)
    made.register_mem_host_pool_v2(made.mem_pool_host, PoolName.KV)
    made.register_mem_host_pool_v2(side or mamba(), PoolName.MAMBA)
    made.on_host_pools_registered()
    return made


def states(keys: list[str], *slots: int, policy: PoolHitPolicy = PoolHitPolicy.TRAILING_PAGES) -> PoolTransfer:
    return PoolTransfer(name=PoolName.MAMBA, keys=keys, host_indices=torch.tensor(slots), hit_policy=policy)


def test_states_come_back(daemon: Daemon) -> None:
    """A state comes back bit by bit, apart from keys and values under the same key."""
    made = hybrid(daemon, model_name="states")
    side = made.registered_pools[PoolName.MAMBA]
    fill(side, seed=1)
    assert made.batch_set_v2([states(["a", "b"], 3, 4)]) == {PoolName.MAMBA: [True, True]}
    assert made.batch_exists(["a"]) == 0
    assert made.batch_get_v2([states(["a", "b", "z"], 7, 8, 9)]) == {PoolName.MAMBA: [True, True, False]}
    assert page(side, 7) == page(side, 3) and page(side, 8) == page(side, 4)


def test_states_without_pointers(daemon: Daemon) -> None:
    """A pool without pointers is stored as its own flat pages."""

    class Opaque(type(mamba())):  # type: ignore[misc]
        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise NotImplementedError("side states")

    side = mamba()
    side.__class__ = Opaque
    made = hybrid(daemon, side=side, model_name="opaque")
    before = fill(side, seed=2)
    assert made._shelves["mamba"].pages.form == "flat"
    assert made.batch_set_v2([states(["a"], 3)]) == {PoolName.MAMBA: [True]}
    for one in buffers(side):
        one.zero_()
    assert made.batch_get_v2([states(["a"], 3)]) == {PoolName.MAMBA: [True]}
    assert all(
        torch.equal(one.view(torch.uint8).select(0, 3), old.view(torch.uint8).select(0, 3))
        for one, old in zip(buffers(side), before, strict=True)
    )


def test_prefixes_that_all_pools_serve(daemon: Daemon) -> None:
    """A prefix counts only if its window of states is complete, so holes remain. A pool needed for
    every page ends it at the first gap."""
    made = hybrid(daemon, model_name="prefixes")
    assert made.batch_set_v1(KEYS, indices(0, 1, 2, 3, 4)) == [True] * 5
    made.batch_set_v2([states(["a", "b", "d"], 1, 2, 4)])
    one = made.batch_exists_v2([*KEYS, "z"], [states(["x"], 0)])
    assert (one.kv_hit_pages, one.restorable_prefix_pages) == (4, [1, 2, 4])
    assert one.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 4}
    two = made.batch_exists_v2(KEYS, [states(["x", "y"], 0, 1)])
    assert (two.kv_hit_pages, two.restorable_prefix_pages) == (2, [1, 2])
    whole = made.batch_exists_v2(KEYS, [states([], policy=PoolHitPolicy.ALL_PAGES)])
    assert (whole.kv_hit_pages, whole.restorable_prefix_pages) == (2, [1, 2])
    groups = made.batch_exists_v2(KEYS, [states([], policy=PoolHitPolicy.BLOCK_GROUPS)])
    assert groups.kv_hit_pages == 5 and PoolName.MAMBA not in groups.extra_pool_hit_pages
    unknown = PoolTransfer(name=PoolName.SWA, keys=["x"])
    assert made.batch_exists_v2(KEYS, [unknown]).kv_hit_pages == 0
    assert made.batch_exists_v2(KEYS).kv_hit_pages == 5


def test_states_of_a_replicated_model_are_each_ranks_own(daemon: Daemon) -> None:
    """Keys and values are replicated and one rank writes them; each rank writes and reads its own states."""
    ranks = [
        hybrid(daemon, anchor=mla("page_first"), is_mla=True, model_name="kda", tp_rank=tp, tp_size=2) for tp in (0, 1)
    ]
    for seed, one in enumerate(ranks):
        fill(one.registered_pools[PoolName.MAMBA], seed=seed)
        assert one.batch_set_v2([states(["a"], 1)]) == {PoolName.MAMBA: [True]}
        kv = PoolTransfer(name=PoolName.KV, keys=["a"], host_indices=indices(0))
        assert one.batch_set_v2([kv]) == {PoolName.KV: [seed == 0]}
    for one in ranks:
        side = one.registered_pools[PoolName.MAMBA]
        assert one.batch_get_v2([states(["a"], 5)]) == {PoolName.MAMBA: [True]}
        assert page(side, 5) == page(side, 1)
    assert page(ranks[0].registered_pools[PoolName.MAMBA], 5) != page(ranks[1].registered_pools[PoolName.MAMBA], 5)


def test_a_draft_with_heads_is_each_ranks_own(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """Beside replicated latents a draft's keys and values differ by rank, and no rank reads
    another's. tierd warns that SGLang stores one rank's only."""
    ranks = [
        backend(daemon.target, mla("page_first"), is_mla=True, model_name="eagle", tp_rank=tp, tp_size=2)
        for tp in (0, 1)
    ]
    for seed, one in enumerate(ranks):
        one.register_mem_host_pool_v2(mha("page_first"), PoolName.DRAFT)
        fill(one.registered_pools[PoolName.DRAFT], seed=seed)
    assert "pool draft gets no hits: each rank has its own heads" in caplog.text
    draft = PoolTransfer(name=PoolName.DRAFT, keys=["a"], host_indices=indices(0))
    assert ranks[0].batch_set_v2([draft]) == {PoolName.DRAFT: [True]}
    assert ranks[1].batch_get_v2([draft]) == {PoolName.DRAFT: [False]}
    assert ranks[1].batch_set_v2([draft]) == {PoolName.DRAFT: [True]}
    there = PoolTransfer(name=PoolName.DRAFT, keys=["a"], host_indices=indices(5))
    for one in ranks:
        side = one.registered_pools[PoolName.DRAFT]
        assert one.batch_get_v2([there]) == {PoolName.DRAFT: [True]} and page(side, 5 * PAGE) == page(side, 0)


def test_an_anchor_without_bytes(daemon: Daemon) -> None:
    """If the anchor has no bytes, its side pools alone decide the hit, and a get of it succeeds."""
    anchor = mha("page_first")
    anchor.kv_buffer = None
    made = hybrid(daemon, anchor=anchor, model_name="logical")
    assert made.batch_set_v1(KEYS, indices(0, 1, 2, 3, 4)) == [True] * 5
    made.batch_set_v2([states(["a", "b"], 1, 2)])
    found = made.batch_exists_v2(KEYS, [states([], policy=PoolHitPolicy.ALL_PAGES)])
    assert found.kv_hit_pages == 2 and made.batch_get_v1(KEYS[:2], indices(0, 1)) == [True, True]
