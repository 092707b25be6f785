"""`TierdCache` under transformers' generate(): restored K and V equal those that would be computed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-engines has environments for it")
pytest.importorskip("torch", reason="torch is not installed: make test-engines has environments for it")

import torch
from transformers import DynamicCache

from tests.depth import report
from tests.engines.hf.models import padded, prompt
from tests.engines.hf.said import NEW_TOKENS, assert_same, far_from, say
from tierd.errors import InvalidArgument
from tierd.integrations.transformers import TierdCache
from tierd.integrations.transformers.rows import Padding

pytestmark = pytest.mark.timeout(600)
WHOLE = 96  # restored tokens of a prompt of 101, in blocks of 32


@pytest.mark.parametrize("kind", ["llama", "sliding", "latent"])
def test_greedy(kind: str, model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Full, sliding and latent attention answer alike without tierd, with an empty and a restored cache."""
    one, kept = model(kind), store(model(kind))
    ids = prompt(1)
    plain = say(one, ids)
    cache = TierdCache.restore(kept, ids)
    assert cache.restored == 0
    assert_same(plain, say(one, ids, cache=cache))
    assert cache.save(plain.tokens) == WHOLE
    again = TierdCache.restore(kept, ids)
    assert again.restored == again.get_seq_length() == WHOLE
    for layer, before in zip(again.layers, cache.layers, strict=True):
        assert torch.equal(layer.keys, before.keys[:, :, :WHOLE]) and torch.equal(
            layer.values, before.values[:, :, :WHOLE]
        )
    assert_same(plain, say(one, ids, cache=again))


def test_bfloat16(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """In bfloat16 a restored cache gives the same bits as transformers' own cache cropped to that prefix."""
    one = model("llama", dtype="bfloat16")
    kept, ids = store(one), prompt(2)
    first = TierdCache(kept)
    say(one, ids, cache=first)
    assert first.save(ids) == WHOLE
    own = DynamicCache(config=one.config)
    say(one, ids, cache=own)
    own.crop(WHOLE - own.get_seq_length())
    restored = TierdCache.restore(kept, ids)
    assert restored.restored == WHOLE and restored.layers[0].keys.dtype is torch.bfloat16
    ours, theirs = say(one, ids, cache=restored), say(one, ids, cache=own)
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.logits, theirs.logits)


