"""LMCache's own plugin factory, allocator and keys, and calls that wait on the adapter's eventfds
as its controllers do."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryObj

SOON_S = 120.0
SHAPE = torch.Size([2, 3, 16, 8])
PATIENT = {"timeout_s": 30.0, "lookup_timeout_s": 10.0}


def words(target: str, **params: Any) -> dict[str, Any]:
    """An entry of --l2-adapter."""
    return {
        "type": "plugin",
        "module_path": "tierd.integrations.lmcache",
        "class_name": "TierdL2",
        "adapter_params": {"target": target} | PATIENT | params,
    }


def adapter(target: str, **params: Any) -> Any:
    """TierdL2 as LMCache's own factory makes it."""
    entry = json.loads(json.dumps(words(target, **params)))
    return create_l2_adapter(PluginL2AdapterConfig.from_dict(entry), None)


def key(number: int, *, model: str = "m", rank: int = 0, group: int = 0, salt: str = "") -> ObjectKey:
    return ObjectKey(number.to_bytes(32, "big"), model, rank, group, salt)


def layout(shape: torch.Size = SHAPE, dtype: torch.dtype = torch.bfloat16) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([shape], [dtype])


class Memory:
    """LMCache's tensor allocator over a tensor of its own."""

    def __init__(self, length_bytes: int = 8 << 20) -> None:
        self._allocator = TensorMemoryAllocator(torch.zeros(length_bytes, dtype=torch.uint8))

    def give(self, desc: MemoryLayoutDesc | None = None) -> MemoryObj:
        """A real MemoryObj of that layout, filled with zeros."""
        desc = desc or layout()
        one = self._allocator.allocate(desc.shapes, desc.dtypes)
        assert one is not None
        one.raw_data.zero_()
        return one

    def filled(self, seed: int, desc: MemoryLayoutDesc | None = None) -> MemoryObj:
        """A MemoryObj of random bits."""
        one = self.give(desc)
        torch.manual_seed(seed)
        one.raw_data.copy_(torch.randint(0, 256, one.raw_data.shape, dtype=torch.uint8))
        return one


def raw(one: MemoryObj) -> bytes:
    """The logical bytes of an object."""
    return bytes(one.byte_array)


def store(made: Any, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Any:
    """The L2StoreResult of a task; waits on the eventfd."""
    task = made.submit_store_task(list(keys), list(objects))
    while True:
        ring(made.get_store_event_fd())
        done = made.pop_completed_store_tasks()
        if task in done:
            return done[task]


def find(made: Any, keys: Sequence[ObjectKey], groups: dict[int, MemoryLayoutDesc] | None = None) -> list[bool]:
    """The bits of a lookup; waits on the eventfd."""
    task = made.submit_lookup_and_lock_task(list(keys), {0: layout()} if groups is None else groups)
    return bits(made.get_lookup_and_lock_event_fd(), made.query_lookup_and_lock_result, task, len(keys))


def load(made: Any, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[bool]:
    """The bits of a load; waits on the eventfd."""
    task = made.submit_load_task(list(keys), list(objects))
    return bits(made.get_load_event_fd(), made.query_load_result, task, len(keys))


def bits(fd: int, query: Any, task: int, count: int) -> list[bool]:
    while True:
        ring(fd)
        found = query(task)
        if found is not None:
            assert query(task) is None, "a result is given once"
            return [found.test(i) for i in range(count)]


def ring(fd: int) -> None:
    """Waits until the eventfd is signalled, and reads it."""
    ready, _, _ = select.select([fd], [], [], SOON_S)
    assert ready, f"eventfd {fd}: silent for {SOON_S:g} s"
    os.eventfd_read(fd)
