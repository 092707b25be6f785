"""The ranks and engines of SGLang that share pages in tierd, and the ranks that write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "sglang", reason="sglang is not installed: make test-engines runs this in an environment of its own"
)

import sglang.version
import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.runtime_context import _ConfigBag, get_context

import tierd.integrations.sglang.hicache as face
from tests.engines.sglang.pools import PAGE, backend, config, fill, indices, mha, mla, page
from tests.engines.vllm.tiered import flushed
from tierd.errors import ConfigError, Unsupported
from tierd.integrations import sglang as package
from tierd.integrations.sglang.names import facts_of, options_of, place_of
from tierd.integrations.sglang.pages import PointerPages
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(300)
KEYS = ["a", "b"]


def stored(daemon: Daemon, pool: Any, **given: Any) -> Any:
    """A backend that has stored KEYS from pages 0 and 1."""
    made = backend(daemon.target, pool, **given)
    fill(pool, seed=1)
    assert made.batch_set_v1(KEYS, indices(0, 1)) == [True, True]
    return made


def test_ranks_do_not_see_each_other(daemon: Daemon) -> None:
    """One key of two tensor-, two pipeline- and two context-parallel ranks is eight pages of own bytes."""
    shapes = [
        {"tp_rank": tp, "tp_size": 2, "pp_rank": pp, "pp_size": 2, "attn_cp_rank": cp, "attn_cp_size": 2}
        for tp in (0, 1)
        for pp in (0, 1)
        for cp in (0, 1)
    ]
    ranks = [(backend(daemon.target, mha("page_first"), model_name="ranks", **shape)) for shape in shapes]
    kept = []
    for seed, rank in enumerate(ranks):
        assert rank.batch_exists(KEYS) == 0
        fill(rank.mem_pool_host, seed=seed)
        kept.append(page(rank.mem_pool_host, 0))
        assert rank.batch_set_v1(KEYS, indices(0, 1)) == [True, True]
    for rank, bytes_of in zip(ranks, kept, strict=True):
        assert rank.batch_get_v1(KEYS, indices(5, 6)) == [True, True]
        assert page(rank.mem_pool_host, 5 * PAGE) == bytes_of
    assert {place_of(rank._config, "kv", rank.mem_pool_host).rank for rank in ranks} == set(range(8))


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "another"},
        {"tp_size": 2},
        {"pp_size": 2},
        {"extra": {"weights_digest": "new"}},
    ],
    ids=str,
)
def test_only_the_same_model_and_shape_shares(daemon: Daemon, other: dict[str, Any]) -> None:
    """A second engine like the first is served; another model, other weights or another parallel
    shape is not."""
    stored(daemon, mha("page_first"), model_name="same")
    assert backend(daemon.target, mha("page_first"), model_name="same").batch_exists(KEYS) == 2
    assert backend(daemon.target, mha("page_first"), **{"model_name": "same"} | other).batch_exists(KEYS) == 0


def start(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Publishes SGLang's start configuration as its own processes do; changed: values that differ."""
    words = {
        "model": {
            "model_path": "org/model",
            "kv_cache_dtype": "fp8_e4m3",
            "json_model_override_args": "{}",
            "revision": None,
        },
        "spec": {"speculative_draft_model_path": "org/draft"},
        "lora": {"lora_paths": None},
    }
    bags = {name: _ConfigBag(name) for name in words}
    for name, leaves in words.items():
        for leaf, value in leaves.items():
            bags[name]._set(leaf, changed.get(leaf, value))
    monkeypatch.setattr(get_context(), "_config_bags", bags)


