"""Traces as arrays."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tierd.simulator.clairvoyant import NEVER, next_uses
from tierd.simulator.sequences import Encoding, Measure, Request, numbers_of, trace_of

REQUESTS = [
    Request(0, 1000, (70, 30)),
    Request(500, 512, (70,)),
    Request(900, 40, (70, 5, 9), block_tokens=16, block_bytes=4096, namespace=3),
    Request(1500, 1100, (70, 80, 90)),
]


def test_blocks_are_numbered_by_first_appearance() -> None:
    """An id has one number per namespace."""
    trace = trace_of(REQUESTS, name="made-up")
    assert [trace.of(i).tolist() for i in range(4)] == [[0, 1], [0], [2, 3, 4], [0, 5, 6]]
    assert (len(trace), trace.distinct, trace.prompt_tokens) == (4, 7, 2652)
    assert trace.times_s.tolist() == [0.0, 0.5, 0.9, 1.5]


def test_hashes_are_distinct_and_tell_their_numbers() -> None:
    """`numbers_of` reads a block's number from its hash, and no two hashes share a word."""
    trace = trace_of([Request(0, 512 * 5000, tuple(range(5000)))], name="made-up")
    words = trace.hashes.view("<u8")
    assert numbers_of(words).tolist() == list(range(5000))
    assert all(len(np.unique(words[:, word])) == 5000 for word in range(4))


def test_a_request_is_asked_as_it_was_recorded() -> None:
    """Namespace, tokens and bytes come from the request; missing bytes from the measure, else 64 KiB."""
    trace = trace_of(REQUESTS, name="made-up")
    first, third = trace.sequence(0, Measure()), trace.sequence(2, Measure())
    assert (first.namespace, first.tokens_per_block, first.block_bytes) == (1, 512, 65536)
    assert (third.namespace, third.tokens_per_block, third.block_bytes) == (4, 16, 4096)
    assert first.put(0).blocks["length"].tolist() == [65536, 62464]
    assert trace.sequence(2, Measure(8192)).put(1).blocks["length"].tolist() == [8192, 4096]
    assert trace.sequence(0, Measure(4096, whole=True)).put(0).blocks["length"].tolist() == [4096, 4096]


def test_the_footprint_counts_each_block_once() -> None:
    """The footprint counts each distinct block once, short ones by their length or as full ones."""
    trace = trace_of(REQUESTS, name="made-up")
    full, third = 65536, 4096
    short = full * 488 // 512 + full * 76 // 512
    assert trace.distinct_bytes(Measure()) == 2 * full + short + 2 * third + third // 2
    assert trace.distinct_bytes(Measure(4096, whole=True)) == 7 * 4096


@pytest.mark.parametrize("seed", range(3))
def test_next_uses_are_those_that_a_search_finds(seed: int) -> None:
    """`next_uses` gives, for every access, the next request with the same block."""
    rng = np.random.default_rng(seed)
    requests = [Request(i, 512 * 6, tuple(rng.permutation(9)[:6].tolist())) for i in range(30)]
    trace = trace_of(requests, name="made-up")
    plain = [
        next((later for later in range(i + 1, 30) if block in trace.of(later)), NEVER)
        for i in range(30)
        for block in trace.of(i)
    ]
    assert next_uses(trace).tolist() == plain


def test_encoded_blocks_have_their_lengths() -> None:
    """The first block of a sequence and a short one keep their bytes; others have the payload's share;
    each has a header. Puts that begin later have no first block."""
    measure = Measure(encoding=Encoding(64, Fraction(1, 3)))
    trace = trace_of([Request(0, 512 * 3 + 256, (1, 2, 3, 4))], name="made-up")
    sequence = trace.sequence(0, measure)
    coded = 64 + 21846  # a third, rounded up
    assert sequence.put(0).blocks["length"].tolist() == [64 + 65536, coded, coded, 64 + 32768]
    assert sequence.put(1).blocks["length"].tolist() == [coded, coded, 64 + 32768]
    assert measure.page_bytes(65536) == coded
    assert trace.distinct_bytes(measure) == 65536 + 32768 + 2 * 21846 + 4 * 64


def test_an_encoding_never_makes_a_block_longer_than_exact() -> None:
    """A payload that would be no shorter is the block's own bytes."""
    assert Encoding(64, Fraction(9, 8)).full_bytes(1000) == 1064
