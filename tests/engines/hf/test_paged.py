"""`PagedTierdCache` and the kernel `tierd_paged`: attention reads tierd's own pages, same results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-engines has environments for it")
pytest.importorskip("torch", reason="torch is not installed: make test-engines has environments for it")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.engines.hf.models import padded, prompt
from tests.engines.hf.said import NEW_TOKENS, assert_same, far_from, say
from tests.system.lone_worker import multiplies
from tierd.errors import ConfigError, InvalidArgument, Unsupported
from tierd.integrations.transformers import PagedTierdCache
from tierd.integrations.transformers.attention import kernel_for
from tierd.kernels import paged_attention
from tools.kernels import MissingTool, build_emulator

pytestmark = pytest.mark.timeout(600)
WHOLE = 96  # restored tokens of a prompt of 101, in blocks of 32
ROUNDED = 1e-2
"""Of the largest logit. Kernels round attention weights to float16, the reference does not."""


@pytest.fixture
def paged(model: Callable[..., Any]) -> Any:
    return model("llama", attention="tierd_paged")


def test_greedy(paged: Any, model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """tierd_paged answers as sdpa with a plain, an empty and a restored cache; restore copies no page."""
    ids, kept = prompt(1), store(paged)
    plain = say(model(), ids)
    assert_same(plain, say(paged, ids))
    cache = PagedTierdCache.restore(kept, ids)
    assert cache.restored == 0
    assert_same(plain, say(paged, ids, cache=cache))
    assert not any(page.origin is None for page in cache.tables[0].pages)  # all pages are the daemon's
    assert cache.save(ids) == WHOLE
    again = PagedTierdCache.restore(kept, ids)
    assert again.restored == again.get_seq_length() == WHOLE
    assert [page.is_private for page in again.tables[0].pages] == [False] * 3
    assert_same(plain, say(paged, ids, cache=again))


def test_bfloat16(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """A restored prefix is bit-equal to the computed one, and answers as the cache that computed it."""
    one, ids = model("llama", attention="tierd_paged", dtype="bfloat16"), prompt(2)
    kept = store(one)
    cache = PagedTierdCache(kept)
    say(one, ids, cache=cache)
    cache.save(ids)
    cache.crop(WHOLE - cache.get_seq_length())
    again = PagedTierdCache.restore(kept, ids)
    for page, before in zip(again.tables[0].pages, cache.tables[0].pages, strict=True):
        assert page.array.dtype is torch.bfloat16 and torch.equal(page.array, before.array)
    ours, theirs = say(one, ids, cache=again), say(one, ids, cache=cache)
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.logits, theirs.logits)


def test_beams_with_padding(paged: Any, model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """Three beams over padded prompts share pages, copy those that they write, and answer as sdpa does."""
    kept = store(paged)
    ids, mask = padded(prompt(5, 70), prompt(6))
    how: dict[str, Any] = {"mask": mask, "num_beams": 3}
    plain = say(model(), ids, **how)
    assert say(paged, ids, **how).tokens.tolist() == plain.tokens.tolist()
    cache = PagedTierdCache.restore(kept, ids, mask)
    assert say(paged, ids, cache=cache, **how).tokens.tolist() == plain.tokens.tolist()
    assert cache.save(plain.tokens, mask) == 64 + 96
    again = PagedTierdCache.restore(kept, ids, mask)
    assert again.restored == 31 + 64
    assert say(paged, ids, cache=again, **how).tokens.tolist() == plain.tokens.tolist()
    pages = {id(page) for table in again.tables for page in table.pages}
    assert len(again.tables) == 6 and len(pages) < sum(len(table.pages) for table in again.tables)


@pytest.mark.parametrize("filled", [False, True])
def test_prompt_lookup(filled: bool, paged: Any, store: Callable[..., Any]) -> None:
    """Prompt lookup decoding, which crops, gives the same answer, and its cache is saved right."""
    kept, ids = store(paged), torch.cat([prompt(8 + filled, 40)] * 3, dim=1)
    plain = say(paged, ids)
    if filled:
        first = PagedTierdCache(kept)
        say(paged, ids, cache=first)
        first.save(ids)
    cache = PagedTierdCache.restore(kept, ids)
    assert cache.restored == (WHOLE if filled else 0)
    looked = say(paged, ids, cache=cache, prompt_lookup_num_tokens=4)
    assert looked.tokens.tolist() == plain.tokens.tolist()
    assert cache.get_seq_length() == ids.shape[1] + NEW_TOKENS - 1
    assert cache.save(looked.tokens) == 128
    assert_same(plain, say(paged, ids, cache=PagedTierdCache.restore(kept, ids)))


def test_crop_and_copies(paged: Any, store: Callable[..., Any]) -> None:
    """A cropped cache writes to a copy of a named page, its copies diverge, and the stored page stays."""
    kept, ids = store(paged), prompt(10)
    plain = say(paged, ids)
    cache = PagedTierdCache(kept)
    say(paged, ids, cache=cache)
    cache.save(ids)
    again = PagedTierdCache.restore(kept, ids)
    again.crop(-16)
    assert again.get_seq_length() == 80
    for one in (copy.deepcopy(again), again):
        other = torch.cat([ids[:, :80], prompt(11, 30)], dim=1)
        assert_same(say(paged, other), say(paged, other, cache=one))
    assert_same(plain, say(paged, ids, cache=PagedTierdCache.restore(kept, ids)))
    with pytest.raises(ValueError, match="crop: 50 is positive"):
        again.crop(50)


def test_rows_that_are_chosen(paged: Any, store: Callable[..., Any]) -> None:
    """Rows may be repeated and selected, as in contrastive search, and then go on as separate rows."""
    kept, ids = store(paged), torch.cat([prompt(12, 70), prompt(13, 70)])
    cache = PagedTierdCache(kept)
    with torch.no_grad():
        paged(ids[:, :-1], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert_same(say(paged, ids.flip(0)), say(paged, ids.flip(0), cache=cache))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_same(say(paged, ids), say(paged, ids, cache=cache))


def test_chosen_rows_are_stored_as_what_they_are(paged: Any, store: Callable[..., Any]) -> None:
    """Reordered restored rows are saved under their own tokens, and refused under other rows' tokens."""
    kept, ids = store(paged), torch.cat([prompt(19), prompt(20)])
    first = PagedTierdCache(kept)
    say(paged, ids, cache=first)
    assert first.save(ids) == 2 * WHOLE
    cache = PagedTierdCache.restore(kept, ids)
    cache.batch_select_indices(torch.tensor([1, 0]))
    out = say(paged, ids.flip(0), cache=cache, max_new_tokens=40).tokens
    with pytest.raises(InvalidArgument, match="row 0 begins with other tokens"):
        cache.save(out.flip(0))
    assert cache.save(out) == 2 * 128
    again = PagedTierdCache.restore(kept, out)
    assert again.restored == 128
    assert_same(say(paged, out), say(paged, out, cache=again))


