"""Client: the verbs of tierd, synchronous.

Purpose: a thin face over verbs.py. Threads may share a client. Non-purpose: any logic of its own; AsyncClient (aio.py) is the same face,
awaited.

    with Client() as client:
        ns = client.open_namespace(NamespaceSpec(model="llama", tokens_per_block=16, block_bytes=2 << 20))
        client.put(ns, tokens, blocks)
        got = client.get(ns, tokens)        # got.tokens, got.views: read-only arrays that hold their pins
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from tierd.client.blocks.lease import Lease
from tierd.client.blocks.reservation import Reservation
from tierd.client.blocks.writing import Until
from tierd.client.connect.calls import Deadline, deadline_of, due
from tierd.client.connect.connection import Connector, Options
from tierd.client.connect.forks import Bound
from tierd.client.connect.link import Link, Transport
from tierd.client.connect.target import resolve_target
from tierd.client.transport import requests
from tierd.client.transport.local import LocalTransport
from tierd.client.transport.replies import events_of
from tierd.client.values import (
    Event,
    Found,
    GetResult,
    Group,
    Hashes,
    Lost,
    OpenedNamespace,
    PutGroup,
    PutResult,
    Tokens,
)
from tierd.client.verbs import Verbs
from tierd.core.formats.block import NamespaceSpec, text
from tierd.core.formats.model import StructArray

T = TypeVar("T")

TIMEOUT_S = 10.0
HURRY_S = 0.1
"""What best_effort waits for a daemon that does not answer a hello."""


def in_a_hurry(options: Options) -> Options:
    """How a client connects that may do without."""
    return replace(options, connect_timeout_s=HURRY_S, is_patient=False)


class Face(Bound):
    """What both clients share: where the daemon is, and what it said of itself."""

    _is_acknowledged: bool
    """Whether an explicit release waits for the daemon."""

    def __init__(
        self,
        target: str | None = None,
        *,
        name: str = "",
        timeout_s: float = TIMEOUT_S,
        best_effort: bool = False,
        credential_file: str = "",
    ) -> None:
        for thing, value in (("target", target or ""), ("name", name), ("credential_file", credential_file)):
            text(thing, value)
        self._timeout_s = timeout_s
        how = Options(name, credential_file)
        self._connector = Connector(resolve_target(target), in_a_hurry(how) if best_effort else how, open_transport)
        self._verbs = Verbs(
            self._connector, best_effort=best_effort, is_acknowledged=self._is_acknowledged, pages=self._reservation
        )

    @property
    def target(self) -> str:
        """Where the daemon is."""
        return str(self._connector.target)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the daemon's tiers, near to far, as `tier_of` and `tier_tokens` count them; empty before the first call."""
        link = self._connector.link
        return link.session.tiers if link and link.session else ()

    @property
    def gpu_tiers(self) -> tuple[str, ...]:
        """Names of those of `tiers` that are memory of a GPU: their pages are DevicePages, which need CUDA in this process. Empty before the first call."""
        link = self._connector.link
        return tuple(link.session.tiers[i] for i in link.session.gpus) if link and link.session else ()

    @property
    def tells_events(self) -> bool:
        """Whether the daemon tells routers what it holds, and so wants to know what an engine calls it (`About`); False before the first call."""
        return self._verbs.tells_events

    def introduce(self, engine: Mapping[str, str]) -> None:
        """Says which engine this client serves, for operators (`tierctl engines`): a few short texts, told with the next connection, which the next call makes."""
        for key, value in engine.items():
            text(f"engine: {key!r:.80}", value)
        self._connector.introduce(engine)

    def _reservation(self, hold: Any, handles: StructArray) -> Any:
        raise NotImplementedError

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return deadline_of(self._timeout_s if timeout_s is None else timeout_s)


CLOSE_S = 5.0
"""For the answers of puts with wait=False."""


