"""The parts of TierdConnector against vLLM's own classes, without an engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import torch
import vllm
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

import tierd.integrations.vllm as face
from tierd.core.formats.model import Need
from tierd.errors import ConfigError, Unsupported
from tierd.integrations.pieces import copy_in, copy_out
from tierd.integrations.vllm.identity import files_of, kernels
from tierd.integrations.vllm.memory import KVMemory
from tierd.integrations.vllm.options import ConnectorOptions
from tierd.integrations.vllm.scheduler import _runs
from tierd.integrations.vllm.spaces import (
    block_bytes,
    check_supported,
    facts_of,
    is_replicated,
    spaces_of,
    step_tokens,
)
from tierd.integrations.vllm_plugin import register

LAYERS, BLOCKS, HEADS, TOKENS, HEAD = 3, 8, 2, 32, 64
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32)
NAMES = [f"layer.{i}" for i in range(LAYERS)]


def kv_config(*specs: Any, **more: Any) -> Any:
    """The fields of a KVCacheConfig that tierd reads."""
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES) for spec in specs]
    return SimpleNamespace(
        **{"kv_cache_groups": groups, "num_blocks": BLOCKS, "kv_cache_layout": "LBNHC", "hash_block_size": TOKENS}
        | more
    )


def config(**more: Any) -> Any:
    """The fields of a VllmConfig that tierd reads."""
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "tensor_parallel_size": 1,
        "world_size": 1,
    }
    cache = {
        "calculate_kv_scales": False,
        "cache_dtype": "auto",
        "prefix_caching_hash_algo": "sha256_cbor",
        "enable_prefix_caching": True,
    }
    model = {"model": "m", "revision": None, "quantization": None, "dtype": torch.float32}
    model |= {"hf_config": LlamaConfig(), "max_model_len": 4096, "enable_sleep_mode": False}
    transfer = {"kv_load_failure_policy": "recompute", "is_kv_consumer": True, "is_kv_producer": True}
    parts = {"kv_transfer_config": transfer, "parallel_config": parallel, "cache_config": cache, "model_config": model}
    parts |= {"attention_config": {"backend": None}, "scheduler_config": {"async_scheduling": False}}
    return SimpleNamespace(
        **{name: SimpleNamespace(**part | {k: v for k, v in more.items() if k in part}) for name, part in parts.items()}
    )


def caches(layout: KVCacheLayout, *, parts: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Layers of logical shape [blocks * parts, heads, tokens / parts, content], in the layout's order."""
    shape = (LAYERS, BLOCKS * parts, HEADS, TOKENS // parts, 2 * HEAD)
    raw = np.random.default_rng(seed).random([shape[i] for i in layout.value], dtype=np.float32)
    whole = torch.from_numpy(raw).permute(*np.argsort(layout.value).tolist())
    return dict(zip(NAMES, whole, strict=True))


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("parts", [1, 2])
def test_every_layout_comes_back(layout: KVCacheLayout, parts: int) -> None:
    """A block copied between two memories of one layout is equal there, and no other block changes."""
    kv = kv_config(FULL)
    one, other = caches(layout, parts=parts), caches(layout, parts=parts, seed=1)
    before = {name: tensor.clone() for name, tensor in other.items()}
    page = np.zeros(block_bytes(kv.kv_cache_groups[0]), dtype=np.uint8)
    copy_in(KVMemory(one, kv).pieces(0, 5), page)
    copy_out(page, KVMemory(other, kv).pieces(0, 2))
    for name in NAMES:
        assert torch.equal(other[name][2 * parts : 3 * parts], one[name][5 * parts : 6 * parts])
        rest = [i for i in range(BLOCKS * parts) if i // parts != 2]
        assert torch.equal(other[name][rest], before[name][rest])


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_kernels_blocks_are_not_seen(layout: KVCacheLayout) -> None:
    """A block has the same bytes in tierd whether or not a backend splits it; both share a namespace."""
    kv = kv_config(FULL)
    one, cut = caches(layout), caches(layout, parts=2, seed=1)
    page = np.zeros(block_bytes(kv.kv_cache_groups[0]), dtype=np.uint8)
    copy_in(KVMemory(one, kv).pieces(0, 5), page)
    copy_out(page, KVMemory(cut, kv).pieces(0, 2))
    for name in NAMES:
        assert torch.equal(torch.cat([cut[name][4], cut[name][5]], dim=1), one[name][5])


def test_latent_attention_comes_back() -> None:
    """The one head of latent attention is equal on all ranks: one namespace serves all, bit by bit."""
    latent = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    kv = kv_config(latent)
    (space,) = spaces_of(config(tensor_parallel_size=4), kv, ConnectorOptions())
    assert space.spec.rank_count == 1 and is_replicated(kv) and not is_replicated(kv_config(FULL, latent))
    mixed = spaces_of(config(tensor_parallel_size=4), kv_config(FULL, latent), ConnectorOptions())
    assert [space.spec.rank_count for space in mixed] == [4, 4]  # each rank looks up all groups under its own rank
    one, other = ({name: torch.randn(BLOCKS, 1, TOKENS, 576).bfloat16() for name in NAMES} for _ in range(2))
    page = np.zeros(space.spec.block_bytes, dtype=np.uint8)
    copy_in(KVMemory(one, kv).pieces(0, 1), page)
    copy_out(page, KVMemory(other, kv).pieces(0, 6))
    assert all(
        torch.equal(other[name][6], one[name][1]) and not torch.equal(other[name][5], one[name][5]) for name in NAMES
    )


def test_memory_that_is_not_what_was_said() -> None:
    """Tensors of another size than in vLLM's own books are refused, not stored."""
    with pytest.raises(Unsupported, match="in vLLM's own books"):
        KVMemory({name: tensor[:, :1] for name, tensor in caches(KVCacheLayout.LBHNC).items()}, kv_config(FULL))
    with pytest.raises(Unsupported, match="use TierdTier"):
        KVMemory({name: tensor[:-1] for name, tensor in caches(KVCacheLayout.LBHNC).items()}, kv_config(FULL))


def test_names_are_those_that_vllm_gives_larger_blocks() -> None:
    """A group with blocks of several hashed pieces names them as vLLM does."""
    hashes = [bytes([i]) for i in range(7)]
    space = spaces_of(config(), kv_config(FULL, hash_block_size=16), ConnectorOptions())[0]
    assert list(space.names(hashes, tokens=1000)) == list(BlockHashListWithBlockSize(hashes, 16, 32)[:])
    assert space.names(hashes, tokens=64 + 31) == (bytes([1]), bytes([3]))


def _hashes(**more: Any) -> list[bytes]:
    hasher = get_request_block_hasher(32, sha256_cbor)
    return list(
        Request("r", list(range(100)), SamplingParams(max_tokens=1), None, block_hasher=hasher, **more).block_hashes
    )


def test_adapters_and_salts_are_in_the_hashes() -> None:
    """Adapters with other names, and other salts, share no block, from the first block on."""
    init_none_hash(sha256_cbor)
    adapters = [LoRARequest(name, number, "/nowhere") for number, name in enumerate(("one", "two"), start=1)]
    kinds = [
        _hashes(),
        *(_hashes(lora_request=lora) for lora in adapters),
        *(_hashes(cache_salt=salt) for salt in "ab"),
    ]
    assert all(len(kind) == 3 for kind in kinds) and _hashes() == kinds[0]
    assert len({name for kind in kinds for name in kind}) == sum(map(len, kinds))


def test_what_divides_namespaces() -> None:
    """Anything that changes a block's bytes, or its hash's meaning, opens another namespace."""
    window = SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32, sliding_window=96
    )
    plain, options = (config(), kv_config(FULL)), ConnectorOptions()
    named = [
        spaces_of(*plain, options),
        spaces_of(config(dtype=torch.bfloat16), kv_config(FULL), options),
        spaces_of(config(cache_dtype="fp8"), kv_config(FULL), options),
        spaces_of(config(revision="r2"), kv_config(FULL), options),
        spaces_of(config(tensor_parallel_size=2), kv_config(FULL), options),
        spaces_of(config(prefix_caching_hash_algo="sha256"), kv_config(FULL), options),
        spaces_of(config(), kv_config(FULL, kv_cache_layout="LBHNC"), options),
        spaces_of(*plain, ConnectorOptions(model="other")),
        spaces_of(*plain, ConnectorOptions(weights_digest="w2")),
        spaces_of(*plain, options, salt="s"),
        spaces_of(config(hf_config=LlamaConfig(rope_theta=5e5)), kv_config(FULL), options),
        spaces_of(config(hf_config=_committed("c2")), kv_config(FULL), options),
        spaces_of(config(backend="FLASHINFER"), kv_config(FULL), options),
        spaces_of(config(), kv_config(window), options),
    ]
    assert len({str(spaces[0].spec) for spaces in named}) == len(named)
    assert spaces_of(*plain, options) == named[0]
    assert (named[-1][0].need, named[-1][0].need_tokens) == (Need.LAST_TOKENS, 95)


def test_kernels_divide_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's AMX kernels tile K and V and its ROCm kernels may shuffle them under one layout's
    name: each way is another namespace."""
    said = []
    for found in ({"amx_tile": False}, {"amx_tile": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        kernels.cache_clear()
        said.append(spaces_of(config(), kv_config(FULL), ConnectorOptions())[0].spec)
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    for shuffled in "01":
        monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", shuffled)
        kernels.cache_clear()
        said.append(spaces_of(config(), kv_config(FULL), ConnectorOptions())[0].spec)
    kernels.cache_clear()
    assert len(set(map(str, said))) == len(said)


def _committed(commit: str) -> LlamaConfig:
    found = LlamaConfig()
    found._commit_hash = commit
    return found


def _scaled(kind: str, *, tokens: int, at: str = "") -> Any:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
    rope |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64} if kind == "longrope" else {}
    found = config(hf_config=LlamaConfig(rope_parameters=rope, name_or_path=at), max_model_len=tokens)
    return spaces_of(found, kv_config(FULL), ConnectorOptions())


def test_how_long_a_sequence_may_be() -> None:
    """Length limits divide namespaces only if vLLM's rotary scaling depends on them; paths never do."""
    assert _scaled("longrope", tokens=2048) != _scaled("longrope", tokens=4096)
    assert _scaled("yarn", tokens=2048) == _scaled("yarn", tokens=4096, at="/elsewhere")
    assert _scaled("yarn", tokens=2048) != _scaled("linear", tokens=2048)


def test_files_of_a_local_checkpoint(tmp_path: Path) -> None:
    """Other weights in any format, or another configuration, are another model; a digest replaces
    them. An engine's files are those present when it began."""
    seen = [files_of(str(tmp_path / "m.gguf"))]
    for number, name in enumerate(("model.safetensors", "pytorch_model.bin", "config.json", "m.gguf", "README.md")):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / name).write_bytes(b"x")
        seen.append(files_of(str(tmp_path / f"{number}")))
    seen.append(files_of(str(tmp_path / "3" / "m.gguf")))
    assert [len(files) for files in seen] == [0, 1, 1, 1, 1, 0, 1] and files_of("hub/name") == ()
    first = spaces_of(config(model=str(tmp_path / "0")), kv_config(FULL), ConnectorOptions())
    (tmp_path / "0" / "model.safetensors").unlink()
    assert spaces_of(config(model=str(tmp_path / "0")), kv_config(FULL), ConnectorOptions()) == first
    named = [
        spaces_of(
            config(model=str(tmp_path / "1")), kv_config(FULL), ConnectorOptions(model="m", weights_digest=digest)
        )
        for digest in ("", "d")
    ]
    other = config(model=str(tmp_path / "2"))
    assert spaces_of(other, kv_config(FULL), ConnectorOptions(model="m")) != named[0]
    assert spaces_of(other, kv_config(FULL), ConnectorOptions(model="m", weights_digest="d")) == named[1]


