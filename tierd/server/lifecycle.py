"""Builds the daemon's parts from its configuration, runs them, and ends them in order.

Only this module sees every part. The instance's lock is taken before anything is read, and held
until the end. A tier's blocks are served only after the core has them. The order at the end: refuse
new calls, finish or cancel, settle leases, flush, close.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import platform
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

import structlog

import tierd
from tierd.config import Config
from tierd.errors import Unsupported
from tierd.events.feed import publishing
from tierd.failpoint import failpoint
from tierd.linux import kernel, systemd
from tierd.server.assembly import Assembly, assemble
from tierd.server.listeners import Listeners
from tierd.server.process import heap, thread_priority
from tierd.server.process.fault_socket import fault_socket
from tierd.server.process.surroundings import watched
from tierd.server.process.watchdog import Deadman, LoopWatch, end_now
from tierd.tiers.tier import is_stored
from tierd.units import format_bytes

log = structlog.get_logger(__name__)

PR_SET_DUMPABLE = 4
KEPT_S = 1.0
"""Time to save write counts and learned reuse. It follows the deadline, since earlier steps may use
that up."""
EVENTS_END_S = 1.0
"""Time for the last KV events to be sent."""
SLACK_S = 5.0
"""Beyond twice the shutdown deadline: time for calls and transfers, and for the tiers to close."""


def check_platform() -> None:
    """Raises Unsupported if the daemon cannot run correctly on this platform."""
    release = platform.release()
    is_old = kernel.release_of(release) < kernel.LEAST
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64") or is_old:
        raise Unsupported(
            f"tierd serve: {platform.system()} {release} on {platform.machine()}; it needs Linux 5.15 or newer on x86-64 or "
            "aarch64. The client SDK can reach a daemon elsewhere over host:port"
        )


def allow_descriptors() -> None:
    """Raises the limit of descriptors to the maximum. A shell's usual 1,024 are fewer than the
    connections that gRPC may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Signals(NamedTuple):
    """stop: SIGTERM or SIGINT came. reload: SIGHUP came. begun: there is something to settle."""

    stop: asyncio.Event
    reload: asyncio.Event
    begun: asyncio.Event


async def serve(config: Config, *, release: bool = False, reread: Callable[[], Config] | None = None) -> int:
    """Runs a daemon until SIGTERM or SIGINT. Returns the exit status.

    release: free the arena at the end. reread: reads the settings again, for SIGHUP; it may raise
    ConfigError.

    Raises AlreadyOwned, ConfigError, Unsupported, VersionMismatch, TierFailed before it serves.
    """
    check_platform()
    log.info("tierd starts", version=tierd.__version__, pid=os.getpid(), state=config.server.state_dir)
    os.umask(0o077)
    heap.keep_freed()
    allow_descriptors()
    log.debug("event loop", goes_first=thread_priority.go_first())
    # Without this, processes of the same user could open our descriptors through /proc, for
    # writing too.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signals = Signals(asyncio.Event(), asyncio.Event(), asyncio.Event())
    _heed(signals)
    faulthandler.enable()  # a file truncated under its mapping ends the process; this logs it
    with fault_socket():
        await _run(config, signals, release=release, reread=reread or (lambda: config))
    return 0


async def _run(config: Config, signals: Signals, *, release: bool, reread: Callable[[], Config]) -> None:
    async with assemble(config) as daemon:
        signals.begun.set()
        daemon.must_release = release or any(host.release_on_exit for host in config.host)
        async with (
            Listeners(daemon) as listeners,
            _watchdog(daemon),
            watched(daemon),
            publishing(daemon.cache, config.events, end_s=EVENTS_END_S) as feed,
        ):
            if feed:
                listeners.note_names(feed.note)
            daemon.cache.health.start()
            daemon.cache.background.start()
            daemon.scrub.start()
            _say_what_was_chosen(daemon)
            await listeners.open()
            async with listeners.live.reloading(signals.reload, reread):
                if await _load(daemon, signals.stop):
                    failpoint("lifecycle.before_ready")
                    daemon.state = "serving"
                    _say_that_it_serves(daemon)
                    systemd.ready()
                    await signals.stop.wait()
            systemd.stopping()
            Deadman(2 * config.server.shutdown_deadline + SLACK_S)
            failpoint("lifecycle.before_settle")
            await _settle(daemon, listeners)
    log.info("ended", release=daemon.release)
    if stuck := [tier.spec.name for tier in daemon.tiers if is_stored(tier) and tier.is_stuck]:
        end_now(f"{', '.join(stuck)}: the disk hangs; blocks that are not durable are lost")


