"""From the message of a put to the engine's names of its blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tierd._proto import cache_pb2 as pb
from tierd.client import About, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.client.transport.requests import put_group_message
from tierd.core.formats.block import Namespace
from tierd.errors import InvalidArgument
from tierd.events.naming import names_of
from tierd.events.router_view import Names, Space

SPEC = NamespaceSpec("m", 4, 64, adapter="lora", group="2", rank_count=2)
NAMESPACE = Namespace(5, "t", 1, 1, bytes(32), SPEC)
SPACE = Space(5, 4, 2, "lora", 2)
OPENED = OpenedNamespace(SPEC, id=5, digest=bytes(32))
HASHES = np.arange(64, dtype=np.uint8).reshape(2, 32)
TOKENS = np.arange(8, dtype="<u4")


def message(about: About | None = None, **fields: Any) -> pb.PutGroup:
    made = put_group_message(PutGroup(OPENED, HASHES, about=about, parent=b"p" * 32), with_names=True)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_what_a_client_says_arrives() -> None:
    """The engine's hashes, their parent and the tokens pass through the message unchanged."""
    names = names_of(message(About([b"one!", b"two!"], b"zero", TOKENS)), NAMESPACE)
    assert names == Names(SPACE, HASHES.tobytes(), 8, b"one!two!", 4, 1, b"zero", TOKENS.tobytes())
    assert names_of(message(About([b"a", b"b", b"c", b"d"], per_block=2)), NAMESPACE).width == 1


def test_without_words_the_parent_is_tierds() -> None:
    """A put without engine names uses tierd's hashes and parent; private pages have no names."""
    assert names_of(message(), NAMESPACE) == Names(SPACE, HASHES.tobytes(), 8, parent=b"p" * 32)
    private = put_group_message(PutGroup.private(OPENED, 2), with_names=True)
    assert names_of(private, NAMESPACE).hashes == b""


@pytest.mark.parametrize(
    "fields",
    [
        {"engine_hashes": b"abc"},
        {"engine_hashes": b"x" * 130},
        {"engine_hashes": b"ab", "engine_parent": b"x" * 65},
        {"engine_hashes": b"abcdef", "engine_per_block": 3},
        {"engine_per_block": 2},
        {"token_ids": bytes(28)},
        {"token_ids": bytes(31)},
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any]) -> None:
    """Hashes of unequal or excessive length, or tokens that do not fit, raise InvalidArgument by field."""
    with pytest.raises(InvalidArgument, match="group.(engine_hashes|engine_per_block|token_ids): "):
        names_of(message(**fields), NAMESPACE)


def test_a_part_keeps_its_parent() -> None:
    """A part has the preceding hash as its parent, and only its own tokens."""
    about = About([b"a", b"b", b"c", b"d", b"e", b"f"], b"z", np.arange(12), per_block=2)
    part = about.part(1, 3, size=4)
    assert (list(part.hashes), part.parent, list(part.tokens)) == ([b"c", b"d", b"e", b"f"], b"b", list(range(4, 12)))
    assert about.part(0, 1, size=4).parent == b"z"
