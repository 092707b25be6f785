"""Attention over pages. `reference` runs anywhere; tests check every faster kernel against it."""

from __future__ import annotations

from tierd.kernels.reference import Attended, PagedAttention, PagedBatch, merge_attention, paged_attention

__all__ = ["Attended", "PagedAttention", "PagedBatch", "merge_attention", "paged_attention"]
