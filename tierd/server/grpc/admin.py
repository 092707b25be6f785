"""The Admin service: translates messages to the operator's verbs and back.

`guard` has already refused callers who are not operators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierd._proto import admin_pb2 as pb
from tierd._proto import admin_pb2_grpc
from tierd.cache.cache import Cache
from tierd.cache.operator import BlockFilter, Operator
from tierd.cache.scrub import Scrub
from tierd.core.admission import Verdict
from tierd.core.formats.model import PRIORITY_DEFAULT, RETENTION_LIMIT_S, PageState, StructArray
from tierd.core.index.namespaces import namespace_record
from tierd.core.plan import TierStats
from tierd.errors import ConfigError, InvalidArgument
from tierd.live_settings import settings_of
from tierd.server.grpc.caller import CALLER
from tierd.server.operators.ceiling import Ceiling
from tierd.server.operators.explaining import Explaining
from tierd.server.operators.live import LiveSettings
from tierd.server.operators.scrubbing import Scrubbing
from tierd.server.operators.tree import Trees
from tierd.server.operators.wear import Wear
from tierd.server.recording.recorder import Recorder
from tierd.store_codecs import EncodingCounts
from tierd.tiers.arena.arena import Arena
from tierd.tiers.tier import Tier

LIST_LIMIT = 10_000
"""Blocks in one answer."""
DEADLINE_S = 60.0
"""Default for verbs that wait, if the request has no deadline."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as the server knows it."""

    id: int
    pid: int
    uid: int
    tenant: str
    name: str
    sdk: str
    engine: dict[str, str]
    namespaces: list[int]
    state: str
    age_s: float


@dataclass(frozen=True, slots=True)
class About:
    """The lifecycle's part: the daemon's identity, state and sessions, and how to store a namespace
    or release the arena."""

    version: str
    instance: str
    started: float
    notices: Callable[[], list[str]]
    state: Callable[[], str]
    sessions: Callable[[], list[SessionRow]]
    keep_namespaces: Callable[..., Awaitable[None]]
    release: Callable[[bool], None]
    scrub: Scrub
    wear: Wear
    recorder: Recorder
    live: LiveSettings
    ceiling: Ceiling | None