@pytest.mark.parametrize(
    "other",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"model_path": "org/model-2"},
        {"revision": "v2"},
        {"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'},
        {"speculative_draft_model_path": "org/draft-2"},
    ],
    ids=str,
)
def test_only_the_same_start_shares(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    """Engines of one served name share only if started alike. No pool shows the fp8 type of its
    bytes, nor the weights and rotations behind them."""
    fp8 = {"model_name": f"start {other}"}
    start(monkeypatch)
    stored(daemon, mha("page_first", dtype=torch.uint8), **fp8)
    assert backend(daemon.target, mha("page_first", dtype=torch.uint8), **fp8).batch_exists(KEYS) == 2
    start(monkeypatch, **other)
    assert backend(daemon.target, mha("page_first", dtype=torch.uint8), **fp8).batch_exists(KEYS) == 0


def test_only_the_same_weights_share(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Changed weights or a changed adapter in the same directory share nothing. With a given digest
    the path does not matter."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    start(monkeypatch, model_path=str(tmp_path))
    stored(daemon, mha("page_first"), model_name="files")
    os.utime(weights, (1, 1))
    assert backend(daemon.target, mha("page_first"), model_name="files").batch_exists(KEYS) == 0
    adapter = tmp_path / "adapter_model.safetensors"
    adapter.write_bytes(b"one")
    start(monkeypatch, lora_paths=[LoRARef(lora_name="a", lora_path=str(tmp_path))])
    stored(daemon, mha("page_first"), model_name="adapters")
    assert backend(daemon.target, mha("page_first"), model_name="adapters").batch_exists(KEYS) == 2
    os.utime(adapter, (1, 1))
    assert backend(daemon.target, mha("page_first"), model_name="adapters").batch_exists(KEYS) == 0
    known: dict[str, Any] = {"model_name": "files", "extra": {"weights_digest": "one"}}
    stored(daemon, mha("page_first"), **known)
    start(monkeypatch, model_path="/elsewhere")
    assert backend(daemon.target, mha("page_first"), **known).batch_exists(KEYS) == 2


def test_only_the_same_memory_shares(daemon: Daemon) -> None:
    """Another layout, dtype or number of heads shares nothing, even if the page has the same length."""
    stored(daemon, mha("page_first"), model_name="memory")
    others = [mha("page_head"), mha("layer_first"), mha("page_first", dtype=torch.float16), mha("page_first", heads=4)]
    assert [backend(daemon.target, pool, model_name="memory").batch_exists(KEYS) for pool in others] == [0] * 4


def test_mla_has_one_writer(daemon: Daemon) -> None:
    """Of a replicated pool only the storage writer's sets are stored; every rank reads its pages."""
    ranks = [
        backend(daemon.target, mla("page_first"), is_mla=True, model_name="mla", tp_rank=rank, tp_size=2)
        for rank in (0, 1)
    ]
    fill(ranks[1].mem_pool_host, seed=9)
    assert ranks[1].batch_set_v1(KEYS, indices(0, 1)) == [False, False]
    assert ranks[0].batch_exists(KEYS) == ranks[1].batch_exists(KEYS) == 0
    fill(ranks[0].mem_pool_host, seed=8)
    assert ranks[0].batch_set_v1(KEYS, indices(0, 1)) == [True, True]
    assert ranks[1].batch_get_v1(KEYS, indices(3, 4)) == [True, True]
    assert page(ranks[1].mem_pool_host, 3 * PAGE) == page(ranks[0].mem_pool_host, 0)


def test_dcp_has_a_writer_for_each_shard(daemon: Daemon) -> None:
    """With decode context parallelism each shard has one writer, in the first group, and bytes of its own."""

    def rank(tp: int) -> Any:
        shape = {"tp_rank": tp, "tp_size": 4, "dcp_size": 2, "dcp_rank": tp % 2, "logical_page_size": 2 * PAGE}
        return backend(
            daemon.target, mla("page_first", dcp_size=2, dcp_rank=tp % 2), is_mla=True, model_name="dcp", **shape
        )

    ranks = [rank(tp) for tp in range(4)]
    wide = 2 * PAGE
    for seed, one in enumerate(ranks):
        fill(one.mem_pool_host, seed=seed)
    assert [one.batch_set_v1(["a"], indices(0, size=wide)) for one in ranks] == [[True], [True], [False], [False]]
    for one, writer in ((ranks[2], ranks[0]), (ranks[3], ranks[1])):
        assert one.batch_get_v1(["a"], indices(2, size=wide)) == [True]
        assert page(one.mem_pool_host, 2 * wide) == page(writer.mem_pool_host, 0)
    assert page(ranks[0].mem_pool_host, 0) != page(ranks[1].mem_pool_host, 0)


def test_pages_know_what_stands_before_them(daemon: Daemon) -> None:
    """With prefix keys a later batch's pages follow the earlier ones; without them a batch begins a chain."""
    known = {place for place, _ in flushed(daemon)}
    pool = mha("page_first")
    made = stored(daemon, pool, model_name="chain")
    assert made.batch_set_v1(["c", "d"], indices(2, 3), HiCacheStorageExtraInfo(prefix_keys=["a", "b"])) == [True] * 2
    assert made.batch_set_v1(["x"], indices(4)) == [True]
    metas = {m["hash"].tobytes(): m for place, m in flushed(daemon) if place not in known}
    at = sorted(int(m["position"]) for m in metas.values())
    roots = [m for m in metas.values() if not m["parent"].any()]
    assert at == [0, 0, 1, 2, 3] and len(roots) == 2
    assert all(
        int(metas[m["parent"].tobytes()]["position"]) == int(m["position"]) - 1 for m in metas.values() if m["position"]
    )


def test_what_is_wrong_is_said_at_the_start(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown option, a model without a name and an unsupported SGLang are refused with a sentence."""
    with pytest.raises(ConfigError, match="hicache-storage-backend-extra-config.tarket"):
        backend(daemon.target, extra={"tarket": "x"})
    with pytest.raises(ConfigError, match="name the model"):
        backend(daemon.target, mha("page_first"), model_name=None)
    for module in (face, sglang.version):
        monkeypatch.setattr(module, "__version__", "0.6.0")
    for make in (lambda: package.TierdHiCache, lambda: face.TierdHiCache(config(daemon.target))):
        with pytest.raises(Unsupported, match=r"sglang 0\.6\.0: tierd supports sglang>=0\.5,<0\.6"):
            make()


def test_operators_see_the_engine() -> None:
    """`tierctl engines` shows engine, version, model, page size, dtype, layout and rank."""
    given = config("/nowhere", tp_rank=1, tp_size=2)
    words = facts_of(given, options_of(given), PointerPages(mha("page_first"))).words()
    seen = {name: words[name] for name in ("engine", "model", "tokens_per_block", "dtype", "layout", "ranks")}
    assert seen == {
        "engine": "sglang",
        "model": "m",
        "tokens_per_block": str(PAGE),
        "dtype": "bfloat16",
        "layout": "page_first",
        "ranks": "1/2",
    }
    assert words["version"] == sglang.version.__version__
