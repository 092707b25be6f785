"""LMCache's object keys as tierd's blocks: their namespace, name and layout of bytes.

The namespace contains the model, its slice (kv_rank), the object group and the layout. A name
contains the chunk hash and the cache salt. There may be as many salts as users, too many for a
namespace each. Blocks have no parents: a chunk hash does not tell its predecessor.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import lmcache
import numpy as np

from tierd.client import NamespaceSpec, OpenedNamespace
from tierd.errors import InvalidArgument
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.pieces import Bytes
from tierd.integrations.store import EngineStore


@dataclass(frozen=True, slots=True)
class Layout:
    """Shapes and types of an object, as one word (empty: any); the most bytes of one."""

    word: str
    length_bytes: int

    @classmethod
    def of(cls, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout:
        """The layout of an object or a group, from LMCache's description."""
        parts = [(tuple(shape), str(dtype), int(dtype.itemsize)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        word = ";".join(f"{list(shape)} {dtype}" for shape, dtype, _ in parts)
        return cls(word, max(1, sum(prod(shape) * size for shape, _, size in parts)))


@dataclass(frozen=True, slots=True)
class Part:
    """Keys of a task that share a namespace. members: indices into the task."""

    space: OpenedNamespace
    members: tuple[int, ...]


class ObjectNames:
    """Namespaces of all objects over one store. Threads may share it. If object_bytes is 0, the
    layout separates them; else it does not, and no object is longer."""

    def __init__(self, store: EngineStore, options: Options, *, object_bytes: int) -> None:
        self._store, self._options = store, options
        self._any = Layout("", object_bytes) if object_bytes else None
        self._spaces: dict[tuple[Any, ...], OpenedNamespace] = {}
        self._seen: dict[int, Layout] = {}
        self._turn = threading.Lock()

    def parts_of_objects(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[Part]:
        """Objects in memory show their layouts."""
        layouts = [layout_of(one) for one in objects]
        self._seen.update({key.object_group_id: layout for key, layout in zip(keys, layouts, strict=True)})
        return self._parts(keys, layouts)

    def parts_of_keys(self, keys: Sequence[Any], groups: Mapping[int, Any]) -> list[Part]:
        """For keys alone: layouts of the groups, else the last ones seen. Keys of unknown groups are dropped."""
        known = {group: Layout.of(desc.shapes, desc.dtypes) for group, desc in groups.items()}
        return self._parts(
            keys, [known.get(key.object_group_id) or self._seen.get(key.object_group_id) for key in keys]
        )

    def _parts(self, keys: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Part]:
        members: dict[tuple[Any, ...], list[int]] = {}
        for i, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            plain = self._any or layout
            if plain is not None:
                members.setdefault((key.model_name, key.kv_rank, key.object_group_id, plain), []).append(i)
        return [Part(self._space(*identity), tuple(found)) for identity, found in members.items()]

    def _space(self, model_name: str, kv_rank: int, group: int, layout: Layout) -> OpenedNamespace:
        identity = (model_name, kv_rank, group, layout)
        with self._turn:
            space = self._spaces.get(identity)
            if space is None:
                space = self._spaces[identity] = self._store.open(self._spec(*identity))
        return space

    def _spec(self, model_name: str, kv_rank: int, group: int, layout: Layout) -> NamespaceSpec:
        words = ("TierdL2", release(), f"{kv_rank:#x}", layout.word)
        return NamespaceSpec(
            model=self._options.model or model_name or "lmcache",
            weights_digest=self._options.weights_digest,
            tokens_per_block=1,  # the tokens of a chunk are unknown
            block_bytes=layout.length_bytes,
            group=str(group),
            salt=hashlib.sha256("\0".join(words).encode()).hexdigest(),
        )


def name_of(key: Any) -> bytes:
    """The key's name in its namespace; a salt has no NUL."""
    return bytes(key.cache_salt.encode() + b"\0" + key.chunk_hash)


def layout_of(one: Any) -> Layout:
    """The layout of a MemoryObj."""
    try:
        return Layout.of(one.get_shapes(), one.get_dtypes())
    except AssertionError:  # allocated with one shape alone
        return Layout.of([one.get_shape()], [one.get_dtype()])


def bytes_of(one: Any, *, writable: bool = False) -> Bytes:
    """The bytes of a MemoryObj, uint8 [its logical size], in place. Raises InvalidArgument."""
    found = np.frombuffer(one.byte_array, dtype=np.uint8)
    if not len(found) or (writable and not found.flags.writeable):
        raise InvalidArgument(
            f"object: {type(one).__name__} of {len(found)} bytes cannot be filled; give an allocated one"
        )
    return found


def release() -> str:
    """LMCache's major and minor version."""
    return ".".join(lmcache.__version__.split(".")[:2])


def facts_of(options: Options) -> EngineFacts:
    """Known facts of LMCache; its models are known only with its keys."""
    return EngineFacts(engine="lmcache", version=lmcache.__version__, face="TierdL2", model=options.model, role="l2")