class AdminService(admin_pb2_grpc.AdminServicer):
    """The operators' verbs."""

    def __init__(self, cache: Cache, *, about: About) -> None:
        self._cache = cache
        self._operator = Operator(cache)
        self._about = about
        self._scrubbing = Scrubbing(cache, about.scrub)
        self._explaining = Explaining(cache)
        self._trees = Trees(cache)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        about, stats = self._about, self._cache.core.stats()
        return pb.StatusReply(
            version=about.version,
            instance=about.instance,
            pid=os.getpid(),
            uptime_s=time.monotonic() - about.started,
            state=about.state(),
            sessions=stats.sessions,
            leases=stats.leases,
            reservations=stats.reservations,
            blocks=stats.blocks,
            counters=self._cache.metrics.counters(),
            notices=about.notices(),
            cpu_s=time.process_time(),
            queues={"transfers": self._cache.flights.count, "links": self._cache.parts.mover.queued()},
        )

    async def Tiers(self, request: pb.TiersRequest, context: Any) -> pb.TiersReply:
        moved = self._bytes_moved()
        pairs = zip(self._cache.tiers, self._cache.core.tier_stats(), strict=True)
        infos = [_tier_info(tier, stats, moved) for tier, stats in pairs]
        for tier, info in zip(self._cache.tiers, infos, strict=True):
            if isinstance(tier, Arena):
                info.unready_bytes, info.unready_reason = tier.unready_bytes, tier.unready_reason
            info.level = tier.spec.level
        for position in self._cache.health.breakers:
            infos[position].trouble = self._cache.health.trouble(position)
        for position, codec in self._cache.store_codecs.codecs.items():
            infos[position].codec = codec.name
        return pb.TiersReply(tiers=infos)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeReply:
        position = self._operator.tier_position(request.tier)
        trouble = await self._cache.health.resume(position, timeout_s=_timeout_s(request.deadline_s))
        return pb.ResumeReply(trouble=trouble)

    async def Blocks(self, request: pb.BlocksRequest, context: Any) -> pb.BlocksReply:
        wanted = BlockFilter(
            tier=request.tier,
            namespace=request.namespace if request.has_namespace else None,
            pinned=request.pinned,
            hash_prefix=request.hash_prefix,
            sort=request.sort,
        )
        page = await self._operator.blocks(wanted, offset=request.offset, limit=min(request.limit or 50, LIST_LIMIT))
        return pb.BlocksReply(blocks=[self._block_info(row) for row in page.rows], total=page.total)

    async def Inspect(self, request: pb.InspectRequest, context: Any) -> pb.InspectReply:
        core, block = self._cache.core, await self._operator.find(request.hash)
        row, meta = core.describe(np.array([block]))[0], core.metas(np.array([block]))[0]
        children = core.describe(core.children(block))["hash"]
        return pb.InspectReply(
            block=self._block_info(row),
            pages=[self._page_info(page) for page in core.pages(block)],
            children=[child.tobytes() for child in children],
            digest=meta["digest"].tobytes(),
            slices=int(meta["slices"]),
        )

    async def Sessions(self, request: pb.SessionsRequest, context: Any) -> pb.SessionsReply:
        held = {s.session: s for s in self._cache.core.session_stats()}
        return pb.SessionsReply(sessions=[_session_info(row, held[row.id]) for row in self._about.sessions()])

    async def Namespaces(self, request: pb.NamespacesRequest, context: Any) -> pb.NamespacesReply:
        registry, counts = self._cache.registry, await self._operator.counts()
        return pb.NamespacesReply(
            namespaces=[
                pb.NamespaceInfo(
                    id=n.id,
                    tenant=n.tenant,
                    epoch=n.epoch,
                    model=n.spec.model,
                    text=namespace_record(n).decode(),
                    blocks=sum(counts[i] for i in n.ids),
                    current=registry.is_current(n),
                    encoding=_encoding(self._cache.store_codecs.counts.get(n.id)),
                )
                for n in registry.all()
            ]
        )

    async def Evict(self, request: pb.EvictRequest, context: Any) -> pb.EvictReply:
        gone = await self._operator.evict(request.hashes, request.tier)
        return pb.EvictReply(blocks=gone.blocks, bytes=gone.bytes, pinned=gone.pinned)

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinReply:
        return pb.PinReply(blocks=await self._operator.pin(request.hashes))

    async def Unpin(self, request: pb.PinRequest, context: Any) -> pb.PinReply:
        return pb.PinReply(blocks=await self._operator.unpin(request.hashes))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        if request.undo:
            self._about.release(False)
            return pb.DrainReply(leases_left=self._operator.undo_drain())
        left = await self._operator.drain(timeout_s=_timeout_s(request.deadline_s))
        if request.release and not left and self._cache.is_draining:
            self._about.release(True)
        return pb.DrainReply(leases_left=left)

    async def Flush(self, request: pb.FlushRequest, context: Any) -> pb.FlushReply:
        flushed = await self._operator.flush(timeout_s=_timeout_s(request.deadline_s))
        return pb.FlushReply(blocks=flushed.blocks, bytes=flushed.bytes, left=flushed.left)

    async def BumpEpoch(self, request: pb.BumpEpochRequest, context: Any) -> pb.BumpEpochReply:
        fresh, blocks = await self._operator.bump_epoch(
            model=request.model, namespace_id=request.namespace, keep=self._about.keep_namespaces
        )
        return pb.BumpEpochReply(namespaces=len(fresh), blocks=blocks)

    async def Quiesce(self, request: pb.QuiesceRequest, context: Any) -> pb.QuiesceReply:
        made = await self._cache.background.quiesce(timeout_s=_timeout_s(request.deadline_s))
        return pb.QuiesceReply(transfers=made)

    async def Scrub(self, request: pb.ScrubRequest, context: Any) -> AsyncGenerator[pb.ScrubPass, None]:
        tier = self._operator.tier_position(request.tier)
        async with contextlib.aclosing(self._scrubbing.run(request, tier)) as passes:
            async for passed in passes:
                yield passed

    async def ScrubStatus(self, request: pb.ScrubStatusRequest, context: Any) -> pb.ScrubStatusReply:
        return self._scrubbing.status(self._operator.tier_position(request.tier))

    async def RecordStart(self, request: pb.RecordStartRequest, context: Any) -> pb.RecordReply:
        return await self._about.recorder.start(request)

    async def RecordStop(self, request: pb.RecordStopRequest, context: Any) -> pb.RecordReply:
        return await self._about.recorder.stop()

    async def RecordStatus(self, request: pb.RecordStatusRequest, context: Any) -> pb.RecordReply:
        return self._about.recorder.status()

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainReply:
        return await self._explaining.reply(request)

    async def Wear(self, request: pb.WearRequest, context: Any) -> pb.WearReply:
        return await self._about.wear.reply()

    async def Set(self, request: pb.SetRequest, context: Any) -> pb.SetReply:
        live = self._about.live
        if not request.settings:
            listed = (setting for setting in settings_of(live.config) if setting.is_live)
            return pb.SetReply(
                settings=[
                    pb.LiveSetting(name=s.name, value=s.text(s.value), default_value=s.default, allowed=s.allowed)
                    for s in listed
                ]
            )
        rows = [row for row in self._about.sessions() if row.id == CALLER.get().session]
        who = {"uid": rows[0].uid, "pid": rows[0].pid, "tenant": rows[0].tenant} if rows else {}
        try:
            texts = {setting.name: setting.value for setting in request.settings}
            changed = await live.set(texts, is_check=request.check, who=who)
        except ConfigError as error:
            raise InvalidArgument(str(error)) from None
        changes = [pb.SettingChange(**change._asdict()) for change in changed.changes]
        return pb.SetReply(changes=changes, notes=changed.notes)

    async def Tree(self, request: pb.TreeRequest, context: Any) -> pb.TreeReply:
        return await self._trees.reply(request)

    async def Ceiling(self, request: pb.CeilingRequest, context: Any) -> pb.CeilingReply:
        if self._about.ceiling is None:
            return pb.CeilingReply(trouble="server.ceiling is off; set it to true, and restart")
        return await self._about.ceiling.reply()

    def _block_info(self, row: StructArray) -> pb.BlockInfo:
        priority, retention_s = self._said(row)
        return pb.BlockInfo(
            hash=row["hash"].tobytes(),
            parent=row["parent"].tobytes(),
            namespace=int(row["namespace"]),
            position=int(row["position"]),
            tokens=int(row["tokens"]),
            bytes=int(row["length"]),
            pins=int(row["pins"]),
            hits=int(row["hits"]),
            idle_s=max(0.0, self._cache.clock.now() - float(row["last_used"])),
            tiers=[t.spec.name for t in self._cache.tiers if int(row["tiers"]) >> t.position & 1],
            declined=Verdict(int(row["declined"])).name.lower() if row["declined"] else "",
            priority=priority,
            retention_s=retention_s,
        )

    def _said(self, row: StructArray) -> tuple[int, float]:
        """The block's priority, and its remaining time; 0 if it has no limit."""
        left_s = float(row["until_s"]) - self._cache.core.unix_s(self._cache.clock.now())
        if not row["priority"] or (row["until_s"] and not 0 < left_s <= RETENTION_LIMIT_S + 1):
            return PRIORITY_DEFAULT, 0.0
        return int(row["priority"]) - 1, left_s if row["until_s"] else 0.0

    def _page_info(self, page: StructArray) -> pb.PageInfo:
        extent = page["extent"]
        return pb.PageInfo(
            tier=self._cache.tiers[int(extent["tier"])].spec.name,
            state=PageState.names()[int(page["state"])],
            segment=int(extent["segment"]),
            slot=int(extent["slot"]),
            offset=int(extent["offset"]),
            generation=int(extent["generation"]),
            pins=int(page["pins"]),
        )

    def _bytes_moved(self) -> dict[str, tuple[int, int]]:
        """Tier name to bytes that transfers read from it and wrote to it."""
        moved: dict[str, tuple[int, int]] = {}
        for name, count in self._cache.metrics.counters().items():
            if name.startswith("tierd_bytes_total{"):
                source, target = name.split('"')[1].split(">")
                read, written = moved.get(source, (0, 0))
                moved[source] = (read + count, written)
                read, written = moved.get(target, (0, 0))
                moved[target] = (read, written + count)
        return moved


