"""All listeners: the session socket, gRPC, /metrics; and their links to the cache.

Sockets open at the end of the start, and close at the beginning of the end. A session is in the
core and in the session table before its client has a token. A descriptor is given only within the
trust domain. It is writable only for the segment's writer, and the core knows of it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

import tierd
from tierd import metrics, places
from tierd.config import ServerConfig, split_address
from tierd.core.plan import GroupQuery
from tierd.errors import ConfigError, NotFound, NotPermitted, TierdError
from tierd.events.router_view import Names
from tierd.page.app import App
from tierd.page.view import Seen, Sources, View
from tierd.server.assembly import Assembly
from tierd.server.grpc.admin import About, AdminService, SessionRow
from tierd.server.grpc.credits import Credits
from tierd.server.grpc.guard import Guard
from tierd.server.grpc.servers import Rpc
from tierd.server.grpc.service import CacheService
from tierd.server.grpc.unauthenticated import Unauthenticated
from tierd.server.local_rpc.calls import LINES, LocalRpcServer
from tierd.server.operators.ceiling import Ceiling
from tierd.server.operators.gauges import Gauges
from tierd.server.operators.learned import Learned
from tierd.server.operators.live import LiveSettings
from tierd.server.operators.wear import Wear
from tierd.server.recording.recorder import Recorder
from tierd.server.session.hit_reports import HitReports
from tierd.server.session.identity import Identity, IdentityRules, Peer, identify, load_rules
from tierd.server.session.notice_polling import NoticePolling
from tierd.server.session.session_socket import SessionSocket
from tierd.server.session.sessions import MappedFiles, Session, SessionCalls, Sessions
from tierd.tcp.bearer import read_bearer
from tierd.tiers.arena.holds import Holder, read_boot_id
from tierd.tiers.io.lock import check_way
from tierd.tiers.tier import Tier, is_device, is_shared
from tierd.tracing import Tracing

log = structlog.get_logger(__name__)

REMOTE_SESSION = 1
"""The daemon's own session, for clients that connect over TCP."""
REMOTE_TENANT = "remote"


