"""`TierdL2` as LMCache's plugin factory makes it, with LMCache's own keys, objects and bitmaps."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip(
    "lmcache", reason="lmcache is not installed: make test-engines runs this in an environment of its own"
)

import lmcache
import torch
from lmcache.v1.distributed.internal_api import L2AdapterListener

import tierd.integrations.lmcache as package
from tests.engines.lmcache.plugin import Memory, adapter, find, key, layout, load, raw, store
from tests.engines.vllm.tiered import flushed
from tierd.errors import ConfigError, Unsupported
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory(32 << 20)


def test_objects_go_and_come(daemon: Daemon, memory: Memory) -> None:
    """Stored objects come back bit by bit. A key that was not stored is a clear bit, and its object
    is unchanged."""
    made, keys = adapter(daemon.target), [key(i) for i in range(100, 105)]
    objects = [memory.filled(i) for i in range(5)]
    result = store(made, [*keys[:2], *keys[3:]], [*objects[:2], *objects[3:]])
    assert result.is_successful() and result.bytes_transferred() == 4 * len(raw(objects[0]))
    assert find(made, keys) == [True, True, False, True, True]
    empty = [memory.give() for _ in keys]
    assert load(made, keys, empty) == [True, True, False, True, True]
    assert [raw(one) == raw(other) for one, other in zip(empty, objects, strict=True)] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert not any(raw(empty[2]))
    made.submit_unlock(keys)
    made.close()


def test_another_process_is_served(daemon: Daemon, memory: Memory) -> None:
    """A second adapter loads the first one's objects; storing them again copies nothing and succeeds."""
    one, keys = adapter(daemon.target), [key(i) for i in range(150, 153)]
    objects = [memory.filled(i) for i in range(3)]
    assert store(one, keys, objects).is_successful()
    one.close()
    two = adapter(daemon.target)
    assert find(two, keys) == [True] * 3
    assert store(two, keys, [memory.filled(9) for _ in keys]).is_successful()
    empty = [memory.give() for _ in keys]
    assert load(two, keys, empty) == [True] * 3 and [raw(o) for o in empty] == [raw(o) for o in objects]
    two.close()


@pytest.mark.parametrize("other", [{"rank": 1}, {"model": "n"}, {"group": 1}, {"salt": "user"}], ids=str)
def test_each_field_of_a_key_counts(daemon: Daemon, memory: Memory, other: dict[str, Any]) -> None:
    """The same chunk hash with another rank, model, object group or salt is another object."""
    made, groups = adapter(daemon.target), {0: layout(), 1: layout()}
    number = 200 + 10 * len(str(other))
    mine, theirs = key(number), key(number, **other)
    assert store(made, [mine], [memory.filled(1)]).is_successful()
    assert find(made, [mine, theirs], groups) == [True, False]
    assert store(made, [theirs], [memory.filled(2)]).is_successful()
    empty = [memory.give(), memory.give()]
    assert load(made, [mine, theirs], empty) == [True, True] and raw(empty[0]) != raw(empty[1])
    made.close()


def test_layouts_divide(daemon: Daemon, memory: Memory) -> None:
    """One key with another dtype or shape is another object, of equal length too; keys may differ in size."""
    made = adapter(daemon.target)
    half, long = layout(dtype=torch.float16), layout(torch.Size([2, 3, 64, 8]))
    objects = [memory.filled(i, desc) for i, desc in enumerate((layout(), half, long))]
    assert store(made, [key(300)], objects[:1]).is_successful()
    assert find(made, [key(300)], {0: half}) == find(made, [key(300)], {0: long}) == [False]
    assert load(made, [key(300)], [memory.give(half)]) == [False]
    assert store(made, [key(300)] * 2, objects[1:]).is_successful()
    empty = [memory.give(desc) for desc in (layout(), half, long)]
    assert load(made, [key(300)] * 3, empty) == [True] * 3
    assert [raw(one) for one in empty] == [raw(one) for one in objects]
    made.close()


def test_sizes_that_do_not_fit_lose_nothing(daemon: Daemon, memory: Memory) -> None:
    """Without layouts, as for LMCache's serde, an object narrowed to its used size is stored and
    loaded. One of another size is a clear bit, and its neighbours are loaded."""
    made, keys = adapter(daemon.target, object_bytes=1 << 16), [key(i) for i in range(350, 353)]
    objects = [memory.filled(i) for i in range(3)]
    objects[1].set_used_size(1000)
    assert store(made, keys, objects).is_successful()
    assert find(made, keys, {}) == [True] * 3
    empty = [memory.give() for _ in keys]
    assert load(made, keys, empty) == [True, False, True] and not any(raw(empty[1]))
    assert raw(empty[2]) == raw(objects[2])
    empty[1].set_used_size(1000)
    assert load(made, keys[1:2], empty[1:2]) == [True] and raw(empty[1]) == raw(objects[1])
    made.close()