async def _load(daemon: Assembly, stop: asyncio.Event) -> bool:
    """Loads all surviving blocks; blocks in memory are served meanwhile. False if stopped before.
    Raises TierFailed."""
    if daemon.adoptions:
        daemon.state = "loading"
        log.info("serving from memory", loading=[daemon.tiers[a.position].spec.name for a in daemon.adoptions])
        systemd.loading()
    loading, stopping = asyncio.ensure_future(daemon.load()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if loading.done():
        loading.result()
        return True
    loading.cancel()
    await asyncio.wait([loading], timeout=daemon.config.server.shutdown_deadline)
    return False


def _heed(signals: Signals) -> None:
    """Sets the events when signals come. Before `begun` there is nothing to settle, so SIGTERM and
    SIGINT end the process at once."""

    def heed() -> None:
        if not signals.begun.is_set():
            end_now("stopped before it served", status=0)
        signals.stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heed)
    loop.add_signal_handler(signal.SIGHUP, signals.reload.set)


async def _settle(daemon: Assembly, listeners: Listeners) -> None:
    """Refuses new calls and ends all work, within the shutdown deadline."""
    deadline = time.monotonic() + daemon.config.server.shutdown_deadline
    daemon.state, daemon.cache.is_draining = "draining", True
    log.info("stopping", leases=daemon.cache.core.stats().leases, transfers=daemon.cache.flights.count)
    listeners.refuse_new()
    daemon.cache.process_notices(None)
    daemon.cache.events.close()  # otherwise watchers would keep their calls open until the deadline
    await _in_time(listeners.live.finish(), deadline)
    await _in_time(daemon.scrub.stop(), deadline)
    await listeners.finish_calls(timeout_s=max(0.0, deadline - time.monotonic()))
    await _in_time(daemon.cache.health.stop(), deadline)
    await _in_time(daemon.cache.background.stop(), deadline)
    if not await daemon.cache.flights.idle(timeout_s=max(0.0, deadline - time.monotonic())):
        log.warning("transfers cancelled", transfers=daemon.cache.flights.count)
    await _in_time(listeners.wear.stop(), deadline + KEPT_S)
    await _in_time(listeners.learned.stop(), deadline + KEPT_S)


async def _in_time(end: Coroutine[Any, Any, None], deadline: float) -> None:
    """Waits until the deadline for a step that a hanging disk could delay. The step goes on."""
    await asyncio.wait([asyncio.ensure_future(end)], timeout=max(0.0, deadline - time.monotonic()))


@contextlib.asynccontextmanager
async def _watchdog(daemon: Assembly) -> AsyncIterator[None]:
    """Reports from the event loop to the supervisor that the loop runs. A thread watches the loop
    too."""
    server = daemon.config.server
    interval_s = systemd.watchdog_interval_s()

    async def feed(every_s: float) -> None:
        while True:
            systemd.alive()
            await asyncio.sleep(every_s)

    task = asyncio.create_task(feed(interval_s)) if interval_s else None
    try:
        with LoopWatch(daemon.metrics, warning_s=server.loop_warning, limit_s=server.loop_limit):
            yield
    finally:
        if task:
            task.cancel()


def _say_what_was_chosen(daemon: Assembly) -> None:
    """Of the first lines of a log: one for each tier."""
    for tier in daemon.tiers:
        size = format_bytes(tier.spec.capacity_bytes)
        log.info("tier", name=tier.spec.name, capacity=size, place=tier.place, mode=tier.mode)


def _say_that_it_serves(daemon: Assembly) -> None:
    """One line for each thing that the machine lacks, and one that the daemon serves."""
    for tier in daemon.tiers:
        for notice in tier.notices:
            log.warning(notice, tier=tier.spec.name)
            daemon.metrics.notice(notice)
    log.info(
        "serving",
        target=daemon.config.server.runtime_dir,
        version=tierd.__version__,
        instance=daemon.instance,
        blocks=daemon.cache.core.stats().blocks,
        start_s=round(time.monotonic() - daemon.started, 3),
    )
