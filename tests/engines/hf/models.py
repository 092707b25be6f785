"""Small models of random weights whose cache contents decide their answers, and prompts for them."""

from __future__ import annotations

import random
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW_TOKENS = 48


def llama(*, seed: int = 0, attention: str = "sdpa", dtype: str = "float32", **shape: Any) -> Any:
    """A LlamaForCausalLM; the same seed gives the same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _made(LlamaForCausalLM, LlamaConfig(**SHAPE | shape), seed=seed, attention=attention).to(_torch_dtype(dtype))


def sliding(*, seed: int = 0, attention: str = "sdpa") -> Any:
    """A Gemma3 whose layers, except one, attend to a window of WINDOW_TOKENS tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(**SHAPE, sliding_window=WINDOW_TOKENS, layer_types=layers, query_pre_attn_scalar=32)
    return _made(Gemma3ForCausalLM, config, seed=seed, attention=attention)


def latent(*, seed: int = 0) -> Any:
    """A DeepseekV2 with latent attention; its V is narrower than its K."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    shape = SHAPE | {"num_key_value_heads": SHAPE["num_attention_heads"]}
    del shape["head_dim"]
    latent = {"kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 16}
    config = DeepseekV2Config(
        **shape, **latent, n_routed_experts=2, n_shared_experts=1, first_k_dense_replace=SHAPE["num_hidden_layers"]
    )
    return _made(DeepseekV2ForCausalLM, config, seed=seed, attention="sdpa")


def prompt(seed: int, length: int = 101) -> Any:
    """Random tokens, [1, length]."""
    import torch

    rng = random.Random(seed)
    return torch.tensor([[rng.randrange(3, 500) for _ in range(length)]])


def padded(*rows: Any) -> tuple[Any, Any]:
    """(input_ids, attention_mask) of rows [1, n] of different lengths, padded on the left."""
    import torch

    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
    return ids, mask


def _made(kind: Any, config: Any, *, seed: int, attention: str) -> Any:
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config._attn_implementation = attention
    return kind(config).eval()


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
