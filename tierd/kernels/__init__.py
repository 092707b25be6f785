"""Attention over pages. `reference` is the plain version that runs anywhere and that every faster kernel is checked against."""

from __future__ import annotations

from tierd.kernels.reference import Attended, PagedAttention, PagedBatch, merge_attention, paged_attention

__all__ = ["Attended", "PagedAttention", "PagedBatch", "merge_attention", "paged_attention"]
