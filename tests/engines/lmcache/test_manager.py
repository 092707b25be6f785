"""tierd beneath LMCache's own StorageManager, set up by its own command line: its controllers,
memory and locks, without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "lmcache", reason="lmcache is not installed: make test-engines runs this in an environment of its own"
)

from lmcache.v1.distributed.api import ObjectKey

from tests.depth import report
from tests.engines.lmcache.managed import fetch, forget, manager, saved, write
from tests.engines.lmcache.plugin import key, words
from tests.system.blocks import await_true
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(600)


def test_what_left_lmcaches_memory_comes_back(daemon: Daemon) -> None:
    """Objects that LMCache stored and dropped come back from tierd bit by bit, to a second LMCache
    too. A prefix ends at the first gap."""
    keys = [key(i) for i in range(40)]
    with manager(words(daemon.target)) as one:
        written = write(one, keys[:30], seed=1)
        await_true(lambda: saved(one) == 30, "objects in tierd")
        forget(one)
        assert fetch(one, keys) == (30, written)
    with manager(words(daemon.target)) as two:
        loaded, found = fetch(two, keys)
        assert (loaded, found) == (30, written)
    report("LMCache manager", stored=30, loaded_by_another=loaded)


def test_a_daemon_that_dies_is_a_miss(daemon: Daemon) -> None:
    """While tierd is gone LMCache's prefetches miss; after its return stored objects are served."""
    keys = [key(i) for i in range(100, 108)]
    with manager(words(daemon.target, timeout_s=5.0)) as one:
        write(one, keys, seed=2)
        await_true(lambda: saved(one) == 8, "objects in tierd")
        forget(one)
        daemon.kill()
        assert fetch(one, keys) == (0, [])
        daemon.start()
        tried: list[ObjectKey] = []

        def served() -> bool:
            tried.append(key(110 + len(tried)))
            write(one, tried[-1:], seed=3)
            forget(one)
            return fetch(one, tried[-1:])[0] == 1

        await_true(served, "an object from tierd after it came back")
