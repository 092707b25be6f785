"""LMCache's storage manager on tierd without a GPU, with objects of random bits.

It uses LMCache's own options, controllers and memory, and the adapter beside this file. Run
`PYTHONPATH=. python deploy/examples/lmcache/on_cpu.py JSON` beside a `tierd serve`.
"""

from __future__ import annotations

import json
import sys


def main(entry: str) -> None:
    """Stores objects, clears LMCache's memory, fetches them."""
    from tests.engines.lmcache.managed import fetch, forget, manager, saved, write
    from tests.engines.lmcache.plugin import key
    from tests.system.blocks import await_true

    keys = [key(number) for number in range(16)]
    with manager(json.loads(entry)) as storage:
        before = write(storage, keys, seed=1)
        await_true(lambda: saved(storage) == len(keys), "objects in tierd")
        forget(storage)
        fetched, after = fetch(storage, keys)
    print(
        f"stored {len(before)} of {len(keys)} objects, fetched {fetched} of {len(keys)} from tierd, equal {after == before}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
