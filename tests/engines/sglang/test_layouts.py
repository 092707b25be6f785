"""`TierdHiCache` over SGLang's own host pools: every layout bit by bit, as pointers and flat tensors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "sglang", reason="sglang is not installed: make test-engines runs this in an environment of its own"
)

import torch

from tests.engines.sglang.pools import MHA_LAYOUTS, MLA_LAYOUTS, PAGE, backend, fill, indices, mha, mla, page
from tierd.errors import Unsupported
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