class Client(Face):
    """A client of the daemon at `target`: a directory with its sockets, or host:port (put and get only), host:port?codec=lz4 where chunks shall
    travel encoded; None: TIERD_TARGET.

    name: shown to operators. timeout_s: of calls that bring none. best_effort: every failure is a miss or a dropped put, with one log line a minute.
    Nothing connects before the first call; after a daemon's restart or a fork the next call connects again. Every verb but those of
    a best-effort client raises the errors of tierd.errors.
    """

    _is_acknowledged = True

    def connect(self, *, timeout_s: float | None = None) -> None:
        """Connects now, where there is no connection."""
        self._verbs.connect(self._deadline(timeout_s))

    def open_namespace(self, spec: NamespaceSpec, *, timeout_s: float | None = None) -> OpenedNamespace:
        """Names a namespace; the daemon adds the tenant. With best effort an impossible spec, too, is one that never opens."""
        return self._verbs.open_namespace(spec, self._deadline(timeout_s))

    def lookup(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Found:
        """How much of a sequence could be served, and from where. groups, or a namespace and its hashes."""
        wanted = (groups, hashes, tokens)
        return self._verbs.lookup(wanted, self._deadline(timeout_s))

    def prefetch(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        tier: str = "host",
        timeout_s: float | None = None,
    ) -> int:
        """Begins to bring blocks near and returns at once: how many are on their way because of this."""
        wanted = (groups, hashes, tokens)
        return self._verbs.prefetch(wanted, tier, self._deadline(timeout_s))

    def acquire(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        tier: str = "host",
        timeout_s: float | None = None,
    ) -> Lease:
        """Pins the longest servable prefix in the wanted tier; a lease that is false if there is none."""
        wanted = (groups, hashes, tokens)
        return self._verbs.acquire(wanted, tier, self._deadline(timeout_s))

    def get(
        self,
        namespace: OpenedNamespace,
        what: Tokens | Hashes | Group,
        *,
        out: Any = None,
        timeout_s: float | None = None,
    ) -> GetResult:
        """The servable prefix of tokens, hashes or a group: as views, or copied into `out`, a list of buffers or one buffer."""
        return self._verbs.get(namespace, what, out, self._deadline(timeout_s))

    def reserve(
        self, groups: PutGroup | Sequence[PutGroup], *, tier: str = "host", timeout_s: float | None = None
    ) -> Reservation:
        """Sets pages aside to be written in place."""
        return self._verbs.reserve(groups, tier, self._deadline(timeout_s))  # type: ignore[return-value]

    def put(
        self,
        namespace: OpenedNamespace,
        what: Tokens | Hashes | PutGroup,
        blocks: Sequence[Any],
        *,
        durable: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Stores blocks, one buffer each (buffer protocol, numpy, CPU tensors). durable: written to NVMe and synced
        before it returns.

        wait=False: returns when the bytes are copied, with PENDING blocks, unless durable. This client's next call
        finds them; `flush` says
        whether all were stored. A process that is killed within that moment may lose them. Over TCP a put always waits.
        A daemon that is overloaded is told of the blocks again, a few times until timeout_s. The
        buffers are the caller's again once put has returned.
        """
        until = partial(Until.of, durable=durable, wait=wait)
        return self._verbs.put(namespace, what, blocks, self._deadline(timeout_s), until=until)

    def flush(self, *, timeout_s: float | None = None) -> Lost:
        """Waits for all puts with wait=False. Returns how many of their blocks were not stored
        since the last flush, a number with `reasons`.

        Raises DeadlineExceeded while puts are not answered; the next flush counts them.
        """
        return self._verbs.flush(self._deadline(timeout_s))

    def report_attention(self, lease: Lease, mass: Any, *, group: int = 0, timeout_s: float | None = None) -> None:
        """Attention mass per rank and block of a lease's group, f32 [ranks, count]: a hint for eviction."""
        self._verbs.report_attention(lease, mass, group, self._deadline(timeout_s))

    def watch(self, *, after: int = 0) -> Iterator[Event]:
        """Blocks stored and removed, as they happen; after: the last sequence number seen. Ends by raising when the daemon goes."""
        request = requests.watch_request(after)
        link = self._verbs.connected(due(self._deadline(None)))
        replies = link.transport.stream("Watch", request)
        try:
            for message in replies:
                yield from events_of(message)
        finally:
            replies.close()

    def close(self) -> None:
        """Ends the session, after puts with wait=False. Views that are alive stay readable; leases and reservations
        end."""
        self._verbs.finish(self._deadline(CLOSE_S))
        self._connector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reservation(self, hold: Any, handles: StructArray) -> Reservation:
        return Reservation(hold, handles, ends=self._verbs)


def open_transport(link: Link, address: str) -> Transport:
    """The synchronous transport; grpc is loaded with it where it is far away, not with the SDK."""
    if link.session is not None:
        return LocalTransport(link, address)
    from tierd.client.transport.grpc_calls import SyncTransport  # noqa: PLC0415

    return SyncTransport(link, address)
