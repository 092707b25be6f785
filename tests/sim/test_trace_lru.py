"""LRU through the real core, on one tier, against plain LRU and against the published column.

In all three, partial last blocks count as blocks of full size, and requests use blocks last to
first.
"""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tierd.core.core import Core
from tierd.core.formats.model import TierKind, TierSpec
from tierd.core.instant_driver import InstantDriver, Sequence
from tierd.policies.named import NamedPolicies

TOKENS = 512
PAGE_BYTES = 4096
Requests = list[tuple[float, int, list[int]]]
"""(seconds, tokens, block ids)."""

PUBLISHED = {
    ("conversation_a", 0.001): 4.10,
    ("conversation_a", 0.01): 4.52,
    ("conversation_a", 0.05): 13.15,
    ("conversation_a", 0.10): 22.09,
    ("conversation_a", 0.25): 31.79,
    ("agent_a", 0.01): 14.08,
}
"""Prefix-token hit ratio of LRU in per cent, from shared/traces/README.md."""


@cache
def load(path: Path) -> Requests:
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["timestamp"] / 1000, row["input_length"], row["hash_ids"]) for row in rows]


def distinct(requests: Requests) -> int:
    return len({block for _, _, blocks in requests for block in blocks})


def sequence(tokens: int, blocks: list[int]) -> Sequence:
    """The trace's ids as hashes: an id names a block and all blocks before it, as a hash does."""
    words = np.zeros((len(blocks), 4), "<u8")
    words[:, 0] = np.array(blocks, np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    words[:, 1] = np.array(blocks) + 1
    hashes = words.view(np.uint8).reshape(-1, 32)
    return Sequence(1, hashes, tokens=tokens, tokens_per_block=TOKENS, block_bytes=PAGE_BYTES)


def core_hits(requests: Requests, pages: int) -> list[int]:
    """Per request: tokens that the core hits."""
    tier = TierSpec(
        TierKind.HOST, 0, pages * PAGE_BYTES, pages * PAGE_BYTES, high_watermark=1.0, low_watermark=1.0, eviction="lru"
    )
    core = Core([tier], policies=NamedPolicies(), session_share=1.0)
    driver = InstantDriver(core, tier_count=1)
    return [driver.request(sequence(tokens, blocks), now=now)[0] for now, tokens, blocks in requests]


def plain_hits(requests: Requests, pages: int) -> list[int]:
    """The same from a list in order of use, which a request's blocks enter last to first."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for _, tokens, blocks in requests:
        found = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
        hits.append(min(found * TOKENS, tokens))
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
            if len(held) > pages:
                held.popitem(last=False)
    return hits


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_every_request_finds_what_plain_lru_finds(shared, share):
    """On the first requests of the chat trace, each request's hits equal those of plain LRU."""
    requests = load(shared / "traces" / "conversation_a.jsonl.gz")[:800]
    pages = round(share * distinct(requests))
    assert core_hits(requests, pages) == plain_hits(requests, pages)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "share"), PUBLISHED)
def test_the_published_column_is_met_to_the_last_digit(shared, name, share):
    """The prefix-token hit ratio over the whole trace equals the printed one."""
    requests = load(shared / "traces" / f"{name}.jsonl.gz")
    pages = int(share * distinct(requests))
    hits = core_hits(requests, pages)
    ratio = 100 * sum(hits) / sum(tokens for _, tokens, _ in requests)
    assert f"{ratio:.2f}" == f"{PUBLISHED[name, share]:.2f}"
