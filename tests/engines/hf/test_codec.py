"""transformers with the option `codec`: restored K and V are near those computed, or equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-engines has environments for it")
pytest.importorskip("torch", reason="torch is not installed: make test-engines has environments for it")

import torch
from transformers import DynamicCache

from tests.codecs import USABLE
from tests.engines.hf.models import prompt
from tests.engines.hf.said import say
from tierd.errors import ConfigError
from tierd.integrations.transformers import PagedTierdCache, TierdCache

pytestmark = pytest.mark.timeout(600)
WHOLE = 96


@pytest.mark.parametrize("codec", USABLE, ids=lambda codec: codec.name)
def test_restored(codec: Any, model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Each codec restores a prompt's whole blocks, the first one exactly; an exact codec, all of them.
    Its answer is that of transformers' own cache."""
    one = model("llama", dtype="bfloat16", head_dim=64)
    kept, ids = store(one, codec=codec.name), prompt(1)
    first = TierdCache(kept)
    say(one, ids, cache=first)
    assert first.save(ids) == WHOLE
    restored = TierdCache.restore(kept, ids)
    assert restored.restored == WHOLE and restored.layers[0].keys.dtype is torch.bfloat16
    for layer, before in zip(restored.layers, first.layers, strict=True):
        for found, wanted in ((layer.keys, before.keys), (layer.values, before.values)):
            exact = WHOLE if codec.is_exact else kept.options.tokens_per_block
            assert torch.equal(found[:, :, :exact], wanted[:, :, :exact])
            assert (found - wanted[:, :, :WHOLE]).abs().max() < 0.7 * wanted.abs().max()
    answer = say(one, ids, cache=restored)
    if codec.is_exact:
        own = DynamicCache(config=one.config)
        say(one, ids, cache=own)
        own.crop(WHOLE - own.get_seq_length())
        theirs = say(one, ids, cache=own)
        assert torch.equal(answer.tokens, theirs.tokens) and torch.equal(answer.logits, theirs.logits)


def test_engines_without_it_find_nothing(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Blocks of a codec are no hits for another one, or for none."""
    one, ids = model("llama", dtype="bfloat16", head_dim=64), prompt(3)
    cache = TierdCache(store(one, codec="int8"))
    say(one, ids, cache=cache)
    assert cache.save(ids) == WHOLE
    assert [TierdCache.restore(store(one, codec=codec), ids).restored for codec in ("", "rot-8-8", "int8")] == [
        0,
        0,
        WHOLE,
    ]


def test_paged(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """A paged cache reads encoded blocks decoded into pages of its own, from rows of its own or others."""
    one = model("llama", attention="tierd_paged", dtype="bfloat16", head_dim=64)
    kept, ids = store(one, codec="rot-8-8"), prompt(2)
    first = PagedTierdCache(kept)
    say(one, ids, cache=first)
    assert first.save(ids) == WHOLE
    restored = PagedTierdCache.restore(kept, ids)
    assert restored.restored == WHOLE
    assert say(one, ids, cache=restored).tokens.shape == say(one, ids).tokens.shape


def test_refused(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """K and V of float32 are refused when the store is made."""
    with pytest.raises(ConfigError, match="dtype 'float32'"):
        store(model("llama"), codec="int8")
