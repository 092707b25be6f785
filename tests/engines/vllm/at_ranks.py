"""Functions that a test runs in each worker: `engine.ask("on_ranks", what=NAME, given=[...])`.

Purpose: tensor parallel workers are separate processes that a test cannot reach otherwise. The
first argument of each function is vLLM's worker.
"""

from __future__ import annotations

from typing import Any


def is_writer(_: Any, writers: list[int]) -> bool:
    """Lets only these ranks save; returns whether this one does."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    side: Any = get_kv_transfer_group()
    side._worker._is_writer = get_tensor_model_parallel_rank() in writers
    return bool(side._worker._is_writer)
