"""`TierdHiCache` over SGLang's own host pools: every layout bit by bit, as pointers and flat tensors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "sglang", reason="sglang is not installed: make test-engines runs this in an environment of its own"
)

import numpy as np
import torch

from tests.engines.sglang.pools import MHA_LAYOUTS, MLA_LAYOUTS, PAGE, backend, fill, indices, mha, mla, page
from tierd.errors import ConfigError, Unsupported
from tierd.integrations.sglang.pages import FlatPages, PointerPages
from tierd.integrations.sglang.values import geometry_of, order_of
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(300)
POOLS = [(mha, layout) for layout in MHA_LAYOUTS] + [(mla, layout) for layout in MLA_LAYOUTS]
IDS = [f"{make.__name__}-{layout}" for make, layout in POOLS]


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's bits; random bits may be NaN, which equals nothing."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("make", "layout"), POOLS, ids=IDS)
def test_by_pointer(daemon: Daemon, make: Any, layout: str) -> None:
    """Pages come back bit by bit into other pages of the pool, and change no further page."""
    pool = make(layout)
    with_tierd = backend(daemon.target, pool, is_mla=make is mla, model_name=f"pointer-{layout}")
    fill(pool, seed=1)
    others = {number: page(pool, number * PAGE) for number in set(range(16)) - {7, 8, 9}}
    wanted = [page(pool, number * PAGE) for number in (1, 2, 5)]
    assert with_tierd.batch_exists(["a", "b", "c"]) == 0
    assert with_tierd.batch_set_v1(["a", "b", "c"], indices(1, 2, 5)) == [True] * 3
    assert with_tierd.batch_exists(["a", "b", "c", "d"]) == 3
    assert with_tierd.batch_get_v1(["a", "b", "c", "d"], indices(9, 7, 8, 6)) == [True, True, True, False]
    assert [page(pool, number * PAGE) for number in (9, 7, 8)] == wanted
    assert {number: page(pool, number * PAGE) for number in others} == others
    with_tierd.close()


@pytest.mark.parametrize(("make", "layout"), POOLS, ids=IDS)
def test_as_flat_tensors(daemon: Daemon, make: Any, layout: str) -> None:
    """Without interface_v1 the pool's flat pages come back bit by bit, apart from those stored by pointer."""
    if layout == "page_first_kv_split":
        pytest.skip("SGLang has no flat pages for it")
    pool, name = make(layout), f"flat-{layout}"
    flat = backend(daemon.target, pool, is_mla=make is mla, model_name=name, interface_v1=0)
    fill(pool, seed=2)
    pages = [pool.get_data_page(number * PAGE) for number in (0, 3)]
    assert flat.batch_set(["a", "b"], pages)
    room = [pool.get_dummy_flat_data_page() for _ in range(3)]
    got = flat.batch_get(["a", "b", "c"], room)
    assert got[2] is None and all(raw(a) == raw(b) for a, b in zip(got[:2], pages, strict=True))
    assert flat.exists("b") and not flat.exists("c") and flat.get("c", room[0]) is None
    assert flat.set("c", pages[0]) and raw(flat.get("c", room[2])) == raw(pages[0])
    by_pointer = backend(daemon.target, pool, is_mla=make is mla, model_name=name)
    assert by_pointer.batch_exists(["a"]) == 0
    flat.close()
    by_pointer.close()


def test_a_layout_without_pointers_is_refused(daemon: Daemon) -> None:
    """page_unified, for which SGLang has no pointers, is refused at registration with a layout to use."""
    with pytest.raises(Unsupported, match="page_unified.*use page_first"):
        backend(daemon.target, mha("page_unified"))


def test_a_page_is_copied_once(daemon: Daemon) -> None:
    """tierd reads a stored page from the pool's own memory: the pieces are views that keep the pool alive."""
    pool = mha("layer_first")
    with_tierd = backend(daemon.target, pool)
    (parts,) = with_tierd._shelves["kv"].pages.sources(indices(3), pages=1)
    fill(pool, seed=3)
    assert [part.tobytes() for part in parts] == page(pool, 3 * PAGE)
    assert all(part.base.pool is pool for part in parts)
    with_tierd.close()


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_the_order_of_values(layout: str) -> None:
    """In every layout, by pointer and flat, the order finds each layer's keys and values of a page."""
    pool = mha(layout)
    fill(pool, seed=4)
    wanted = _values(pool, 3)
    for pages, parts in (
        (PointerPages(pool), PointerPages(pool).sources(indices(3), pages=1)[0]),
        (FlatPages(pool), [pool.get_data_page(3 * PAGE).view(torch.uint8).numpy()]),
    ):
        page_values = np.concatenate([np.asarray(part).reshape(-1) for part in parts]).view(np.uint16)
        assert (page_values[order_of(pages)] == wanted.reshape(-1)).all()


def _values(pool: Any, number: int) -> np.ndarray:
    """A page's values [layers, keys and values, tokens, heads, channels], from SGLang's own flat page."""
    flat, g = pool.get_data_page(number * PAGE), geometry_of(PointerPages(pool))
    shapes = {
        "layer_first": ("plthd", (2, g.layers, PAGE, g.kv_heads, g.head_dim)),
        "page_first": ("ptlhd", (2, PAGE, g.layers, g.kv_heads, g.head_dim)),
        "page_first_direct": ("plthd", (2, g.layers, PAGE, g.kv_heads, g.head_dim)),
        "page_head": ("phtld", (2, g.kv_heads, PAGE, g.layers, g.head_dim)),
    }
    axes, shape = shapes[pool.layout]
    return flat.view(torch.int16).numpy().view(np.uint16).reshape(shape).transpose([axes.index(a) for a in "lpthd"])


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_a_codec(daemon: Daemon, layout: str) -> None:
    """Pages come back near their values from int8, the sequence's first one bit by bit; others miss them."""
    pool = mha(layout)
    with_codec = backend(daemon.target, pool, model_name=f"codec-{layout}", extra={"codec": "int8"})
    pool.kv_buffer.normal_()
    keys = [f"{i:064x}" for i in range(3)]
    wanted = [_floats(pool, number) for number in (1, 2, 5)]
    assert with_codec.batch_set_v1(keys, indices(1, 2, 5)) == [True] * 3
    assert with_codec.batch_get_v1(keys, indices(9, 7, 8)) == [True] * 3
    found = [_floats(pool, number) for number in (9, 7, 8)]
    assert torch.equal(found[0], wanted[0]) and not torch.equal(found[1], wanted[1])
    assert all((a - b).abs().max() < 0.05 for a, b in zip(found, wanted, strict=True))
    plain = backend(daemon.target, pool, model_name=f"codec-{layout}")
    assert plain.batch_exists(keys) == 0
    for one in (with_codec, plain):
        one.close()


def _floats(pool: Any, number: int) -> torch.Tensor:
    return pool.get_data_page(number * PAGE).float().clone()


def test_a_codec_that_does_not_fit_is_refused(daemon: Daemon) -> None:
    """Latents and head sizes that the codec does not take are refused at registration."""
    with pytest.raises(ConfigError, match="no layers of one shape"):
        backend(daemon.target, mla("page_first"), is_mla=True, extra={"codec": "int8"})
    with pytest.raises(ConfigError, match="head_dim 8"):
        backend(daemon.target, mha("page_first"), extra={"codec": "rot-4-4"})