def test_what_was_said_is_kept_too(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """The next turn restores the last turn's prompt and answer, without the answer's last token."""
    one, kept, ids = model(), store(model()), prompt(3, 117)
    cache = TierdCache(kept)
    turn = say(one, ids, cache=cache).tokens
    assert cache.save(turn) == 128 == (turn.shape[1] - 1) // 32 * 32
    longer = torch.cat([turn, prompt(4, 20)], dim=1)
    again = TierdCache.restore(kept, longer)
    assert again.restored == 128
    assert_same(say(one, longer), say(one, longer, cache=again))


def test_beams_with_padding(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Three beams over padded prompts answer as with transformers' cache; prompts are stored, beams not."""
    one, kept = model(), store(model())
    ids, mask = padded(prompt(5, 70), prompt(6))
    how: dict[str, Any] = {"mask": mask, "num_beams": 3}
    plain = say(one, ids, **how)
    cache = TierdCache.restore(kept, ids, mask)
    assert cache.restored == 0
    assert_same(plain, say(one, ids, cache=cache, **how))
    assert cache.save(plain.tokens, mask) == 64 + 96
    again = TierdCache.restore(kept, ids, mask)
    assert again.restored == 31 + 64  # both rows have 31 columns of padding and the shorter prompt's two blocks
    restored = say(one, ids, cache=again, **how)
    assert restored.tokens.tolist() == plain.tokens.tolist()
    single = TierdCache.restore(kept, prompt(6))
    assert single.restored == 96
    assert_same(say(one, prompt(6)), say(one, prompt(6), cache=single))


def test_several_answers(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Samples that diverge after a restored prompt are saved under their own tokens. One row for
    two is saved only as far as both agree."""
    one, kept, ids = model(), store(model()), prompt(7)
    first = TierdCache(kept)
    say(one, ids, cache=first)
    first.save(ids)
    cache = TierdCache.restore(kept, ids)
    torch.manual_seed(7)
    out = say(one, ids, cache=cache, do_sample=True, temperature=5.0, num_return_sequences=2, max_new_tokens=40).tokens
    assert out[0, 101:110].tolist() != out[1, 101:110].tolist()
    assert cache.save(out[:1]) == WHOLE  # the row may be either of the two: only their common tokens are certain
    assert TierdCache.restore(kept, out[0]).restored == WHOLE
    assert cache.save(out) == 2 * 128
    for row in out:
        again = TierdCache.restore(kept, row)
        assert again.restored == 128
        assert_same(say(one, row[None]), say(one, row[None], cache=again))


def test_several_answers_with_padding(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """With padded prompts too, one of several answers is saved only as far as all of its prompt agree."""
    one, kept = model(), store(model())
    ids, mask = padded(prompt(21, 40), prompt(22))
    cache = TierdCache(kept)
    torch.manual_seed(7)
    how = {"mask": mask, "do_sample": True, "temperature": 5.0, "num_return_sequences": 2, "max_new_tokens": 40}
    out = say(one, ids, cache=cache, **how).tokens
    assert out[0, 101:110].tolist() != out[1, 101:110].tolist()
    assert cache.save(out[1::2], mask) == 32 + WHOLE
    second = out[1:2, 61:]  # without its padding
    again = TierdCache.restore(kept, second)
    assert again.restored == 32
    assert_same(say(one, second), say(one, second, cache=again))


@pytest.mark.parametrize("filled", [False, True])
def test_prompt_lookup(filled: bool, model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Prompt lookup decoding answers the same and is saved right; its prefill drops a restored prefix."""
    one, kept = model(), store(model())
    ids = torch.cat([prompt(8 + filled, 40)] * 3, dim=1)
    if filled:
        first = TierdCache(kept)
        say(one, ids, cache=first)
        first.save(ids)
    cache = TierdCache.restore(kept, ids)
    assert cache.restored == (WHOLE if filled else 0)
    plain = say(one, ids)
    looked = say(one, ids, cache=cache, prompt_lookup_num_tokens=4)
    assert looked.tokens.tolist() == plain.tokens.tolist()
    assert cache.get_seq_length() == ids.shape[1] + NEW_TOKENS - 1 and cache.restored == 0
    assert cache.save(looked.tokens) == 128
    assert_same(plain, say(one, ids, cache=TierdCache.restore(kept, ids)))


def test_crop(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """A cropped restored cache works as if it had never been longer. A positive length does what
    the installed transformers does with it."""
    one, kept, ids = model(), store(model()), prompt(10)
    cache, own = TierdCache(kept), DynamicCache(config=one.config)
    say(one, ids, cache=cache)
    say(one, ids, cache=own)
    cache.save(ids)
    again = TierdCache.restore(kept, ids)
    again.crop(-36)
    assert again.get_seq_length() == 60
    assert_same(say(one, ids), say(one, ids, cache=again))
    outcomes = []
    for any_cache in (cache, own):
        try:
            any_cache.crop(50)
            outcomes.append(any_cache.get_seq_length())
        except ValueError:
            outcomes.append(-1)
    assert outcomes in ([-1, -1], [50, 50])


def test_what_was_cropped_binds_nobody(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """A restored and cropped cache may go on with other tokens, and is saved under those."""
    one, kept, ids = model(), store(model()), prompt(24)
    first = TierdCache(kept)
    say(one, ids, cache=first)
    first.save(ids)
    cache = TierdCache.restore(kept, ids)
    cache.crop(-36)
    other = torch.cat([ids[:, :60], prompt(25, 41)], dim=1)
    say(one, other, cache=cache)
    assert cache.restored == 60 and cache.save(other) == WHOLE
    assert_same(say(one, other), say(one, other, cache=TierdCache.restore(kept, other)))


def test_copied_caches(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Copies of one restored document serve several questions, as in transformers' guides."""
    one, kept, document = model(), store(model()), prompt(11)
    first = TierdCache(kept)
    with torch.no_grad():
        one(document, past_key_values=first)
    first.save(document)
    cache = TierdCache.restore(kept, torch.cat([document, document[:, :1]], dim=1))
    for question in (12, 13):
        ids = torch.cat([document, prompt(question, 9)], dim=1)
        assert_same(say(one, ids), say(one, ids, cache=copy.deepcopy(cache)))
    assert cache.get_seq_length() == WHOLE


def test_chosen_rows(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Reordered or selected rows are saved under their own tokens and refused under other rows' tokens."""
    one, kept = model(), store(model())
    ids = torch.cat([prompt(27), prompt(28)])
    first = TierdCache(kept)
    say(one, ids, cache=first)
    assert first.save(ids) == 2 * WHOLE
    cache = TierdCache.restore(kept, ids)
    cache.batch_select_indices(torch.tensor([1, 0]))
    out = say(one, ids[[1, 0]], cache=cache, max_new_tokens=40).tokens
    with pytest.raises(InvalidArgument, match="row 0 begins with other tokens"):
        cache.save(out[[1, 0]])
    assert cache.save(out) == 2 * 128
    cache.batch_select_indices(torch.tensor([False, True]))
    with pytest.raises(InvalidArgument, match="row 0 begins with other tokens"):
        cache.save(out[:1])
    assert cache.save(out[1:]) == 128
    again = TierdCache.restore(kept, out)
    assert again.restored == 128
    assert_same(say(one, out), say(one, out, cache=again))


def test_wrong_tokens_are_refused(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Wrong tokens, rows that do not divide and padding on the right are errors; nothing is stored."""
    one, kept, ids = model(), store(model()), prompt(14)
    cache = TierdCache(kept)
    say(one, ids, cache=cache)
    assert cache.save(ids) == WHOLE
    again = TierdCache.restore(kept, ids)
    with pytest.raises(InvalidArgument, match="row 0 begins with other tokens"):
        again.save(prompt(15))
    with pytest.raises(InvalidArgument, match="2 rows of tokens for 1 of the cache"):
        cache.save(torch.cat([ids, ids]))
    with pytest.raises(InvalidArgument, match="pad on the left"):
        TierdCache.restore(kept, ids, torch.cat([torch.ones(1, 100), torch.zeros(1, 1)], dim=1).long())
    assert TierdCache.restore(kept, prompt(15)).restored == 0


def test_padding_without_a_mask(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Without a mask save assumes generate()'s padding, or asks for the mask if that token may be text."""
    one = model()
    ids, mask = padded(prompt(17, 70), prompt(18))
    kept = store(one)
    cache = TierdCache(kept)
    plain = say(one, ids, mask=mask, cache=cache)
    assert cache.save(plain.tokens) == 64 + 96
    assert TierdCache.restore(kept, ids).restored == TierdCache.restore(kept, ids, mask).restored == 31 + 64
    kept.padding = Padding(0, is_only_padding=False)  # as of a model whose end is its padding
    with pytest.raises(InvalidArgument, match="rows begin with token 0, for padding and end alike"):
        cache.save(plain.tokens)


def test_padding_amid_a_row(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Without a mask generate() masks padding tokens anywhere. save stops at the first, since
    another reader may take it as text."""
    one, kept, ids = model(), store(model()), prompt(26)
    ids[0, 40] = 0
    cache = TierdCache(kept)
    out = one.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.save(out) == 32
    again = TierdCache.restore(kept, ids, torch.ones_like(ids))
    assert again.restored == 32
    assert_same(say(one, ids), say(one, ids, cache=again))


def test_the_last_token_is_computed(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Of a prompt that is stored whole, restore omits the last block, so that logits can be computed."""
    one, kept, ids = model(), store(model()), prompt(16, 96)
    cache = TierdCache(kept)
    say(one, ids, cache=cache)
    assert cache.save(ids) == 96
    again = TierdCache.restore(kept, ids)
    assert again.restored == 64
    assert_same(say(one, ids), say(one, ids, cache=again))


def test_a_trained_model(store: Callable[..., Any], shared: Any) -> None:
    """tiny-llama, cast to float32, answers the same from a restored kilobyte of text; times are reported."""
    if not (shared / "models" / "tiny-llama" / "config.json").exists():
        pytest.skip("../shared/models/tiny-llama is not beside this checkout")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    one = AutoModelForCausalLM.from_pretrained(shared / "models" / "tiny-llama", dtype=torch.float32).eval()
    text = (shared / "models" / "tiny-llama" / "eval.txt").read_bytes()[:980]
    kept, ids = store(one), torch.tensor([[256, *text]])
    cache = TierdCache(kept)
    began = time.monotonic()
    plain = say(one, ids, cache=cache)
    middle = time.monotonic()
    assert cache.save(plain.tokens) == 992  # all 992 that were computed, the answer included
    saved = time.monotonic()
    again = TierdCache.restore(kept, ids)
    restored = time.monotonic()
    assert again.restored == 960
    answer = say(one, ids, cache=again)
    report(
        "transformers, tiny-llama, 960 tokens",
        computed_s=middle - began,
        saved_s=saved - middle,
        restored_s=restored - saved,
        answered_s=time.monotonic() - restored,
        far=far_from(plain, answer),
    )
    assert_same(plain, answer)
