"""While tierd is gone, hung or overloaded, LMCache gets clear bits and failed stores; no waits, no
locks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip(
    "lmcache", reason="lmcache is not installed: make test-engines runs this in an environment of its own"
)

from tests.depth import report
from tests.engines.lmcache.plugin import Memory, adapter, find, key, layout, load, raw, store
from tests.system.blocks import await_true, connected
from tierd._proto import admin_pb2 as apb
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(300)
PROMPT_S = 5.0
"""A call that never waits for the daemon takes microseconds."""


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


def test_a_daemon_that_dies(daemon: Daemon, memory: Memory) -> None:
    """While the daemon is gone stores fail and loads are clear bits; after its return both work again."""
    made, keys = adapter(daemon.target), [key(i) for i in range(3)]
    objects = [memory.filled(i) for i in range(3)]
    assert store(made, keys, objects).is_successful()
    daemon.kill()
    assert find(made, keys) == load(made, keys, [memory.give() for _ in keys]) == [False] * 3
    assert not store(made, [key(9)], [memory.filled(9)]).is_successful()
    daemon.start()
    await_true(lambda: store(made, keys, objects).is_successful(), "stores after the daemon came back")
    empty = [memory.give() for _ in keys]
    assert load(made, keys, empty) == [True] * 3 and [raw(o) for o in empty] == [raw(o) for o in objects]
    made.close()


def test_without_a_daemon(tmp_path: Path, memory: Memory) -> None:
    """LMCache starts, misses and ends without a daemon."""
    made = adapter(str(tmp_path / "nobody"))
    assert not store(made, [key(1)], [memory.filled(1)]).is_successful()
    assert find(made, [key(1)]) == load(made, [key(1)], [memory.give()]) == [False]
    made.close()


def test_a_hung_daemon_is_never_waited_for(daemon: Daemon, memory: Memory) -> None:
    """No call of LMCache waits for a hung daemon, tasks beyond the queue's bound end at once, and
    close has a deadline."""
    made = adapter(daemon.target, threads=1, queue_limit=2, timeout_s=1.0, lookup_timeout_s=0.5)
    assert store(made, [key(50)], [memory.filled(1)]).is_successful()
    slowest, tasks = 0.0, []
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for i in range(6):
            began = time.monotonic()
            tasks += [
                made.submit_store_task([key(60 + i)], [memory.give()]),
                made.submit_lookup_and_lock_task([key(50)], {0: layout()}),
                made.submit_load_task([key(50)], [memory.give()]),
            ]
            made.pop_completed_store_tasks()
            made.submit_unlock([key(50)])
            slowest = max(slowest, time.monotonic() - began)
        refused = [task for task in tasks[2::3] if made.query_load_result(task) is not None]
        began = time.monotonic()
        made.close()
        closed = time.monotonic() - began
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    report("LMCache L2, hung daemon", slowest_submit_s=slowest, close_s=closed)
    assert slowest < PROMPT_S and len(refused) >= 4 and closed < 30


def test_a_lookup_holds_nothing(daemon: Daemon, memory: Memory) -> None:
    """After lookups the daemon holds no lease, unlocked or not, and close ends the session."""
    made, keys = adapter(daemon.target), [key(i) for i in range(80, 84)]
    assert store(made, keys, [memory.filled(i) for i in range(4)]).is_successful()
    assert find(made, keys) == [True] * 4
    assert load(made, keys, [memory.give() for _ in keys]) == [True] * 4

    def sessions() -> list[apb.SessionInfo]:
        with connected(daemon) as client:
            found = client.call(client.admin.Sessions, apb.SessionsRequest()).sessions
        return [one for one in found if one.name.startswith("lmcache") and one.state == "open"]

    await_true(lambda: [(one.leases, one.pinned_bytes) for one in sessions()] == [(0, 0)], "leases given back")
    made.close()
    await_true(lambda: not sessions(), "the session's end")
