"""Changes of settings while the daemon runs: `tierctl set`, and a changed file with SIGHUP.

All or nothing: every setting is checked first, as at a start, and applying cannot fail. But a host
tier may shrink less than asked (`resizing.py`). One change runs at a time. Each is logged: name,
before, after, and who. A restart reads the file again, so a change of `tierctl set` ends with the
daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import structlog

from tierd import logs
from tierd.cache.handover import hand_over
from tierd.cache.read_queues import Limits
from tierd.config import Config, NvmeConfig, ServerConfig
from tierd.errors import ConfigError, TierdError
from tierd.live_settings import Change, differences, only_live, with_changes
from tierd.server.assembly import Assembly, codecs_of, limits_of, patience_of, specs_of, tolerance_of
from tierd.server.operators.resizing import grow, places_of, shrink
from tierd.tiers.store.nvme import NvmeStore
from tierd.tiers.tier import MappedTier, is_mapped

log = structlog.get_logger(__name__)

AT_START = ("session_limit", "queue_limit", "session_credits")
AT_START_FACTOR = 4
"""gRPC's servers are opened for limits of the start. They have room for so many times as much."""

T = TypeVar("T")


class Changed(NamedTuple):
    """changes: what differs from before. notes: what was not reached, and why."""

    changes: list[Change]
    notes: list[str]


