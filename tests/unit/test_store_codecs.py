"""Codecs of stores: namespaces whose blocks stay as they are, and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.unit.core.kit import TOKENS
from tierd.codecs.named import codec_named
from tierd.codecs.values import rounded
from tierd.core.formats.block import KVGeometry, NamespaceSpec
from tierd.core.formats.meta import META
from tierd.core.forms import BLOCK_SHAPE
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.store_codecs import StoreCodecs

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=128, dtype="bfloat16")
BYTES = 2 * 2 * 2 * 128 * 2 * TOKENS
SPEC = NamespaceSpec(model="m", tokens_per_block=TOKENS, block_bytes=BYTES, geometry=GEOMETRY)


@pytest.mark.parametrize(
    ("spec", "name", "why"),
    [
        (replace(SPEC, geometry=replace(GEOMETRY, dtype="bf16")), "lossless", "dtype 'bf16'"),
        (replace(SPEC, block_bytes=2 * BYTES), "lossless", f"block_bytes is {2 * BYTES}"),
        (replace(SPEC, geometry=replace(GEOMETRY, head_dim=16, kv_heads=16)), "rot-4-4", "head_dim 16"),
        (SPEC, "kvquant-4", "calibration of the namespace is not here"),
        (SPEC, "lossless", None),
    ],
    ids=["dtype", "length", "head_dim", "calibration", "none"],
)
def test_the_log_says_once_why_blocks_stay_as_they_are(spec: NamespaceSpec, name: str, why: str | None) -> None:
    """A namespace that a store's codec does not take is logged once, with the reason. Its blocks keep
    their length."""
    registry = NamespaceRegistry()
    namespace, _ = registry.open(spec, tenant="t")
    codecs = StoreCodecs({2: codec_named(name)}, registry.get)
    codecs.accept(namespace, float("inf"))
    blocks = np.array([(namespace.id, position, TOKENS, spec.block_bytes) for position in range(4)], BLOCK_SHAPE)
    with capture_logs() as logs:
        lengths = [codecs.lengths(2, blocks).tolist() for _ in range(2)]
    if why:
        (entry,) = logs
        assert entry["namespace"] == namespace.id and why in entry["reason"]
        assert lengths == [[spec.block_bytes] * 4] * 2
    else:
        assert not logs and lengths[0][1] < spec.block_bytes


def test_errors_of_encodings_add_up() -> None:
    """A block that has an error already gets the sum of both. Beyond the limit it is not encoded."""
    registry = NamespaceRegistry()
    namespace, _ = registry.open(SPEC, tenant="t")
    codecs = StoreCodecs({2: codec_named("int8")}, registry.get)
    codecs.accept(namespace, 10.0)
    meta = np.zeros(1, META)[0]
    meta["namespace"], meta["position"], meta["tokens"] = namespace.id, 1, TOKENS
    values = np.random.default_rng(1).standard_normal(BYTES // 2).astype(np.float32)
    plain = rounded(values, "bfloat16").view(np.uint8)
    errors = []
    for before in (0.0, 0.5, 9.999):
        meta["error"] = before
        made = codecs.encode(2, meta, plain, room=BYTES)
        errors.append(made.error if made else None)
    assert errors[0] and errors[1] == pytest.approx(errors[0] + 0.5) and errors[2] is None
