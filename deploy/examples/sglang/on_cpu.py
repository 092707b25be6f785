"""SGLang's HiCache storage on tierd without a GPU, with pages of random bits.

It uses SGLang's factory and host pool, and the configuration beside this file. Run `PYTHONPATH=.
python deploy/examples/sglang/on_cpu.py CONFIG.json` beside a `tierd serve`.
"""

from __future__ import annotations

import sys


def main(path: str) -> None:
    """Stores pages, empties the pool, fetches them."""
    from tests.engines.sglang import conftest

    conftest.import_pools()
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    from tests.engines.sglang import pools

    words, *_ = HybridCacheController.parse_storage_backend_extra_config(f"@{path}")
    pool, pages = pools.mha("page_first"), range(12)
    storage = StorageBackendFactory.create_backend("dynamic", pools.config("", words=words), pool)
    storage.register_mem_pool_host(pool)
    pools.fill(pool, seed=1)
    before = [pools.page(pool, number * pools.PAGE) for number in pages]
    keys = [f"{number:064x}" for number in pages]
    stored = storage.batch_set_v1(keys, pools.indices(*pages))
    pool.kv_buffer.zero_()
    fetched = storage.batch_get_v1(keys, pools.indices(*pages))
    is_equal = [pools.page(pool, number * pools.PAGE) for number in pages] == before
    print(
        f"page_first: stored {sum(stored)} of {len(keys)} pages, fetched {sum(fetched)} of {len(keys)}, equal {is_equal}"
    )
    storage.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
