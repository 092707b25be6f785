"""Prompts of token files: their hashes by each rule, and the choice of the namespace."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tierd._proto import admin_pb2 as pb
from tierd.cli.prompts import Space, chosen, spaces_of, vllm_hashes
from tierd.core.formats.block import fold_hashes, hash_tokens
from tierd.errors import InvalidArgument, Unsupported

TOKENS = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 9]
DIGEST = bytes(range(32))
TEXT: dict[str, Any] = {"digest": DIGEST.hex(), "spec": {"tokens_per_block": 4}}
VLLM = [
    "d7d6ac03ff7fccb18d6cfb4700e0614073c32b0f652d8c111d4b1168f881fa58",
    "6ddc510585934dfc57ac4897314de28929b7883b094e4c590ed71e1e2e529f42",
]
"""By vLLM 0.32, sha256_cbor, seed 7, of the whole blocks of 4."""


def engine(**words: str) -> dict[str, str]:
    """The words of vLLM's scheduler."""
    return {"engine": "vllm", "hash_algorithm": "sha256_cbor", "hash_seed": "7", "tokens_per_block": "4"} | words


def test_vllm_names_are_computed() -> None:
    """Hashes of whole blocks are those of vLLM, for numbers of each width."""
    assert [name.hex() for name in vllm_hashes(TOKENS, seed="7", size=4)] == VLLM


@pytest.mark.parametrize(("words", "names"), [({}, VLLM), ({"tokens_per_block": "2/4"}, None)])
def test_a_namespace_of_vllm_folds_its_names(words: dict[str, str], names: list[str] | None) -> None:
    """Blocks are named by vLLM's hash of their last piece, folded into the namespace."""
    wanted = vllm_hashes(TOKENS, seed="7", size=2)[1::2] if names is None else list(map(bytes.fromhex, names))
    found = Space(1, True, TEXT, engine(**words)).hashes(TOKENS)
    assert np.array_equal(found, fold_hashes(wanted, digest=DIGEST))


def test_a_namespace_of_the_sdk_has_a_short_last_block() -> None:
    """Without an engine the names are tierd's own chain."""
    found = Space(1, True, TEXT).hashes(TOKENS)
    assert np.array_equal(found, hash_tokens(TOKENS, digest=DIGEST, tokens_per_block=4, with_tail=True))
    assert len(found) == 3


@pytest.mark.parametrize("words", [{"hash_algorithm": "sha256"}, {"engine": "sglang", "hash_algorithm": "sglang"}])
def test_names_of_other_rules_are_refused(words: dict[str, str]) -> None:
    """A rule that cannot be computed here is an error that names it and another way."""
    with pytest.raises(Unsupported, match=rf"by {words['hash_algorithm']}.*a block's hash"):
        Space(1, True, TEXT, engine(**words)).hashes(TOKENS)


def test_a_scheduler_tells_the_seed() -> None:
    """Of the engines that opened a namespace, the one with a seed counts, in either order."""
    told = pb.SessionInfo(engine=engine(), namespaces=[1])
    other = pb.SessionInfo(engine=engine(hash_seed=""), namespaces=[1, 2])
    rows = [pb.NamespaceInfo(id=number, text=json.dumps(TEXT), current=True) for number in (1, 2, 3)]
    for sessions in ([told, other], [other, told]):
        spaces = spaces_of(rows, sessions)
        assert [one.engine.get("hash_seed", None) for one in spaces] == ["7", "", None]


def test_namespaces_to_choose_from_are_told_apart() -> None:
    """If several namespaces fit, the error shows the adapters and tenants in which they differ."""
    texts = [
        {"spec": {"model": "llama", "adapter": adapter}, "tenant": tenant}
        for adapter, tenant in (("", "a"), ("sql", "b"))
    ]
    spaces = [Space(number, True, text) for number, text in enumerate(texts, 1)]
    with pytest.raises(InvalidArgument, match=r"2 fit: 1 \(llama, a\), 2 \(llama, sql, b\); choose"):
        chosen(spaces, namespace=None, model="llama")