class LiveSettings:
    """One per daemon. apply_server: gives the listeners another ServerConfig."""

    def __init__(self, daemon: Assembly, apply_server: Callable[[ServerConfig], None] = lambda _: None) -> None:
        self._daemon, self._apply_server = daemon, apply_server
        self._at_start = daemon.config.server
        self._lock, self._is_ending = asyncio.Lock(), False

    @property
    def config(self) -> Config:
        """The settings now."""
        return self._daemon.config

    async def set(self, texts: Mapping[str, str], *, is_check: bool, who: Mapping[str, Any]) -> Changed:
        """Changes settings, by name and value in TOML. is_check: only checks. who: for the log.

        Raises ConfigError; then nothing has changed.
        """
        return await _whole(self._set(texts, is_check=is_check, who=who))

    async def reload(self, wanted: Config) -> Changed:
        """Changes the live settings to those of a whole config, read again. Names the others that
        differ in a log line. Raises ConfigError."""
        return await _whole(self._reload(wanted))

    @contextlib.asynccontextmanager
    async def reloading(self, wanted: asyncio.Event, reread: Callable[[], Config]) -> AsyncIterator[None]:
        """Reads the settings again whenever the event is set. reread: may raise ConfigError; then,
        and after a refusal, nothing has changed."""

        async def reload_for_ever() -> None:
            while True:
                await wanted.wait()
                wanted.clear()
                try:
                    await self.reload(await asyncio.to_thread(reread))
                except TierdError as error:
                    log.warning("configuration not taken over; nothing changed", error=str(error))
                except Exception:  # the next signal tries again
                    log.exception("configuration not taken over")

        task = asyncio.create_task(reload_for_ever())
        try:
            yield
        finally:
            task.cancel()

    async def finish(self) -> None:
        """The daemon ends: a shrink that is under way gives up, and no other change begins."""
        self._is_ending = True
        await self._lock.acquire()

    async def _set(self, texts: Mapping[str, str], *, is_check: bool, who: Mapping[str, Any]) -> Changed:
        async with self._lock:
            return await self._change(with_changes(self.config, texts), is_check=is_check, who=who)

    async def _reload(self, wanted: Config) -> Changed:
        async with self._lock:
            _, rest = differences(self.config, wanted)
            changed = await self._change(only_live(self.config, wanted), who={"signal": "SIGHUP"})
            log.info("configuration read again", changed=len(changed.changes), needs_restart=rest)
            return changed

    async def _change(self, new: Config, *, who: Mapping[str, Any], is_check: bool = False) -> Changed:
        self._check_listeners(new)
        old, notes = self.config, list[str]()
        for tier, _, places in self._resized(new):
            if places > 0:
                await asyncio.to_thread(tier.check_growth, specs_of(new)[tier.position][0])
        if not is_check:
            new, notes = await self._shrink(new)
            await self._apply(new)
        changes, _ = differences(old, new)
        for change in [] if is_check else changes:
            log.info("setting changed", **change._asdict(), **who)
        for note in notes:
            log.warning(note)
        if not is_check and new.server.log_level != old.server.log_level:
            logs.configure(style=new.server.log_format, level=new.server.log_level)  # does not hide the lines above
        return Changed(changes, notes)

    def _resized(self, new: Config) -> list[tuple[MappedTier, int, int]]:
        """The host tiers whose capacity changes: index, and how many places they get or lose. Raises
        ConfigError for an unknown policy or codec."""
        pairs = zip(self._daemon.tiers, specs_of(new), strict=True)
        found = [(tier, spec.index, places_of(spec) - places_of(tier.spec)) for tier, (spec, _) in pairs]
        return [(tier, index, places) for tier, index, places in found if places and is_mapped(tier)]

    async def _shrink(self, new: Config) -> tuple[Config, list[str]]:
        """Takes memory from tiers. Returns the config with the capacities that were reached, and why
        others were not."""
        notes, hosts = list[str](), list(new.host)
        for tier, index, places in self._resized(new):
            if places < 0:
                gone, why = await shrink(self._daemon.cache, tier, -places, gives_up=lambda: self._is_ending)
                capacity = tier.spec.capacity_bytes - gone * tier.spec.segment_bytes
                hosts[index] = replace(hosts[index], capacity=capacity)
                notes += [why] if why else []
        return replace(new, host=tuple(hosts)), notes

    def _check_listeners(self, new: Config) -> None:
        """Refuses limits for which the listeners were not opened. Raises ConfigError."""
        for name in AT_START:
            value, most = getattr(new.server, name), AT_START_FACTOR * getattr(self._at_start, name)
            if value > most:
                raise ConfigError(
                    f"server.{name}: {value} is above {most}, {AT_START_FACTOR} times its value at the start; "
                    "write it into the configuration file and restart"
                )

    async def _apply(self, new: Config) -> None:
        daemon, cache = self._daemon, self._daemon.cache
        for growing, _, places in self._resized(new):
            if places > 0:
                grow(cache, growing, places)
        daemon.config = new
        cache.core.tuning.set_session_share(new.server.session_share)
        self._apply_server(new.server)
        _copy(limits_of(new.mover), cache.parts.limits)
        cache.parts.mover.set_link_limit(cache.parts.limits.link_batches)
        daemon.scrub.set_pace(period_s=new.scrub.period, bandwidth=new.scrub.bandwidth)
        cache.store_codecs.codecs = codecs_of(new, daemon.tiers)
        changing = self._apply_specs(new)
        for tier in daemon.tiers:
            if isinstance(tier, NvmeStore):
                self._apply_store(tier, new.nvme[tier.spec.index])
        cache.background.wake()  # watermarks may be exceeded now
        for position, old in changing:
            await hand_over(cache.core, position, cache.clock.now)
            cache.parts.decisions.replaced(old, tier=position)

    def _apply_specs(self, new: Config) -> list[tuple[int, str]]:
        """The tiers whose eviction policy changes, each with its old one."""
        core, now, changing = self._daemon.cache.core, self._daemon.cache.clock.now(), []
        for tier, (spec, _) in zip(self._daemon.tiers, specs_of(new), strict=True):
            if core.tuning.set_spec(tier.position, spec, now):
                changing.append((tier.position, tier.spec.eviction))
            tier.spec = spec
        return changing

    def _apply_store(self, store: NvmeStore, table: NvmeConfig) -> None:
        store.patience = patience_of(table, self._daemon.config.server)
        self._daemon.cache.health.tolerate({store.position: tolerance_of(table)})


def _copy(source: Limits, target: Limits) -> None:
    for field in fields(Limits):
        setattr(target, field.name, getattr(source, field.name))


async def _whole(change: Coroutine[Any, Any, T]) -> T:
    """Runs a change to its end, also if its caller is cancelled."""
    task = asyncio.ensure_future(change)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have gone
    return await asyncio.shield(task)