def test_groups_of_different_blocks() -> None:
    """A match ends at a block end of every group; a window includes tokens that drafting computes again."""
    specs = [replace(FULL, block_size=size) for size in (32, 48)]
    window = SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32, sliding_window=65
    )
    spaces = spaces_of(config(), kv_config(*specs, hash_block_size=16), ConnectorOptions())
    assert step_tokens(spaces) == 96
    kept = spaces_of(config(), kv_config(replace(window, extra_retained_tokens=2)), ConnectorOptions())
    assert (kept[0].need, kept[0].need_tokens) == (Need.LAST_TOKENS, 66)


def test_a_worker_tells_no_seed() -> None:
    """Only the scheduler's process knows vLLM's hash seed, so workers tell `tierctl engines` none."""
    init_none_hash(sha256_cbor)
    said = {role: facts_of(config(), kv_config(FULL), role=role, rank=1).words() for role in ("scheduler", "worker")}
    assert said["scheduler"]["hash_seed"] == kv_cache_utils.get_none_hash_seed() and "hash_seed" not in said["worker"]
    assert said["worker"]["ranks"] == "1/1"


def test_null_blocks_are_not_saved() -> None:
    """Saves are the runs between null blocks, which a window has passed."""
    assert _runs([0, 0, 3, 4, 0, 6], 0, 6) == [(2, 4), (5, 6)]
    assert _runs([1, 2, 3], 1, 2) == [(1, 2)] and _runs([], 0, 0) == []