def test_many_objects_in_one_task(daemon: Daemon, memory: Memory) -> None:
    """A task of more objects than the adapter moves at once completes as one task."""
    made, keys = adapter(daemon.target), [key(i) for i in range(400, 550)]
    objects = [memory.filled(i) for i in range(150)]
    assert store(made, keys, objects).is_successful()
    assert all(find(made, keys)) and find(made, [], {}) == []
    empty = [memory.give() for _ in keys]
    assert all(load(made, keys, empty)) and [raw(o) for o in empty] == [raw(o) for o in objects]
    made.close()


def test_objects_have_no_parents(daemon: Daemon, memory: Memory) -> None:
    """Objects of one task are separate blocks without parents, so evicting one evicts no other."""
    known = {place for place, _ in flushed(daemon)}
    made, keys = adapter(daemon.target), [key(i) for i in range(600, 604)]
    assert store(made, keys, [memory.filled(i) for i in range(4)]).is_successful()
    metas = [meta for place, meta in flushed(daemon) if place not in known]
    assert len(metas) == 4 and not any(m["parent"].any() or m["position"] for m in metas)
    made.close()


def test_three_eventfds(daemon: Daemon) -> None:
    """Each kind of task has its own eventfd, and the adapter closes all three once."""
    import os

    made = adapter(daemon.target)
    fds = {made.get_store_event_fd(), made.get_lookup_and_lock_event_fd(), made.get_load_event_fd()}
    assert len(fds) == 3
    made.close()
    made.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_listeners_are_told(daemon: Daemon, memory: Memory) -> None:
    """LMCache's listeners get each stored and each loaded object. Usage is not guessed; the status
    has the counts."""

    class Ears(L2AdapterListener):
        def __init__(self) -> None:
            self.heard: list[tuple[str, Any]] = []

        def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
            self.heard.append(("stored", (keys, sizes)))

        def on_l2_keys_accessed(self, keys: Any) -> None:
            self.heard.append(("accessed", keys))

        def on_l2_keys_deleted(self, keys: Any) -> None:
            self.heard.append(("deleted", keys))

    made, ears, one = adapter(daemon.target), Ears(), memory.filled(1)
    made.register_listener(ears)
    store(made, [key(700)], [one])
    load(made, [key(700), key(701)], [memory.give(), memory.give()])
    assert ears.heard == [("stored", ([key(700)], [len(raw(one))])), ("accessed", [key(700)])]
    assert made.get_usage().total_bytes_used == 0 and not made.supports_global_eviction
    status = made.report_status()
    assert status["is_healthy"] and status["counts"]["saved_blocks"] == 1 and status["tiers"]
    made.close()
    assert not made.report_status()["is_healthy"]


def test_threads_share_it(daemon: Daemon, memory: Memory) -> None:
    """Threads submit stores and lookups at the same time, and every task has its own result."""
    made, faults = adapter(daemon.target, threads=4), []

    def tasks(start: int) -> None:
        own = [(made.submit_store_task([key(start + i)], [memory.filled(start + i)]), i) for i in range(5)]
        looked = [made.submit_lookup_and_lock_task([key(start + i)], {0: layout()}) for i in range(5)]
        if len({task for task, _ in own} | set(looked)) != 10:
            faults.append(f"{start}: numbers of tasks are not unique")

    threads = [threading.Thread(target=tasks, args=(1000 * n,)) for n in range(1, 5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    made._stores._courier.drain(timeout_s=60)
    done = made.pop_completed_store_tasks()
    assert faults == [] and len(done) == 20 and all(result.is_successful() for result in done.values())
    for n in range(1, 5):
        assert find(made, [key(1000 * n + i) for i in range(5)]) == [True] * 5
    made.close()


def test_what_is_wrong_is_said_at_the_start(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown option and an unsupported LMCache are refused with a sentence."""
    with pytest.raises(ConfigError, match="adapter_params.tarket"):
        adapter(daemon.target, tarket="x")
    face = package.TierdL2
    monkeypatch.setattr(lmcache, "__version__", "0.6.1")
    for make in (lambda: package.TierdL2, lambda: face({})):
        with pytest.raises(Unsupported, match=r"lmcache 0\.6\.1: tierd supports lmcache>=0\.5,<0\.6"):
            make()
