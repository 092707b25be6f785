"""vLLM's LoRA on the CPU, of batches in which some requests have an adapter and others none: `mend()`, in the process of an engine.

Purpose: upstream's CPU operators take a token's adapter for a row of all that are loaded, and -1, which means none, for the last row: beside adapters the base model
says something else than alone. Its GPU kernels pass over -1, and so does this. Non-purpose: speed. For tests alone.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

_shrink = lora_ops.bgmv_shrink


def mend() -> bool:
    """From now on; adapters have no part in tokens that have none."""
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = _passing_over
    return True


def _passing_over(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
    _shrink(inputs, weights, output, indices, scaling)
    output[indices < 0] = 0
