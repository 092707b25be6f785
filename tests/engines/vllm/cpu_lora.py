"""`mend()`, called in an engine, mends vLLM's LoRA on the CPU for batches with and without
adapters.

Purpose: upstream's CPU operators index all loaded adapters by a token's adapter. So -1, which means
none, selects the last one. Beside adapters the base model then answers otherwise than alone.
Upstream's GPU kernels skip -1, and so does this. Non-purpose: speed. For tests only.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

_shrink = lora_ops.bgmv_shrink


def mend() -> bool:
    """Patches vLLM from now on: adapters do not affect tokens that have none."""
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = _passing_over
    return True


def _passing_over(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
    _shrink(inputs, weights, output, indices, scaling)
    output[indices < 0] = 0
