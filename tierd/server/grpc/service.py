"""The Cache service: translates messages to verbs of `Cache` and back.

Messages are checked in messages.py, callers in guard.py; byte streams are in streams.py. Handlers
have a few lines, so they show the protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np

from tierd import call_context
from tierd._proto import cache_pb2 as pb
from tierd._proto import cache_pb2_grpc
from tierd.cache.cache import Cache
from tierd.cache.commit import Sums
from tierd.cache.puts import ANSWER_SHARE
from tierd.core.formats.block import Namespace
from tierd.core.formats.model import BlockStatus, TierKind, Wanted
from tierd.core.plan import GroupQuery, PutQuery
from tierd.errors import InvalidArgument
from tierd.events.naming import names_of
from tierd.events.router_view import Names
from tierd.server.grpc import messages, streams
from tierd.server.grpc.caller import CALLER
from tierd.server.grpc.guard import parsed
from tierd.server.session.grants import Grants
from tierd.server.session.hit_reports import LOOKED_UP, USED
from tierd.server.session.recent_namespaces import RecentNamespaces
from tierd.tcp.codecs import WIRE_CODECS
from tierd.tiers.tier import is_device

KeepNamespaces = Callable[[Namespace], Awaitable[None]]
"""Stores the record of a namespace, unless stored already, before any client may use it."""


COMPUTED_LIMIT = 64
"""Decisions of an engine that one lookup may tell; more are ignored."""


class CacheService(cache_pb2_grpc.CacheServicer):
    """The engines' verbs. batch_limit: blocks in one call."""

    def __init__(self, cache: Cache, *, keep_namespaces: KeepNamespaces, batch_limit: int) -> None:
        self._cache = cache
        self._keep_namespaces = keep_namespaces
        self._batch_limit = batch_limit
        self._known: dict[tuple[int, int], Wanted] = {}  # cache of `_find_wanted`, since tiers never change
        self.grants = Grants(release=cache.release, abort=cache.abort, check_open=cache.tenant_of)
        self.recent_namespaces = RecentNamespaces()
        self.note_asked: Callable[..., None] | None = None
        """Set if traffic is recorded: gets a call's groups, and whether it is a lookup."""
        self.note_names: Callable[[Names], None] | None = None
        """Set if routers get events: gets the clients' names of blocks."""

    async def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: Any) -> pb.OpenNamespaceReply:
        session = CALLER.get().session
        limit = messages.error_limit(request.error_limit)
        namespace = self._cache.open_namespace(session, messages.spec_of(request), error_limit=limit)
        await self._keep_namespaces(namespace)
        # Raises SessionLost: a session that stopped meanwhile must not be remembered.
        self._cache.tenant_of(session)
        self.recent_namespaces.note(session, namespace.id)
        return pb.OpenNamespaceReply(
            namespace=namespace.id,
            digest=namespace.digest,
            epoch=namespace.epoch,
            codecs=WIRE_CODECS,
            batch_blocks=self._batch_limit,
            share_bytes=self._cache.core.share_bytes(TierKind.HOST),
        )

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupReply:
        groups, intent = self._asked(request.groups, is_lookup=True), messages.intent(request.intent)
        found = self._cache.lookup(CALLER.get().session, groups, intent=intent)
        for one in request.computed[:COMPUTED_LIMIT]:
            session, times = CALLER.get().session, (one.load_s, one.compute_s)
            self._cache.parts.decisions.computed(session, one.request, tokens=one.tokens, times=times)
        return pb.LookupReply(
            tokens=found.tokens,
            tier_of=[np.ascontiguousarray(tiers, dtype=np.int8).tobytes() for tiers in found.tier_of],
            tier_tokens=found.tier_tokens,
            paces=messages.paces_of(self._cache.flights.read_queues.paces(), tiers=len(self._cache.tiers)),
            prefetch=found.prefetch,
        )

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireReply:
        caller, groups = CALLER.get(), self._asked(request.groups)
        # Time is left for the answer, so a slow disk shortens the hit and does not fail the call.
        timeout_s = caller.left_s * ANSWER_SHARE
        kind = self._wanted(request.tier, request.nth)
        epochs = [self._cache.registry.get(g.namespaces[0]).epoch for g in groups]
        doubted = messages.generations_of(request.doubted) if request.copies else None
        if request.by_layer:
            lease = await self._cache.acquire_by_layer(caller.session, groups, kind=kind, timeout_s=timeout_s)
        else:
            lease = await self._cache.acquire(caller.session, groups, kind=kind, timeout_s=timeout_s, doubted=doubted)
        reply = messages.acquire_reply(
            lease.served, lease=lease.lease, tier_tokens=lease.tier_tokens, whole=lease.whole, epochs=epochs
        )
        return self.grants.give((caller.session, caller.request), reply, lease=lease.lease)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:
        self._cache.release(CALLER.get().session, request.leases)
        self._cache.cancel_prefetches(CALLER.get().session, request.prefetches)
        return pb.ReleaseReply()

    async def Prefetch(self, request: pb.PrefetchRequest, context: Any) -> pb.PrefetchReply:
        groups, wanted = self._queries(request.groups), self._wanted(request.tier, request.nth)
        order = messages.order(request)
        started = self._cache.prefetch(CALLER.get().session, groups, wanted, order)
        return pb.PrefetchReply(started=started.blocks, prefetch=started.id)

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveReply:
        if request.ahead:
            return await self._reserve_ahead(request)
        caller, groups = CALLER.get(), self._put_queries(request.groups)
        kind, durability = self._wanted(request.tier, request.nth), messages.durability(request.durability)
        reserved = await self._cache.reserve(
            caller.session, groups, kind=kind, durability=durability, timeout_s=caller.left_s * ANSWER_SHARE
        )
        given = [
            messages.handles(
                extents,
                status=statuses,
                tokens=group.blocks["tokens"],
                epoch=self._cache.registry.get(group.namespace).epoch,
            ).tobytes()
            for group, extents, statuses in zip(groups, reserved.extents, reserved.statuses, strict=True)
        ]
        reply = pb.ReserveReply(reservation=reserved.reservation, handles=given)
        numbers = [reserved.reservation] if reserved.reservation else []
        return self.grants.give((caller.session, caller.request), reply, reservations=numbers)

    async def _reserve_ahead(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        """Reserves for later puts: one group, repeated."""
        caller, groups = CALLER.get(), self._put_queries(request.groups)
        if len(groups) != 1:
            raise InvalidArgument(f"groups: {len(groups)} for later puts; give one")
        group = groups[0]
        puts = min(request.ahead, max(1, self._batch_limit // max(1, len(group.blocks))))
        kind = self._wanted(request.tier, request.nth)
        reserved = await self._cache.reserve_ahead(caller.session, group, puts=puts, kind=kind)
        epoch, tokens = self._cache.registry.get(group.namespace).epoch, group.blocks["tokens"]
        status = np.full(len(group.blocks), BlockStatus.RESERVED, np.uint16)
        handles = messages.handles(reserved.extents, status=status, tokens=tokens, epoch=epoch)
        reply = pb.ReserveReply(ahead=reserved.reservations, handles=[its.tobytes() for its in handles])
        return self.grants.give((caller.session, caller.request), reply, reservations=reserved.reservations)

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitReply:
        caller = CALLER.get()
        query = messages.commit_query(request, batch_limit=self._batch_limit, written=_written(caller.rest))
        committed = await self._cache.commit(caller.session, query, deadline=caller.deadline)
        reply = messages.commit_reply(committed)
        return self.grants.give((caller.session, caller.request), reply, lease=committed.lease)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortReply:
        self._cache.abort(CALLER.get().session, request.reservation)
        return pb.AbortReply()

    async def Put(self, chunks: AsyncIterator[streams.PutChunk], context: Any) -> pb.PutReply:
        first = await streams.first_chunk(chunks)
        group = self._put_queries([first.head.group])[0]
        statuses = await streams.put(self._cache, CALLER.get(), group, first=first, chunks=chunks)
        return pb.PutReply(statuses=statuses.astype("<u2").tobytes())

    async def Get(self, request: pb.GetRequest, context: Any) -> AsyncIterator[bytes]:
        group = self._asked([request.group])[0]
        sent = streams.get(self._cache, CALLER.get(), group, first=request.first, codec=request.codec)
        async for chunk in sent:
            yield chunk

    async def ReportAttention(self, request: pb.ReportAttentionRequest, context: Any) -> pb.ReportAttentionReply:
        if len(request.mass) % 4:
            raise InvalidArgument(
                f"mass: {len(request.mass)} bytes is no multiple of 4; send one f32 per rank and block"
            )
        mass = np.frombuffer(request.mass, dtype="<f4")
        self._cache.report_attention(CALLER.get().session, request.lease, request.group, mass)
        return pb.ReportAttentionReply()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Events]:
        caller = CALLER.get()
        async for events in self._cache.watch(caller.session, after=request.after, sees_all=caller.is_admin):
            yield pb.Events(
                events=[
                    pb.Event(
                        sequence=e.sequence,
                        kind=pb.Event.Kind.Name(e.kind),
                        tier=e.tier,
                        namespace=e.namespace,
                        hashes=e.hashes,
                        reason=e.reason,
                    )
                    for e in events
                ]
            )

    def note_hit_report(self, session: int, report: bytes, *, times: int) -> None:
        """Counts gets or lookups that a session made without calls, from a message of its notices.
        Raises TierdErrors."""
        is_lookup, group = report.startswith(LOOKED_UP), parsed(pb.Group.FromString, report[len(USED) :])
        mine = partial(self._cache.namespace_for, session)
        if len(group.ranks) > 1 or group.need != pb.NEED_PREFIX:
            raise InvalidArgument("group: several ranks, or not a prefix; report one-sided gets of one rank's prefix")
        found = messages.queries([group], namespace_of=mine, batch_limit=self._batch_limit)
        if self.note_asked:
            for _ in range(times):
                self.note_asked(found, is_lookup=is_lookup)
        self._cache.note_used(session, found, times=times, is_lookup=is_lookup)

    def _asked(self, groups: Any, *, is_lookup: bool = False) -> list[GroupQuery]:
        """As _queries, and records the query, whatever the answer."""
        found = self._queries(groups)
        if found and found[0].request:
            call_context.add(request=found[0].request.decode(errors="replace"))
        if self.note_asked:
            self.note_asked(found, is_lookup=is_lookup)
        return found

    def _queries(self, groups: Any) -> list[GroupQuery]:
        return messages.queries(groups, namespace_of=self._namespace_of, batch_limit=self._batch_limit)

    def _put_queries(self, groups: Any) -> list[PutQuery]:
        found = messages.put_queries(groups, namespace_of=self._namespace_of, batch_limit=self._batch_limit)
        if self.note_names:
            for names in [names_of(group, self._namespace_of(group.namespace, group.digest)) for group in groups]:
                self.note_names(names)
        return found

    def _namespace_of(self, namespace_id: int, digest: bytes) -> Namespace:
        return self._cache.namespace_for(CALLER.get().session, namespace_id, digest)

    def _wanted(self, value: int, nth: int) -> Wanted:
        """Any tier of a kind, or the nth from 1."""
        found = self._known.get((value, nth))
        if found is None:
            found = self._known[value, nth] = self._find_wanted(value, nth)
        return found

    def _find_wanted(self, value: int, nth: int) -> Wanted:
        """Requires a name if there are several GPUs, since pages on one are useless to another."""
        kind = messages.tier_kind(value)
        mine = [tier for tier in self._cache.tiers if tier.spec.kind is kind]
        if not mine:
            raise InvalidArgument(f"tier: this daemon has no {kind.name} tier; configure one, or ask for another kind")
        names = ", ".join(tier.spec.name for tier in mine)
        if nth > len(mine):
            raise InvalidArgument(f"tier: {kind.name.lower()}.{nth - 1} does not exist; this daemon has {names}")
        if not nth and len(mine) > 1 and is_device(mine[0]):
            raise InvalidArgument(f"tier: {kind.name.lower()} may be any of several GPUs; name one of {names}")
        return mine[nth - 1].spec if nth else kind


def _written(rest: Callable[[], Awaitable[bytes]] | None) -> Sums | None:
    """Waits for the message that the commit is written, and returns its sums. None if no message
    can follow."""

    async def sums() -> bytes:
        assert rest is not None
        return bytes(parsed(pb.Written.FromString, await rest()).sums)

    return sums if rest is not None else None
