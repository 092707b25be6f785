"""KV events of pages that SGLang stored in tierd, under the integers of SGLang's own events."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "sglang", reason="sglang is not installed: make test-engines runs this in an environment of its own"
)

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

from tests.engines.heard import EVENTS, stored_events
from tests.engines.sglang.pools import PAGE, backend, indices, mamba, mha
from tests.engines.sglang.test_hybrid import states
from tests.system.blocks import await_true
from tierd.events.payloads import Hash
from tierd.testing import Daemon

HOST = '[[host]]\ncapacity = "16 MiB"\nsegment = "1 MiB"\n'


def told(daemon: Daemon) -> dict[Hash, Hash | None]:
    """The hash of each published block, and of the block before it."""
    return {
        one: (event.parent, *event.hashes)[i] for event in stored_events(daemon) for i, one in enumerate(event.hashes)
    }


def test_pages_have_sglangs_names() -> None:
    """Routers get SGLang's integer, modulo 2**64, for a page of KV and for its parent. A side
    pool's page under the same key has another hash."""
    keys: Any = get_hash_str(list(range(6 * PAGE)), None, page_size=PAGE)
    ours = [hash_str_to_int64(key) % 2**64 for key in keys]
    with Daemon(HOST + EVENTS) as daemon:
        made = backend(daemon.target, mha("page_first"))
        made.register_mem_host_pool_v2(mamba(), "mamba")
        assert made.batch_set_v1(keys[:4], indices(0, 1, 2, 3)) == [True] * 4
        later = HiCacheStorageExtraInfo(prefix_keys=keys[:4])
        assert made.batch_set_v1(keys[4:], indices(4, 5), later) == [True] * 2
        assert made.batch_set_v2([states(keys[:1], 3)]) == {PoolName.MAMBA: [True]}
        await_true(lambda: len(told(daemon)) == len(keys) + 1, "all pages are told")
        (side,) = told(daemon).items() - dict(zip(ours, [None, *ours[:-1]], strict=True)).items()
        assert side[0] not in ours and side[1] is None
        made.close()