def test_what_is_not_kept_is_refused() -> None:
    """Unsupported configurations are refused before anything runs, with a remedy."""
    mamba = MambaSpec(block_size=TOKENS, shapes=((2, 4),), dtypes=(torch.float32,))
    for asked, kv, words in (
        (config(pipeline_parallel_size=2), kv_config(FULL), "pipeline_parallel_size 2"),
        (config(calculate_kv_scales=True), kv_config(FULL), "calculate_kv_scales"),
        (config(enable_sleep_mode=True), kv_config(FULL), "enable_sleep_mode"),
        (config(), kv_config(FULL, mamba), "groups of kind mamba"),
    ):
        with pytest.raises(Unsupported, match=words):
            check_supported(asked, kv)
    with pytest.raises(ConfigError, match="kv_connector_extra_config.loads"):
        ConnectorOptions.read({"loads": 1}, where="kv_connector_extra_config")


def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsupported vLLM is refused with a sentence, before tierd uses any of its interfaces."""
    monkeypatch.setattr(vllm, "__version__", "0.30.2")
    with pytest.raises(Unsupported, match=r"vllm 0\.30\.2: tierd supports vllm>=0\.31,<0\.34"):
        face.__getattr__("TierdConnector")


def test_vllm_knows_the_connector_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM finds the connector without a module path. A second registration changes nothing, and
    one in a vLLM without the factory raises nothing."""
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("TierdConnector") is face.TierdConnector
    monkeypatch.setitem(sys.modules, KVConnectorFactory.__module__, None)
    register()