@pytest.fixture(scope="module")
def kernels() -> Path:
    """The GPU's kernels compiled for the CPU, for the model's head dim only."""
    try:
        return build_emulator(dims=[64], units=("decode", "prefill", "merge", "pages"))
    except MissingTool as error:
        pytest.skip(f"the kernels cannot be compiled for the CPU here: {error}")


def test_kernels(
    model: Callable[..., Any], store: Callable[..., Any], kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TIERD_KERNELS=emulated the kernels' own source attends as the reference does, over
    tierd's pages and over transformers' cache."""
    one = model("llama", attention="tierd_paged", dtype="float16", head_dim=64, num_hidden_layers=2)
    kept, (ids, mask) = store(one), padded(prompt(21, 70), prompt(22))
    plain = say(one, ids, mask=mask)
    monkeypatch.setenv("TIERD_KERNELS_LIBRARY", str(kernels))
    assert multiplies() == 0
    monkeypatch.setenv("TIERD_KERNELS", "emulated")
    for restored in (None, 0, 31 + 64):
        cache, before = None if restored is None else PagedTierdCache.restore(kept, ids, mask), multiplies()
        assert cache is None or cache.restored == restored
        said = say(one, ids, mask=mask, cache=cache)
        assert said.tokens.tolist() == plain.tokens.tolist() and far_from(said, plain) <= ROUNDED
        assert multiplies() > before
        assert cache is None or cache.save(said.tokens, mask) == 64 + 96


def test_kernels_that_cannot(paged: Any, store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for emulated kernels gets them or an error with the reason, never another kernel."""
    monkeypatch.setenv("TIERD_KERNELS", "emulated")
    with pytest.raises(ConfigError, match="^kernels: pages of float32.*TIERD_KERNELS=reference"):
        say(paged, prompt(23), cache=PagedTierdCache(store(paged)))


@pytest.mark.parametrize(
    ("place", "why"), [("cpu", "pages are on cpu, queries on cuda:0"), ("cuda:0", "pages of float32")]
)
def test_a_gpu_whose_kernels_cannot(
    place: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a GPU's kernels cannot read the pages or their dtype, the reference attends. tierd logs
    that once, unless the user chose the reference."""
    monkeypatch.delenv("TIERD_KERNELS", raising=False)
    with FakeTensorMode():  # tensors that claim these devices
        query, page = torch.empty(1, 4, 64, device="cuda:0"), torch.empty(2, 32, 2, 64, device=place)
    with monkeypatch.context() as told:
        told.setenv("TIERD_KERNELS", "reference")
        assert kernel_for(query, [page]) is paged_attention
    assert not caplog.records
    assert [kernel_for(query, [page]) for _ in range(2)] == [paged_attention] * 2
    (said,) = caplog.messages
    assert "the slow reference attention is used" in said and why in said
    monkeypatch.setenv("TIERD_KERNELS", "emulated")
    with pytest.raises(ConfigError, match="emulated kernels run on the CPU"):
        kernel_for(query, [page])


def test_without_a_daemon(paged: Any, store: Callable[..., Any], tmp_path: Any) -> None:
    """Without a daemon the pages are this process's own memory."""
    kept, ids = store(paged, target=str(tmp_path / "nobody")), prompt(14)
    cache = PagedTierdCache.restore(kept, ids)
    assert_same(say(paged, ids), say(paged, ids, cache=cache))
    assert cache.restored == 0 and cache.save(ids) == 0
    assert all(page.origin is None for page in cache.tables[0].pages)


def test_what_the_kernel_does_not_do(model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """The kernel refuses windows, packed sequences and padding on the right; the cache refuses
    other attention. Each error has a remedy."""
    with pytest.raises(Unsupported, match="windows, chunks, packed.*attn_implementation='sdpa'"):
        say(model("sliding", attention="tierd_paged"), prompt(15))
    paged, (ids, mask) = model("llama", attention="tierd_paged"), padded(prompt(15, 70), prompt(16))
    with pytest.raises(Unsupported, match="windows, chunks, packed"):
        paged(prompt(15), position_ids=torch.cat([torch.arange(50), torch.arange(51)])[None], use_cache=False)
    with pytest.raises(Unsupported, match="pad on the left"):
        paged(ids.flip(1), attention_mask=mask.flip(1))
    with pytest.raises(InvalidArgument, match="set_attn_implementation"):
        PagedTierdCache(store(model()))


def test_what_a_call_left_behind(paged: Any, model: Callable[..., Any], store: Callable[..., Any]) -> None:
    """A call does not attend to KV that a failed call, or a call of update(), wrote before."""
    kept, ids = store(paged), prompt(17)
    plain, k = say(model(), ids), torch.rand(1, 2, 8, 32)
    with torch.no_grad(), pytest.raises(Unsupported, match="4 dimensions"):
        paged(prompt(18), attention_mask=torch.zeros(1, 1, 101, 101), past_key_values=PagedTierdCache(kept))
    assert_same(plain, say(paged, ids))
    PagedTierdCache(kept).update(k, k, 0)
    assert_same(plain, say(paged, ids))
