"""Builds the daemon's parts from its configuration in dependency order, and closes them in reverse.

Blocks that survived in memory are in the core before the `Cache` exists. A store enters service
after its surviving blocks are loaded. Blocks of unknown namespaces are not loaded. Sockets are in
listeners.py, the daemon's states in lifecycle.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog

from tierd.cache.breaker import Tolerance
from tierd.cache.cache import Cache
from tierd.cache.events import EventLog
from tierd.cache.parts import Parts
from tierd.cache.read_queues import Limits
from tierd.cache.scrub import Scrub
from tierd.clock import Clock, MonotonicClock, ReplayClock
from tierd.codecs.block import Codec
from tierd.codecs.named import codec_named
from tierd.codecs.values import KVShape
from tierd.config import Config, DeviceConfig, HostConfig, MoverConfig, NvmeConfig, ServerConfig
from tierd.core.core import Core
from tierd.core.formats.block import KVGeometry, Namespace
from tierd.core.formats.model import FREED, Reason, TierKind, TierSpec
from tierd.core.index.namespaces import NamespaceRegistry, namespace_from_record, namespace_record
from tierd.core.plan import Plan, Start
from tierd.decisions.record import Decisions
from tierd.errors import ConfigError, CorruptRecord, InvalidArgument, Unsupported
from tierd.failpoint import failpoint
from tierd.metrics import Metrics
from tierd.mover import Mover
from tierd.policies.eviction import EVICTION
from tierd.policies.named import NamedPolicies
from tierd.policies.reuse.learner import Learner
from tierd.server.adoption import Adoption
from tierd.server.instance import Instance
from tierd.server.operators.learned import read_learner
from tierd.server.previous_run import open_holds
from tierd.store_codecs import CALIBRATIONS, StoreCodecs, read_calibrations
from tierd.tiers.arena.arena import Arena
from tierd.tiers.arena.holds import FormerHolder, HoldTable
from tierd.tiers.device.cuda import CudaTier, GpuOptions
from tierd.tiers.io.format_check import check_versions
from tierd.tiers.io.lock import check_way
from tierd.tiers.store.nvme import NvmeStore, Patience
from tierd.tiers.store.slots import HEADER_BYTES
from tierd.tiers.tier import Recovered, Tier, is_device, is_stored

TierTable = DeviceConfig | HostConfig | NvmeConfig
log = structlog.get_logger(__name__)

SILENCE_S = 5.0
"""Interval of the log lines that name a slow opening."""

GPU_TOLERANCE = Tolerance(faults=0, pause_s=0.1, pause_limit_s=30.0)
"""A dead GPU process is restarted after a pause, which doubles while it keeps dying. Wrong bytes
are their writer's fault, so they do not count."""

