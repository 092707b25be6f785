"""Small models of random weights whose KV cache decides their answers; with `dummy` weights it does
not."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.engines.vllm.engine import in_fork

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BENCH = SHAPE | {
    "vocab_size": 2048,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "initializer_range": 0.05,
}
WINDOW_TOKENS = 96
"""The window of the sliding layers."""
RANK = 8
"""The rank of adapters."""

MAKE_S = 300.0


def make_in_fork(kind: str, directory: Path) -> Path:
    """Runs write_model in a fork: this process forks engines, and torch that has computed breaks in forks."""
    with tempfile.TemporaryFile() as log:
        process, _ = in_fork(partial(_make, kind, directory), {}, log=log.fileno())
        process.join(MAKE_S)
        log.seek(0)
        assert process.exitcode == 0, log.read().decode()
    return directory


def _make(kind: str, directory: Path, _: Connection) -> None:
    write_model(kind, directory)


def write_model(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """Writes a checkpoint that vLLM loads. kind: llama, hybrid (sliding and full layers), sliding
    (only such), mla (latent attention), bench (12 layers)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config_of(kind)).float()
    model.save_pretrained(directory)
    return directory


def write_adapter(directory: Path, *, seed: int) -> Path:
    """Writes a LoRA adapter of the llama model in peft's format; random weights change answers.
    Needs no torch."""
    rng = np.random.default_rng(seed)
    hidden, heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    kv = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    sizes = {"q_proj": (hidden, heads), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (heads, hidden)}
    weights = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                weights[f"{place}.{part}.weight"] = rng.normal(0, 0.3, shape).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    words = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(words | {"target_modules": list(sizes)}))
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


def _config_of(kind: str) -> Any:
    import transformers

    if kind in ("llama", "bench"):
        return transformers.LlamaConfig(**(SHAPE if kind == "llama" else BENCH))
    if kind == "sliding":
        return transformers.MistralConfig(**SHAPE, sliding_window=WINDOW_TOKENS)
    if kind == "hybrid":
        layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        return transformers.Gemma3TextConfig(
            **SHAPE | {"num_hidden_layers": 6},
            sliding_window=WINDOW_TOKENS,
            layer_types=layers,
            query_pre_attn_scalar=64,
        )
    latent = {
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
    }
    shape = SHAPE | {"num_key_value_heads": SHAPE["num_attention_heads"]}
    del shape["head_dim"]
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return transformers.DeepseekV2Config(**shape, **latent, **experts, first_k_dense_replace=SHAPE["num_hidden_layers"])
