"""What a test does in each of an engine's workers: `engine.ask("on_ranks", what=NAME, given=[...])` calls a function of this module there.

Purpose: tensor parallel workers are processes of their own, which no test reaches otherwise. Each function is given vLLM's worker first.
"""

from __future__ import annotations

from typing import Any


def is_writer(_: Any, writers: list[int]) -> bool:
    """Has only these ranks store what they compute; whether this one does."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    side: Any = get_kv_transfer_group()
    side._worker._is_writer = get_tensor_model_parallel_rank() in writers
    return bool(side._worker._is_writer)
