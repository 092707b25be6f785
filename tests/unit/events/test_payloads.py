"""The format of KV events: vLLM's bytes in both shapes, other engines' events, and invalid payloads."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import CorruptRecord
from tierd.events.payloads import Batch, Cleared, Event, Removed, Stored, decode, encode, short_hash

NAMES = [bytes([i]) * 32 for i in (1, 2, 3)]
ONE, TWO, THREE = (short_hash(name) for name in NAMES)
SAMPLE = Batch(
    1.5,
    (
        Stored((TWO, THREE), ONE, tuple(range(8)), 4, "CPU", "ad"),
        Stored((ONE,), None, (), 0, "STORAGE", None, 1),
        Removed((ONE,), "GPU"),
        Removed((ONE,), "CPU", 2),
        Cleared(),
    ),
    0,
)
MAP = bytes.fromhex(
    "93cb3ff80000000000009588a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf0202020202020202cf0303030303030303b1706172656e"
    "745f626c6f636b5f68617368cf0101010101010101a9746f6b656e5f696473980001020304050607aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d65646975"
    "6da3435055a96c6f72615f6e616d65a2616489a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf0101010101010101b1706172656e745f"
    "626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6500a76c6f72615f6964c0a66d656469756da753544f52414745a96c6f72615f6e616d"
    "65c0a967726f75705f6964780183a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf0101010101010101a66d656469756da347505584"
    "a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf0101010101010101a66d656469756da3435055a967726f75705f6964780281a47479"
    "7065b0416c6c426c6f636b73436c656172656400"
)
"""SAMPLE by the encoder of vLLM 0.32.0."""
WHOLE = bytes.fromhex(
    "93cb3ff80000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c42001010101010101010101010101010101010101010101"
    "01010101010101010101b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739107aa626c6f636b5f73697a6501a76c6f72615f6964c0a66d656469"
    "756da3475055a96c6f72615f6e616d65c0c0"
)
"""One event with whole hashes, by the same encoder."""
ARRAY: list[Any] = [
    1.5,
    [
        ["BlockStored", [TWO, THREE], ONE, list(range(8)), 4, None, "CPU", "ad"],
        ["BlockStored", [ONE], None, [], 0, None, "STORAGE", None, None, 1],
        ["BlockRemoved", [ONE], "GPU"],
        ["BlockRemoved", [ONE], "CPU", 2],
        ["AllBlocksCleared"],
    ],
    0,
]

hashes = st.lists(st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(min_size=1, max_size=64)), max_size=4).map(
    tuple
)
media = st.sampled_from(["GPU", "CPU", "STORAGE", None])
groups = st.one_of(st.none(), st.integers(0, 9))
stored = st.builds(
    Stored,
    hashes,
    st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
    st.integers(0, 1 << 20),
    media,
    st.one_of(st.none(), st.text(max_size=5)),
    groups,
)
events = st.one_of(stored, st.builds(Removed, hashes, media, groups), st.just(Cleared()))


def test_map_is_what_vllm_writes() -> None:
    """The payload equals that of vLLM's own encoder byte for byte, for integer and for whole hashes."""
    assert encode(SAMPLE) == MAP and decode(MAP) == SAMPLE
    whole = Batch(1.5, (Stored((NAMES[0],), None, (7,), 1, "GPU"),))
    assert encode(whole) == WHOLE and decode(WHOLE) == whole


def test_array_has_the_fields_in_their_old_order() -> None:
    """The older shape has the type, then the fields in order, without empty fields at the end."""
    payload = encode(SAMPLE, shape="array")
    assert msgpack.unpackb(payload) == ARRAY and decode(payload) == SAMPLE


@pytest.mark.parametrize("shape", ["map", "array"])
@given(st.lists(events, max_size=5), st.one_of(st.none(), st.integers(0, 64)))
def test_what_is_written_is_read_back(shape: Any, told: list[Event], rank: int | None) -> None:
    """Both shapes decode to the events that were encoded."""
    batch = Batch(2.25, tuple(told), rank)
    assert decode(encode(batch, shape=shape)) == batch


def test_other_publishers_are_understood() -> None:
    """Unknown fields are skipped and missing ones are empty, also with mixed shapes and SGLang's values."""
    stored = {"type": "BlockStored", "block_hashes": [-5], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    raw = [
        3,
        [stored | {"medium": "CPU_PINNED", "session_id": "x", "locality": "LOCAL"}, ["BlockRemoved", [b"ab"], None]],
    ]
    assert decode(msgpack.packb(raw)) == Batch(
        3.0, (Stored((-5,), None, (1,), 1, "CPU_PINNED"), Removed((b"ab",), None)), None
    )


@pytest.mark.parametrize(
    "raw",
    [
        5,
        [1.5],
        [1.5, [{"type": "BlockMoved", "block_hashes": []}]],
        [1.5, [["BlockMoved", []]]],
        [1.5, [{"block_hashes": []}]],
        [1.5, [{"type": "BlockStored", "block_hashes": [1]}]],
        [1.5, [["BlockRemoved", ["text"], "CPU"]]],
        [1.5, [[]]],
        ["now", []],
    ],
)
def test_what_is_no_batch_is_refused(raw: Any) -> None:
    """Another structure raises CorruptRecord and no other exception."""
    with pytest.raises(CorruptRecord, match="no batch of events"):
        decode(msgpack.packb(raw))


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    """Any bytes decode to a batch or raise CorruptRecord."""
    for payload in (data, MAP[: len(data)], MAP[:40] + data + MAP[40 + len(data) :]):
        try:
            decode(payload)
        except CorruptRecord:
            continue
