"""The prefix tree of the cached blocks as a message: a snapshot in pieces, then sums in a thread.

Other calls run between two pieces of the snapshot. So each block is shown as of a different moment.
One tree is computed at a time. Meanwhile it takes about 120 bytes a block.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np

from tierd._proto import admin_pb2 as pb
from tierd.cache.cache import Cache
from tierd.cache.operator import Operator
from tierd.core.formats.model import StructArray
from tierd.core.plan import Bytes, Ids
from tierd.core.reports.prefix_tree import (
    NODE,
    SORTS,
    Column,
    Seen,
    blocks_cut_off,
    chosen,
    listed,
    reuse_by_depth,
    runs_of,
    shared_tokens,
)
from tierd.errors import InvalidArgument, NotFound

LIMIT, LIMIT_MOST = 200, 4096
"""Nodes of a reply."""
DEPTH = 8
NAME_BYTES = 8
"""Of a hash, in the snapshot."""
SAME_FIELDS = [name for name, _ in NODE if name in pb.TreeNode.DESCRIPTOR.fields_by_name]
"""Fields of a node that the message has too."""


class Trees:
    """See the module."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._core = cache, cache.core
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "tierd-tree")  # has one thread, also after cancelled calls

    async def reply(self, request: pb.TreeRequest) -> pb.TreeReply:
        """The tree of these blocks. Raises NotFound and InvalidArgument."""
        if request.sort and request.sort not in SORTS:
            raise InvalidArgument(f"sort: {request.sort!r} is unknown; use one of {', '.join(SORTS)}")
        namespaces = self._namespaces(request)
        reply: pb.TreeReply
        async with self._turn:
            begun = time.monotonic()
            under = await Operator(self._cache).find(request.root) if request.root else None
            pieces = await self._snapshot(namespaces)
            # In a thread: ten million blocks take seconds, and numpy releases the interpreter lock.
            reply, nodes = await self._in_thread(self._computed, pieces, under, request)
            hashes, now = self._hashes(nodes), self._cache.clock.now()
            reply.nodes.extend(await self._in_thread(self._messages, nodes, hashes, now))
            reply.took_s = time.monotonic() - begun
        return reply

    async def _in_thread(self, work: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def _namespaces(self, request: pb.TreeRequest) -> Column | None:
        """The ids of the requested namespaces; None for all. Raises NotFound."""
        if request.has_namespace:
            self._cache.registry.get(request.namespace)
            return np.asarray([request.namespace], np.uint32)
        if not request.model:
            return None
        found = self._cache.registry.current(model=request.model)
        if not found:
            raise NotFound(f"model {request.model}: no namespace has it; list them with `tierctl namespaces`")
        return np.asarray([rank_id for namespace in found for rank_id in namespace.ids], np.uint32)

    async def _snapshot(self, namespaces: Column | None) -> list[Seen]:
        pieces = [self._piece(np.zeros(0, np.int64))]
        for ids in self._core.pieces():
            blocks = self._core.blocks(of=ids)
            if namespaces is not None:
                blocks = blocks[np.isin(self._core.column("namespace", blocks), namespaces)]
            pieces.append(self._piece(blocks))
            await asyncio.sleep(0)
        return pieces

    def _piece(self, ids: Ids) -> Seen:
        """The columns of these blocks."""
        column, bits = self._core.column, self._core.tier_bits(ids)
        nearest = np.zeros(len(ids), np.int8)
        for tier in reversed(range(len(self._cache.tiers))):
            nearest[(bits >> np.uint64(tier) & np.uint64(1)).astype(bool)] = tier
        namespace, position = column("namespace", ids), column("position", ids)
        size = self._cache.registry.tokens_per_block_of(namespace)
        return Seen(
            id=ids.astype(np.int32),
            parent=column("parent", ids),
            namespace=namespace,
            position=position,
            depth_tokens=np.minimum(position.astype(np.int64) * size, (1 << 32) - 1).astype(np.uint32),
            tokens=column("tokens", ids),
            hits=column("hits", ids),
            last_used=column("last_used", ids),
            tier=nearest,
            name=column("hash", ids)[:, 0].copy(),  # not the whole hashes
        )

    def _computed(
        self, pieces: list[Seen], under: int | None, request: pb.TreeRequest
    ) -> tuple[pb.TreeReply, StructArray]:
        """The reply without nodes, and the nodes. Raises NotFound if no piece has the block `under`."""
        seen = Seen(*(np.concatenate([getattr(piece, field.name) for piece in pieces]) for field in fields(Seen)))
        pieces.clear()  # frees their memory
        if under is not None and under not in seen.id:
            raise NotFound(f"block {request.root}: not in these namespaces, or evicted meanwhile; see `tierctl blocks`")
        limit, depth = min(request.limit or LIMIT, LIMIT_MOST), request.depth or DEPTH
        runs = runs_of(seen, under=under)
        rows = chosen(runs, sort=request.sort or SORTS[0], limit=limit, depth=depth)
        depths = [pb.DepthReuse(**depth._asdict()) for depth in reuse_by_depth(runs.seen)]
        reply = pb.TreeReply(
            blocks=len(runs.of),
            tokens=int(runs.seen.tokens.sum()),
            tokens_shared=shared_tokens(runs),
            runs=len(runs.first),
            blocks_cut_off=0 if request.root else blocks_cut_off(runs),
            is_cut=len(rows) < len(runs.first),
            depths=depths,
        )
        return reply, listed(runs, rows, tiers=len(self._cache.tiers))

    def _hashes(self, nodes: StructArray) -> list[bytes]:
        """The hash of each node; only its first bytes if its id stands for another block by now."""
        now: Bytes = self._core.names(nodes["id"])["hash"]
        then = np.ascontiguousarray(nodes["name"]).view(np.uint8).reshape(-1, NAME_BYTES)
        same = (now[:, :NAME_BYTES] == then).all(axis=1).tolist()
        return [(now[i] if same[i] else then[i]).tobytes() for i in range(len(nodes))]

    def _messages(self, nodes: StructArray, hashes: list[bytes], now: float) -> list[pb.TreeNode]:
        names = [tier.spec.name for tier in self._cache.tiers]
        return [
            pb.TreeNode(
                hash=block_hash,
                idle_s=max(0.0, now - float(node["last_used"])),
                tier_blocks={
                    name: count for name, count in zip(names, node["tier_blocks"].tolist(), strict=True) if count
                },
                **{field: int(node[field]) for field in SAME_FIELDS},
            )
            for node, block_hash in zip(nodes, hashes, strict=True)
        ]
