"""Payloads that nobody has written, under a checksum that holds: decoders refuse them by name."""

from __future__ import annotations

import numpy as np
import pytest

from tests.depth import count
from tests.unit.codecs.calibrated import decode, encode
from tests.unit.codecs.test_blocks import each_codec, narrow_groups, noise, shape_of
from tierd.codecs import block as block_module
from tierd.codecs.block import HEADER, IDENTITY, Codec
from tierd.codecs.named import BY_NUMBER
from tierd.codecs.values import Bytes
from tierd.errors import CorruptRecord

__all__ = ["narrow_groups"]  # a fixture for this module too
TOKENS = (1, 16, 33, 64, 130)
LIKELY = (0, 1, 127, 128, 255)


def damaged(good: Bytes, chance: np.random.Generator) -> Bytes:
    """A payload that is shorter, longer, or has other bytes, often at its head."""
    payload, way = good[HEADER.itemsize :].copy(), chance.integers(5)
    if way == 0:
        payload = payload[: chance.integers(len(payload) + 1)]
    elif way == 1:
        payload = np.concatenate((payload, chance.integers(0, 256, chance.integers(1, 40), np.uint8)))
    else:
        reach = min(len(payload), 64) if way == 2 else len(payload)
        for place in chance.integers(reach, size=chance.integers(1, 9)):
            payload[place] = chance.choice((*LIKELY, int(chance.integers(256))))
    return payload


def framed(good: Bytes, payload: Bytes) -> Bytes:
    """The payload under the header of the good block, with length and checksum of its own."""
    data = np.concatenate((good[: HEADER.itemsize], payload))
    header = data[: HEADER.itemsize].view(HEADER)
    header["payload"] = len(payload)
    header["checksum"] = block_module._checksum(header.tobytes(), payload)
    return data


@each_codec
@pytest.mark.parametrize(("dtype", "layout"), [("bfloat16", "NHD"), ("float16", "HND")])
def test_a_crafted_payload_decodes_or_is_refused(codec: Codec, dtype: str, layout: str) -> None:
    """Any payload gives a block of its shape, or CorruptRecord. Nothing else is raised."""
    chance, tried, refused = np.random.default_rng(3), 0, 0
    rounds = count(test=40, nightly=4_000, weekly=40_000)
    for tokens in TOKENS:
        shape = shape_of(layers=1, tokens=tokens, dtype=dtype, layout=layout)
        good = encode(codec, noise(shape), shape)
        if good[: HEADER.itemsize].view(HEADER)["codec"][0] == IDENTITY:
            continue  # it would become no shorter
        tried += rounds
        for _ in range(rounds):
            try:
                found = decode(framed(good, damaged(good, chance)), BY_NUMBER)
            except CorruptRecord:
                refused += 1
            else:
                assert len(found.block) == shape.block_bytes and found.codec == codec.number
    assert refused or not tried