def _timeout_s(wanted: float) -> float:
    """The request's deadline, else the default, within the call's. Raises InvalidArgument."""
    if not wanted >= 0:  # also refuses NaN, which the event loop's timers cannot order
        raise InvalidArgument(f"deadline_s: {wanted} is no duration; send 0 or more seconds")
    return min(wanted or DEADLINE_S, CALLER.get().left_s * 0.95)


def _tier_info(tier: Tier, stats: TierStats, moved: dict[str, tuple[int, int]]) -> pb.TierInfo:
    read, written = moved.get(stats.name, (0, 0))
    return pb.TierInfo(
        name=stats.name,
        kind=int(stats.kind),  # type: ignore[arg-type]
        capacity_bytes=stats.capacity_bytes,
        used_bytes=stats.used_bytes,
        assigned_bytes=stats.assigned_bytes,
        pages_reserved=stats.pages_reserved,
        pages_ready=stats.pages_ready,
        pages_retiring=stats.pages_retiring,
        pages_pinned=stats.pages_pinned,
        evictions=stats.evictions,
        bytes_read=read,
        bytes_written=written,
        place=tier.place,
        mode=tier.mode,
        serving=stats.serving,
        pages_quarantined=stats.pages_quarantined,
        classes=[
            pb.ClassInfo(
                class_bytes=c.class_bytes, domain=c.domain, segments=c.segments, pages=c.pages, pages_free=c.pages_free
            )
            for c in stats.classes
        ],
    )


def _session_info(row: SessionRow, held: Any) -> pb.SessionInfo:
    info = pb.SessionInfo(
        id=row.id,
        pid=row.pid,
        uid=row.uid,
        tenant=row.tenant,
        name=row.name,
        sdk=row.sdk,
        engine=row.engine,
        namespaces=row.namespaces,
        state=row.state,
        age_s=row.age_s,
    )
    info.leases, info.reservations = held.leases, held.reservations
    info.pinned_bytes, info.reserved_bytes = sum(held.pinned_bytes), sum(held.reserved_bytes)
    return info


def _encoding(counts: EncodingCounts | None) -> pb.Encoding | None:
    return None if counts is None else pb.Encoding(**dataclasses.asdict(counts))