class Listeners:
    """The daemon's sockets. Use it as an async context manager, then `open`."""

    def __init__(self, daemon: Assembly) -> None:
        self._daemon = daemon
        server = daemon.config.server
        self._rules: IdentityRules = load_rules(
            {int(uid): tenant for uid, tenant in daemon.config.identity.tenants.items()},
            daemon.config.identity.credential_file,
        )
        cache = daemon.cache
        self._service = CacheService(cache, keep_namespaces=daemon.keep_namespaces, batch_limit=server.max_batch_blocks)
        self.wear = Wear(daemon)
        self.learned = Learned(daemon.policies, Path(server.state_dir))
        self._recorder = Recorder(Path(server.state_dir) / "recordings", cache)
        self._ceiling = Ceiling(daemon) if server.ceiling else None
        self._service.note_asked = self._note_asked
        self._credits = Credits(
            queue_limit=server.queue_limit,
            session_credits=server.session_credits,
            now=asyncio.get_running_loop().time,
            cut_off=self._cut_off,
        )
        self._hit_reports = HitReports(self._service.note_hit_report)
        calls = SessionCalls(
            self._opened,
            self._stopped,
            cache.end_session,
            self._map_segment,
            cache.release,
            cache.abort,
            cache.leave_session,
            self._service.grants.revoke,
            lambda session, into: cache.end_session(session, into=into),
            self._hit_reports.add,
            self._directory,
        )
        self.sessions = Sessions(calls, session_limit=server.session_limit)
        self._notice_polling = NoticePolling(self.sessions.read_notices)
        cache.process_notices = self._process_notices
        self._view: View | None = None
        self._guard = guard = self._build_guard()
        self.live = LiveSettings(daemon, self._apply_settings)
        if endpoint := daemon.config.telemetry.otlp_endpoint:
            guard.tracing = Tracing(endpoint, instance=daemon.instance, version=tierd.__version__)
        self._tracing = guard.tracing
        self._lines = LocalRpcServer(self._service, guard=guard, answered=self._notice_polling.answered)
        self.directory = Path(server.runtime_dir)
        self._socket = SessionSocket(
            self.directory / places.SESSION_SOCKET_NAME,
            sessions=self.sessions,
            identify=lambda peer, credential: identify(
                peer, credential=credential, rules=self._rules, domain_of=daemon.cache.registry.domain_of
            ),
            greeting={
                "daemon": tierd.__version__,
                "instance": daemon.instance,
                "tiers": [_described(tier) for tier in daemon.tiers],
                "credits": self._credits.share,
                "lines": LINES,
                "one_sided": not daemon.cache.clock.is_replay,  # gets without calls, reported by notices
                "events": daemon.config.events.enabled,
            },
        )
        self._socket.open_line = self._lines.open
        self._rpc = self._build_rpc(guard)
        self._gauges = Gauges(daemon, sessions=self.sessions)
        self._metrics: metrics.Listener | None = None
        self._unauthenticated: Unauthenticated | None = None

    async def __aenter__(self) -> Self:
        self._watch_former()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process_notices(None)  # or the session table would show released leases to the next daemon
        self._notice_polling.close()
        self._socket.close()
        if self._unauthenticated:
            self._unauthenticated.close()
        await asyncio.gather(self._lines.finish(timeout_s=0), self._rpc.stop(grace_s=0))
        self._gauges.stop()
        if self._view:
            self._view.stop()
        if self._ceiling:
            self._ceiling.stop()
        if self._metrics:
            await asyncio.to_thread(self._metrics.close)
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)
        self.sessions.close()
        with contextlib.suppress(FileNotFoundError):
            (self.directory / places.SOCKET_NAME).unlink()

    async def open(self) -> None:
        """Binds all sockets and starts serving. Raises ConfigError."""
        make_runtime_directory(self.directory)
        server = self._daemon.config.server
        self._socket.open()
        self._rpc.listen_unix(self.directory / places.SOCKET_NAME)
        if server.tcp_listen:
            self._unauthenticated = self._rpc.listen_tcp(server.tcp_listen)
        await self._rpc.start()
        if server.metrics_listen:
            self._metrics = self._listen_metrics(server.metrics_listen)
        self._say_where()
        self._gauges.start()
        self.wear.start()
        if self._ceiling:
            self._ceiling.start()
        if not self._daemon.cache.clock.is_replay:
            self.learned.start()

    def _say_where(self) -> None:
        """One line with every address; the ports are those that the system gave."""
        server = self._daemon.config.server
        tcp = self._unauthenticated and f"{server.tcp_listen.rpartition(':')[0]}:{self._unauthenticated.port}"
        metrics_at = self._metrics and f"{server.metrics_listen.rpartition(':')[0]}:{self._metrics.port}"
        log.info(
            "listening",
            sessions=str(self.directory / places.SESSION_SOCKET_NAME),
            calls=str(self.directory / places.SOCKET_NAME),
            tcp=tcp or "off",
            metrics=f"http://{metrics_at}/metrics" if metrics_at else "off",
            page=f"http://{metrics_at}/" if metrics_at and self._view else "off",
        )

    def note_names(self, note: Callable[[Names], None]) -> None:
        """Passes the clients' names of blocks to `note` from now on."""
        self._service.note_names = note

    def refuse_new(self) -> None:
        """Refuses new sessions, and reports that to health checks."""
        self._socket.refuse_new()
        self._rpc.health.set_status(serving=False)

    async def finish_calls(self, *, timeout_s: float) -> None:
        """Waits for calls in progress, ends the recording, and cancels the remaining calls."""
        await asyncio.gather(self._lines.finish(timeout_s=timeout_s), self._rpc.stop(grace_s=timeout_s))
        await self._recorder.close(timeout_s=timeout_s)

    def rows(self) -> list[SessionRow]:
        """Every session, for operators."""
        return [
            SessionRow(
                id=s.id,
                pid=s.peer.pid,
                uid=s.peer.uid,
                tenant=s.identity.tenant,
                name=s.name,
                sdk=s.sdk,
                engine=s.engine,
                namespaces=self._service.recent_namespaces.of(s.id),
                state=s.state.value,
                age_s=time.monotonic() - s.opened,
            )
            for s in self.sessions.list()
        ]

    def _build_guard(self) -> Guard:
        daemon, server = self._daemon, self._daemon.config.server
        return Guard(
            self._authenticate,
            clock=daemon.cache.clock,
            metrics=daemon.metrics,
            credits=self._credits,
            call_timeout_s=server.call_timeout,
            credential=self._open_remote() if server.tcp_listen else "",
            remote=(REMOTE_SESSION, REMOTE_TENANT) if server.tcp_listen else None,
        )

    def _build_rpc(self, guard: Guard) -> Rpc:
        daemon = self._daemon
        about = About(
            version=tierd.__version__,
            instance=daemon.instance,
            started=daemon.started,
            notices=lambda: [notice for tier in daemon.tiers for notice in tier.notices],
            state=lambda: "draining" if daemon.cache.is_draining else daemon.state,
            sessions=self.rows,
            keep_namespaces=daemon.keep_namespaces,
            release=daemon.release_at_end,
            scrub=daemon.scrub,
            wear=self.wear,
            recorder=self._recorder,
            live=self.live,
            ceiling=self._ceiling,
        )
        admin = AdminService(daemon.cache, about=about)
        if daemon.config.server.page:
            self._view = self._build_view(about, admin)
        return Rpc(self._service, admin, guard=guard, limits=daemon.config.server)

    def _build_view(self, about: About, admin: AdminService) -> View:
        """The web page's view of the daemon."""
        sources = Sources(
            cache=self._daemon.cache,
            version=about.version,
            instance=about.instance,
            started=about.started,
            state=about.state,
            notices=about.notices,
            sessions=lambda: [Seen(row.id, row.engine, row.state, row.age_s) for row in self.rows()],
            verbs={"Explain": admin.Explain, "Ceiling": admin.Ceiling},
        )
        return View(sources)

    def _apply_settings(self, server: ServerConfig) -> None:
        """Takes over settings that changed; sessions learn of other credits when they connect."""
        self._credits.set_limits(queue_limit=server.queue_limit, session_credits=server.session_credits)
        self._socket.greeting = {**self._socket.greeting, "credits": self._credits.share}
        self.sessions.limit = server.session_limit
        self._guard.call_timeout_s = server.call_timeout

    def _note_asked(self, groups: Sequence[GroupQuery], *, is_lookup: bool) -> None:
        self._recorder.note(groups, is_lookup=is_lookup)
        if self._ceiling:
            self._ceiling.note(groups, is_lookup=is_lookup)

    def _open_remote(self) -> str:
        """Opens the session for TCP. Returns the credential that its callers need."""
        path = self._daemon.config.server.tcp_credential_file
        credential = read_bearer(path, setting="server.tcp_credential_file")
        if len(credential) < 16:
            raise ConfigError(
                f"server.tcp_credential_file: {path} holds {len(credential)} characters, below 16; make one with"
                " `openssl rand -hex 32`"
            )
        self._daemon.cache.open_session(REMOTE_SESSION, tenant=REMOTE_TENANT)
        return credential

    def _listen_metrics(self, address: str) -> metrics.Listener:
        host, port = split_address(address)
        try:
            listener = metrics.Listener(self._daemon.metrics, host=host, port=port)
        except OSError as error:
            raise ConfigError(
                f"server.metrics_listen: {address} cannot be bound ({error}); choose another port"
            ) from error
        if self._view:
            self._view.start()
            listener.serve(App(self._view, metrics=listener.metrics_app, loop=asyncio.get_running_loop()))
        return listener

    def _authenticate(self, token: str) -> tuple[int, str, bool]:
        session = self.sessions.authenticate(token)
        return session.id, session.identity.tenant, session.identity.is_admin

    def _opened(self, session: Session) -> None:
        peer, identity = session.peer, session.identity
        holder = Holder(
            session=session.id,
            pid=peer.pid,
            start_time=peer.start_time,
            boot=read_boot_id(),
            uid=peer.uid,
            domain=identity.domain,
            tenant=identity.tenant,
        )
        self._daemon.cache.open_session(
            session.id, tenant=identity.tenant, holder=holder, is_operator=identity.is_admin
        )

    def _cut_off(self, session: int, why: TierdError) -> None:
        self.sessions.cut_off(session, why)

    def _process_notices(self, asker: int | None) -> None:
        if asker is not None:
            self.sessions.read_messages(asker)
        self._notice_polling.read_all()

    def _stopped(self, session: int) -> None:
        self._hit_reports.finish(session)
        self._daemon.cache.stop_session(session)
        self._lines.leave(session)
        self._credits.forget(session)
        self._service.grants.forget(session)
        self._service.recent_namespaces.forget(session)

    def _directory(self, session: Session) -> tuple[int, int]:
        """Raises OSError."""
        domain = self._daemon.cache.registry.domain_of(session.identity.tenant)
        return self._daemon.cache.directories.give(domain)

    def _watch_former(self) -> None:
        """Restores sessions of an earlier daemon. Their pages stay theirs while their processes
        live."""
        for former in self._daemon.former:
            holder = former.holder
            peer = Peer(pid=holder.pid, uid=holder.uid, start_time=holder.start_time)
            owner = Identity(holder.uid, holder.pid, holder.tenant, holder.domain, is_admin=False)
            if not self.sessions.restore(holder.session, peer=peer, identity=owner):
                self._daemon.cache.end_session(holder.session)
        self._daemon.former = []

    def _map_segment(self, session: Session, tier: int, segment: int) -> MappedFiles:
        shared = self._daemon.tiers[tier] if 0 <= tier < len(self._daemon.tiers) else None
        core = self._daemon.cache.core
        found = [s for s in core.segments(tier) if s.segment == segment] if shared and is_shared(shared) else []
        if not found or not shared or not is_shared(shared):
            raise NotFound(f"segment {segment} of tier {tier}: it does not exist (any more); acquire the block again")
        if found[0].domain != session.identity.domain:
            raise NotPermitted(f"segment {segment} of tier {tier}: belongs to another trust domain")
        core.note_attached(session.id, tier=tier, segment=segment)
        is_writable = found[0].writer == session.id
        data = shared.descriptor(segment, writable=is_writable)
        try:
            catalogue = shared.catalogue_descriptor(segment)
        except TierdError:
            os.close(data.fd)
            raise
        return MappedFiles(data.fd, data.bytes, is_writable, catalogue.fd, catalogue.bytes)


def _described(tier: Tier) -> dict[str, Any]:
    """A tier's entry in the greeting. gpu: identifies the GPU, if it is one's memory."""
    entry = {"name": tier.spec.name, "kind": int(tier.spec.kind)}
    return entry | {"gpu": {"ordinal": tier.ordinal, "uuid": tier.uuid}} if is_device(tier) else entry


def make_runtime_directory(path: Path) -> None:
    """Makes the sockets' directory with mode 0750 if it is missing. Members of the daemon's group
    may connect. Raises ConfigError."""
    check_way(path)
    path.mkdir(mode=0o750, parents=True, exist_ok=True)
    check_way(path)  # another process may have made it meanwhile
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"server.runtime_dir: {path} belongs to uid {found.st_uid} with mode {found.st_mode & 0o7777:04o}; it must be the "
            f"daemon's own (uid {os.geteuid()}) and writable by no other user: chown or chmod it, or choose another"
        )
    if not found.st_mode & 0o050:
        path.chmod(0o750)
