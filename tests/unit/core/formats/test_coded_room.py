"""Room that encoded sequences take in a tier of memory."""

from __future__ import annotations

import pytest

from tierd.codecs.coding import Coding
from tierd.codecs.named import codec_named
from tierd.codecs.values import KVShape
from tierd.core.formats.block import KVGeometry, size_class


@pytest.mark.parametrize(("codec", "times"), [("rot-4-4", 3.67), ("rot-8-8", 1.85), ("rot-8-4", 2.5)])
@pytest.mark.parametrize("layers", [28, 32, 80])
def test_a_tier_holds_more_tokens(codec: str, times: float, layers: int) -> None:
    """Sequences of 2,048 tokens take that much less room, exact first blocks and page ends included."""
    full = KVShape(KVGeometry(layers, 8, 128, "bfloat16"), 16)
    coding = Coding(codec_named(codec), full)
    room = sum(size_class(coding.stored_bytes(16, number=i)) for i in range(128))
    assert 128 * size_class(full.block_bytes) / room >= times