USUAL_SHAPE = KVShape(KVGeometry(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"), 16)
"""Every codec takes it."""

_T = TypeVar("_T")


@dataclass
class Assembly:
    """A daemon without its sockets."""

    config: Config
    instance: str
    tiers: list[Tier]
    cache: Cache
    metrics: Metrics
    holds: HoldTable
    started: float
    keeper: Instance
    state: str = "starting"
    must_release: bool = False
    drain_releases: bool = False
    former: list[FormerHolder] = dataclasses.field(default_factory=list)
    naming: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    named: set[int] = dataclasses.field(default_factory=set)
    policies: NamedPolicies = dataclasses.field(default_factory=NamedPolicies)
    adoptions: list[Adoption] = dataclasses.field(default_factory=list)
    """Of tiers whose blocks are not loaded yet."""
    scrub: Scrub = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Creates the scrub of the cache."""
        wanted = self.config.scrub
        self.scrub = Scrub(self.cache, period_s=wanted.period, bandwidth=wanted.bandwidth)

    @property
    def release(self) -> bool:
        """Whether to free the arena when the daemon ends: by the settings, or by a drain."""
        return self.must_release or self.drain_releases

    def release_at_end(self, wanted: bool) -> None:  # noqa: FBT001
        """A drain wants the arena freed when the daemon ends, or no longer."""
        self.drain_releases = wanted

    async def load(self) -> None:
        """Loads the blocks of stores beside the daemon's work. A store then enters service. Raises
        TierFailed."""
        try:
            for adoption in self.adoptions:
                tier, older = self.tiers[adoption.position], await adoption.finish(self.cache.clock.now)
                freed = np.zeros(len(older), FREED)
                freed["extent"], freed["reason"] = older, Reason.DUPLICATE
                tier.apply(Plan(freed=freed))
                self.cache.core.close_empty(tier.position)
                self.cache.health.admit(tier.position)
            self.cache.background.wake()  # blocks recovered in memory may exceed a watermark
        finally:
            self.adoptions = []
            self.cache.persistence.loaded.set()  # also after a failure, or waiters would wait in vain

    async def keep_namespaces(self, *namespaces: Namespace) -> None:
        """Records namespaces for the next daemon before any client may use them. Concurrent calls
        wait for each other."""
        await self.naming.acquire()
        # Shielded from the call's cancellation: its thread writes on, and a second writer would
        # corrupt the file.
        work = asyncio.ensure_future(self._keep(namespaces))
        work.add_done_callback(lambda _: self.naming.release())
        await asyncio.shield(work)

    async def _keep(self, namespaces: tuple[Namespace, ...]) -> None:
        new = [namespace for namespace in namespaces if namespace.id not in self.named]
        if new:  # one file for all: a model's bump may end thousands of namespaces
            await asyncio.to_thread(self.keeper.keep_namespaces, self.cache.registry.records())
        for namespace in new:
            for tier in self.tiers:
                await tier.keep_namespace(namespace_record(namespace))
            self.named.add(namespace.id)


@dataclass(frozen=True, slots=True)
class Opened:
    """A daemon's opened parts: tiers and what each found, the session table and its sessions, the
    clock.

    draw: returns that many random bits; a simulation's come from its seed.
    learner: what an earlier daemon learned of reuse; a recorded trace always gets the shipped one.
    """

    tiers: list[Tier]
    recovered: list[Recovered]
    holds: HoldTable
    former: list[FormerHolder]
    clock: Clock
    draw: Callable[[int], int] = secrets.randbits
    learner: Learner | None = None


@contextlib.asynccontextmanager
async def assemble(config: Config) -> AsyncIterator[Assembly]:
    """Builds everything except the sockets, and closes it at the end. Raises what Instance and the
    tiers' `open` raise."""
    started = time.monotonic()
    instance = Instance(config.server.state_dir)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(instance.close)
        daemon: Assembly | None = None
        tiers = build_tiers(config, instance=instance.id)
        clock: Clock = ReplayClock() if config.server.clock == "replay" else MonotonicClock()
        learning = asyncio.create_task(_learner(clock, Path(config.server.state_dir)))  # beside the tiers
        await _patiently(asyncio.to_thread(check_versions, *map(_directory, tiers)), "the format versions of the files")
        recovered: list[Recovered] = []
        for tier in tiers:
            recovered.append(await _patiently(tier.open(), f"{tier.spec.name} in {tier.place or 'memory'}"))
            # The flag is read when the daemon ends. A failed start keeps everything.
            stack.push_async_exit(partial(_close, tier, lambda: daemon))
        await _find_direct(tiers)
        holds, former = open_holds(tiers, recovered)
        stack.callback(lambda: holds.close(release=daemon is not None and daemon.release))
        failpoint("assembly.before_parts")
        opened = Opened(tiers, recovered, holds=holds, former=former, clock=clock, learner=await learning)
        daemon = put_together(config, opened, instance=instance)
        daemon.started = started
        stack.callback(daemon.cache.parts.mover.close)
        stack.callback(daemon.cache.directories.close)
        stack.push_async_callback(daemon.cache.commits_ended)
        stack.push_async_callback(daemon.naming.acquire)  # waits until no namespace is being written
        yield daemon


async def _learner(clock: Clock, state_dir: Path) -> Learner | None:
    """The reuse that an earlier daemon learned. None on a replay clock."""
    return None if clock.is_replay else await asyncio.to_thread(read_learner, state_dir)


async def _patiently(opening: Coroutine[Any, Any, _T], what: str) -> _T:
    """Awaits the opening, and logs while it hangs."""
    begun, task = time.monotonic(), asyncio.ensure_future(opening)
    while not (await asyncio.wait([task], timeout=SILENCE_S))[0]:
        log.warning("still opening", what=what, seconds=round(time.monotonic() - begun))
    return task.result()


async def _find_direct(tiers: Sequence[Tier]) -> None:
    """Finds the stores that each device can read without host memory."""
    stores = [tier for tier in tiers if is_stored(tier)]
    for tier in filter(is_device, tiers):
        await _patiently(tier.find_direct(stores), f"direct ways from stores to {tier.spec.name}")


def _directory(tier: Tier) -> Path:
    """The directory of a tier's files with versions. Raises ConfigError."""
    if isinstance(tier, Arena | CudaTier):
        return tier.choose().tables
    check_way(Path(tier.place))
    return Path(tier.place)


async def _close(tier: Tier, of: Callable[[], Assembly | None], error: object, *_: object) -> None:
    """Closes a tier. of: returns its daemon, None if the start failed before there was one."""
    daemon = of()
    if isinstance(tier, Arena | NvmeStore):
        tier.has_failed = error is not None and (daemon is None or daemon.state in ("starting", "loading"))
    is_freed = daemon is not None and daemon.release and tier.spec.kind in (TierKind.DEVICE, TierKind.HOST)
    await tier.close(release=is_freed)


def put_together(config: Config, opened: Opened, *, instance: Instance) -> Assembly:
    """Builds the core and the `Cache` over the opened parts."""
    tiers, recovered, clock = opened.tiers, opened.recovered, opened.clock
    registry = NamespaceRegistry()
    instance.restore_namespaces(registry)
    for tier, found in zip(tiers, recovered, strict=True):
        _restore_names(registry, found.namespaces, tier=tier.spec.name)
    former_namespaces = [number for namespace in registry.all() for number in namespace.ids]
    policies = NamedPolicies(opened.learner)
    calibrations = read_calibrations(Path(config.server.state_dir))
    store_codecs = StoreCodecs(codecs_of(config, tiers), registry.get, calibrations)
    _say_what_is_not_calibrated(tiers, store_codecs)
    core = _core_of(config, opened, policies, store_codecs)
    for session in (f.holder for f in opened.former):
        # Before their segments are restored: living processes can still write to theirs, so the
        # daemon must not.
        registry.keep_domain(session.tenant, session.domain)
        core.open_session(session.session, domain=session.domain)
    failpoint("assembly.before_adoption")
    adoptions = [Adoption(core, position, found, registry=registry) for position, found in enumerate(recovered)]
    for adoption in adoptions:
        adoption.begin(now=clock.now())
    metrics = Metrics()
    limits, threads = limits_of(config.mover), config.mover.hash_threads
    mover = Mover(tiers, hash_threads=threads, link_limit=limits.link_batches, store_codecs=store_codecs)
    cache = Cache(
        Parts(
            core=core,
            tiers=tiers,
            mover=mover,
            clock=clock,
            registry=registry,
            holds=opened.holds,
            metrics=metrics,
            events=EventLog(limit=config.server.watch_queue_events, first=1000 * opened.clock.wall_ms()),
            verify=config.host[0].verify if config.host else "first_hit",
            limits=limits,
            store_codecs=store_codecs,
            decisions=Decisions(config.server.decisions, tiers=len(tiers), now=clock.now, former=former_namespaces),
            seed=opened.draw(64),
        )
    )
    for each in opened.former:  # all, before any of them ends: a segment may hold only their pages
        cache.restore_session(each)
    stores = [tier for tier in tiers if tier.spec.kind is TierKind.NVME]
    cache.health.tolerate({tier.position: tolerance_of(config.nvme[tier.spec.index]) for tier in stores})
    cache.health.tolerate({tier.position: GPU_TOLERANCE for tier in tiers if is_device(tier)})
    for adoption, found in zip(adoptions, recovered, strict=True):
        if found.more_at_most:
            cache.health.withhold(adoption.position, adoption.progress)
            cache.persistence.loaded.clear()
        else:
            core.close_empty(adoption.position)
    named = {namespace.id for namespace in registry.all()}
    began, former = time.monotonic(), opened.former
    daemon = Assembly(config, instance.id, tiers, cache, metrics, opened.holds, began, instance, former=former)
    daemon.named, daemon.policies = named, policies
    daemon.adoptions = [a for a, found in zip(adoptions, recovered, strict=True) if found.more_at_most]
    return daemon


def _core_of(config: Config, opened: Opened, policies: NamedPolicies, store_codecs: StoreCodecs) -> Core:
    """The core, whose numbers begin above all that the tiers have used."""
    recovered, clock = opened.recovered, opened.clock
    return Core(
        [tier.spec for tier in opened.tiers],
        policies=policies,
        session_share=config.server.session_share,
        start=Start(
            generation=max(found.next_generation for found in recovered),
            segment=max(found.next_segment for found in recovered),
            id=opened.draw(60) + 1,
            seed=opened.draw(128),
            unix_s=clock.wall_ms() / 1000 - clock.now(),
        ),
        forms=store_codecs,
    )


def codecs_of(config: Config, tiers: Sequence[Tier]) -> dict[int, Codec]:
    """The codec of each store that has one, by the tier's position. Raises ConfigError."""
    stores = [(tier, config.nvme[tier.spec.index]) for tier in tiers if tier.spec.kind is TierKind.NVME]
    return {tier.position: _codec_of(tier.spec.name, table) for tier, table in stores if table.codec}


def _codec_of(store: str, table: NvmeConfig) -> Codec:
    """A store's codec, which works on this machine. Raises ConfigError."""
    try:
        codec = codec_named(table.codec)
        codec.check(USUAL_SHAPE)
    except (InvalidArgument, Unsupported) as error:
        raise ConfigError(f"{store}: {error}") from None
    return codec


def _say_what_is_not_calibrated(tiers: Sequence[Tier], store_codecs: StoreCodecs) -> None:
    """One notice for each store whose codec needs calibrations, if there is none."""
    for position, codec in store_codecs.codecs.items():
        if codec.is_calibrated and not store_codecs.calibrations:
            tiers[position].notices.append(
                f"{tiers[position].spec.name}: codec {codec.name} needs a calibration of each model, and none is in "
                f"{CALIBRATIONS}/ of server.state_dir: all blocks stay as they are; make one with `tierctl calibrate`, "
                "and restart"
            )


def _restore_names(registry: NamespaceRegistry, records: Sequence[bytes], *, tier: str) -> None:
    """Restores the namespaces that a tier knows. An unreadable record is dropped with its blocks,
    and logged."""
    for record in records:
        try:
            namespace_from_record(record)
        except CorruptRecord as error:
            log.warning("namespace dropped", tier=tier, error=str(error))
            continue
        registry.restore([record])


def limits_of(mover: MoverConfig) -> Limits:
    """The limits of transfers and of reads."""
    return Limits(
        batch_blocks=mover.batch_blocks,
        queue_time_s=mover.queue_time,
        queue_blocks=mover.queue_blocks,
        prefetch_share=mover.prefetch_share,
        link_batches=max(1, mover.transfer_limit // mover.batch_blocks),
        prefetch_on_lookup=mover.prefetch_on_lookup,
    )


def patience_of(table: NvmeConfig, server: ServerConfig) -> Patience:
    """How long a store's calls and its end may take."""
    return Patience(table.hang_limit, close_s=server.shutdown_deadline)


def tolerance_of(table: NvmeConfig) -> Tolerance:
    """When a store leaves service, and for how long."""
    return Tolerance(
        faults=table.fault_limit,
        window_s=table.fault_window,
        hang_s=table.hang_limit,
        pause_s=table.retry_pause,
        pause_limit_s=table.retry_pause_limit,
    )


def build_tiers(config: Config, *, instance: str) -> list[Tier]:
    """The tiers in order: devices, hosts, stores. Raises ConfigError for an unknown eviction
    policy."""
    base = _arena_base(config)
    return list(_build(specs_of(config), instance=instance, base=base, server=config.server))


def specs_of(config: Config) -> list[tuple[TierSpec, TierTable]]:
    """The spec of each configured tier, with its table, in the same order. Raises ConfigError for
    an unknown eviction policy, and for a store's codec that is unknown or lacks its package."""
    kinds: tuple[tuple[TierKind, Sequence[TierTable]], ...] = (
        (TierKind.DEVICE, config.device),
        (TierKind.HOST, config.host),
        (TierKind.NVME, config.nvme),
    )
    specs = [
        (dataclasses.replace(spec_of(kind, i, table), quarantine_share=config.scrub.quarantine_share), table)
        for kind, tables in kinds
        for i, table in enumerate(tables)
    ]
    for spec, table in specs:
        if isinstance(table, NvmeConfig) and table.codec:
            _codec_of(spec.name, table)
    levels = [table.level for table in config.nvme]
    for i, (before, level) in enumerate(itertools.pairwise(levels), start=1):
        if level < before:
            raise ConfigError(f"nvme.{i}.level: {level} is below {before} of nvme.{i - 1}; put nearer stores first")
    return specs


def _arena_base(config: Config) -> str:
    """The first host tier's directory, used by device tiers that have none."""
    return next((str(Path(host.arena_dir)) for host in config.host if host.arena_dir), "")


def _build(
    specs: list[tuple[TierSpec, TierTable]], *, instance: str, base: str, server: ServerConfig
) -> Iterator[Tier]:
    for position, (spec, table) in enumerate(specs):
        if isinstance(table, NvmeConfig):
            store = NvmeStore(
                spec, position=position, path=Path(table.path), direct=table.direct, queue_depth=table.queue_depth
            )
            store.zero_ahead = table.zero_ahead and table.level > 0 and not spec.wear_bytes_per_s
            store.patience = patience_of(table, server)
            yield store
        elif isinstance(table, DeviceConfig) and table.kind == "cuda":
            if table.direct_reads == "kvikio" and find_spec("kvikio") is None:
                raise ConfigError(
                    f'{spec.name}: direct_reads = "kvikio", which is not installed; pip install kvikio-cu13, or set "auto"'
                )
            gpu = GpuOptions(table.ordinal, patience_s=table.hang_limit, direct_reads=table.direct_reads)
            yield CudaTier(spec, position=position, instance=instance, arena_dir=table.arena_dir or base, options=gpu)
        else:
            yield Arena(spec, position=position, instance=instance, arena_dir=table.arena_dir or base)


def spec_of(kind: TierKind, index: int, table: TierTable) -> TierSpec:
    """The spec of a configured tier."""
    if table.eviction not in EVICTION:
        raise ConfigError(
            f"{kind.name.lower()}.{index}.eviction: {table.eviction!r} is unknown; use one of {', '.join(sorted(EVICTION))}"
        )
    stored = kind is TierKind.NVME
    return TierSpec(
        kind=kind,
        index=index,
        capacity_bytes=table.capacity,
        segment_bytes=table.segment,
        slot_overhead_bytes=HEADER_BYTES if stored else 0,
        writer_owned=not stored,
        high_watermark=table.high_watermark,
        low_watermark=table.low_watermark,
        headroom_bytes=int(table.headroom * table.capacity),
        eviction=table.eviction,
        sealed_puts=isinstance(table, HostConfig) and table.sealed_puts,
        **_worn(table),
    )


def _worn(table: TierTable) -> dict[str, Any]:
    """The spec's fields for a store's level, admission and wear budget."""
    if not isinstance(table, NvmeConfig):
        return {}
    if table.level == 0:  # memory does not wear, and a block that it declined would never reach a disk
        return {"level": 0, "admission": "all"}
    rate = table.daily_write_bytes / 86400
    return {
        "level": table.level,
        "admission": table.admission,
        "wear_bytes_per_s": rate,
        "wear_burst_s": table.wear_burst,
    }
