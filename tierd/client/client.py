"""Client: the synchronous verbs of tierd.

Client only calls verbs.py. Threads may share a client. AsyncClient (aio.py) has the same API.

    with Client() as client:
        spec = NamespaceSpec(model="llama", tokens_per_block=16, block_bytes=2 << 20)
        ns = client.open_namespace(spec)
        client.put(ns, tokens, blocks)
        got = client.get(ns, tokens)  # got.tokens, got.views: read-only arrays that pin their pages
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
    Prefetch,
    PutGroup,
    PutResult,
    Target,
    Tokens,
)
from tierd.client.verbs import Verbs
from tierd.core.formats.block import NamespaceSpec, text
from tierd.core.formats.model import StructArray

T = TypeVar("T")

TIMEOUT_S = 10.0
HURRY_S = 0.1
"""With best_effort, a call waits this long for the daemon's answer to hello."""


def in_a_hurry(options: Options) -> Options:
    """The options of a best-effort client: it connects within HURRY_S or gives up."""
    return replace(options, connect_timeout_s=HURRY_S, is_patient=False)


class Face(Bound):
    """The part that both clients share: the daemon's address, and facts from its hello."""

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
        """The daemon's address."""
        return str(self._connector.target)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the daemon's tiers, nearest first, as in `tier_of`; empty before the first call."""
        link = self._connector.link
        return link.session.tiers if link and link.session else ()

    @property
    def gpu_tiers(self) -> tuple[str, ...]:
        """Those of `tiers` in GPU memory, whose DevicePages need CUDA; empty before the first call."""
        link = self._connector.link
        return tuple(link.session.tiers[i] for i in link.session.gpus) if link and link.session else ()

    @property
    def tells_events(self) -> bool:
        """Whether the daemon publishes events and so wants `About`. False before the first call."""
        return self._verbs.tells_events

    def introduce(self, engine: Mapping[str, str]) -> None:
        """Names the engine that this client serves, by a few short texts, for `tierctl engines`.
        The next call connects again to send them."""
        for key, value in engine.items():
            text(f"engine: {key!r:.80}", value)
        self._connector.introduce(engine)

    def note_computed(self, request: str, tokens: int, *, times: tuple[float, float]) -> None:
        """Tells operators, with the next lookup, that you compute tokens that a lookup has found.

        Args:
            request: Your id of the request, as in `Group`.
            tokens: How many are computed.
            times: Seconds that you expected of loading and of computing what was found.
        """
        self._verbs.note_computed(request, tokens, times)

    def _reservation(self, hold: Any, handles: StructArray) -> Any:
        raise NotImplementedError

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return deadline_of(self._timeout_s if timeout_s is None else timeout_s)


CLOSE_S = 5.0
"""Time for the answers to puts with wait=False."""


class Client(Face):
    """A client of the daemon at `target`.

    It connects on the first call. After a fork or a daemon's restart the next call reconnects.

    Args:
        target: A directory with the daemon's sockets, or host:port for put and get over TCP.
            host:port?codec=lz4 encodes chunks. None: TIERD_TARGET.
        name: Shown to operators.
        timeout_s: For calls that pass none.
        best_effort: Failures become misses or dropped puts, with one log line a minute.
        credential_file: A text file with the credential that the daemon expects.

    Raises:
        TierdError: Every verb raises the errors of tierd.errors, unless best_effort is set.
    """

    _is_acknowledged = True

    def connect(self, *, timeout_s: float | None = None) -> None:
        """Connects now if there is no connection."""
        self._verbs.connect(self._deadline(timeout_s))

    def open_namespace(
        self, spec: NamespaceSpec, *, error_limit: float = 0.0, timeout_s: float | None = None
    ) -> OpenedNamespace:
        """Opens a namespace; the daemon adds the tenant. With best_effort, an invalid spec never opens.

        error_limit: the greatest error of a value that you accept; stores may then keep blocks with
        a lossy codec. 0.0: exact blocks alone. float("inf"): any error.
        """
        return self._verbs.open_namespace(spec, error_limit, self._deadline(timeout_s))

    def lookup(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        intent: str = "default",
        timeout_s: float | None = None,
    ) -> Found:
        """Says how much of a sequence the daemon could serve, and from which tiers.

        Args:
            groups: Groups, or one namespace together with `hashes`.
            hashes: Block hashes, uint8 [blocks, 32].
            tokens: Tokens that all blocks cover. None: all blocks are full.
            intent: "load": you will load what is found, so a prefetch begins. "none": you will not.
                "default": the daemon's `mover.prefetch_on_lookup` decides.
        """
        wanted = (groups, hashes, tokens)
        return self._verbs.lookup(wanted, intent, self._deadline(timeout_s))

    def prefetch(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        tier: str | Target = "host",
        timeout_s: float | None = None,
    ) -> Prefetch:
        """Starts to bring blocks into `tier` and returns at once with their number.

        Prefetches never take more than the daemon's `mover.prefetch_share`.

        Args:
            groups, hashes, tokens: As for `lookup`.
            tier: Name of the tier, or a `Target` with a time to live.
        """
        wanted = (groups, hashes, tokens)
        return self._verbs.prefetch(wanted, tier, self._deadline(timeout_s))

    def cancel(self, prefetch: Prefetch, *, timeout_s: float | None = None) -> None:
        """Cancels what a prefetch or a lookup (`Found.prefetch`) began, as far as no get waits for it.

        Loads that have begun end. The end of the client cancels all its prefetches.
        """
        return self._verbs.cancel(prefetch, self._deadline(timeout_s))

    def acquire(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        tier: str = "host",
        timeout_s: float | None = None,
    ) -> Lease:
        """Pins the longest servable prefix in `tier`; false on a miss. Arguments as for `prefetch`."""
        wanted = (groups, hashes, tokens)
        return self._verbs.acquire(wanted, tier, self._deadline(timeout_s))

    def acquire_by_layer(
        self, groups: Group | Sequence[Group], *, tier: str = "host", timeout_s: float | None = None
    ) -> Lease:
        """As `acquire`, but before the daemon has filled all pages from its stores.

        `Lease.await_layer` waits for a layer of all blocks. Read pages only after it returned True.
        """
        return self._verbs.acquire((groups, None, None), tier, self._deadline(timeout_s), by_layer=True)

    def get(
        self,
        namespace: OpenedNamespace,
        what: Tokens | Hashes | Group,
        *,
        out: Any = None,
        request: str = "",
        timeout_s: float | None = None,
    ) -> GetResult:
        """Gets the longest cached prefix of a sequence.

        Args:
            namespace, what: The namespace; tokens, block hashes or a group.
            out: A list of buffers, or one buffer, to copy into. From a local daemon also, for each
                block, a list of pieces that hold whole layers of it. None: the result has views.
                Arrays on a GPU are filled in their stream: the call returns before that is done.
            request: Your id of the request, as in `Group`.
        """
        return self._verbs.get(namespace, what, out, self._deadline(timeout_s), request=request)

    def reserve(
        self, groups: PutGroup | Sequence[PutGroup], *, tier: str = "host", timeout_s: float | None = None
    ) -> Reservation:
        """Reserves pages to be written in place."""
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
        """Stores blocks. The caller may reuse its buffers once put has returned.

        If the daemon is overloaded, the client sends the commit again, a few times within
        `timeout_s`. Over TCP a put always waits.

        Args:
            namespace, what: The namespace; tokens, block hashes or a group.
            blocks: One buffer for each block: buffer protocol, numpy, torch, or arrays on a GPU,
                which are read in their stream.
            durable: Return only when the blocks are on NVMe and synced.
            wait: False: return when the bytes are copied, with PENDING blocks, unless durable. This
                client's next call finds them; `flush` counts those that were not stored. A process
                that is killed before the daemon answers may lose them.
        """
        until = partial(Until.of, durable=durable, wait=wait)
        return self._verbs.put(namespace, what, blocks, self._deadline(timeout_s), until=until)

    def flush(self, *, timeout_s: float | None = None) -> Lost:
        """Waits for all puts with wait=False.

        Returns:
            How many of their blocks were not stored since the last flush, with `reasons`.

        Raises:
            DeadlineExceeded: Some puts are not answered yet. The next flush counts them.
        """
        return self._verbs.flush(self._deadline(timeout_s))

    def report_attention(self, lease: Lease, mass: Any, *, group: int = 0, timeout_s: float | None = None) -> None:
        """Reports attention mass as a hint for eviction.

        Args:
            lease: The lease that holds the blocks.
            mass: f32 [ranks, count], per rank and block of the group.
            group: Index of the lease's group.
        """
        self._verbs.report_attention(lease, mass, group, self._deadline(timeout_s))

    def watch(self, *, after: int = 0) -> Iterator[Event]:
        """Yields events for blocks stored and removed, as they happen.

        Args:
            after: The last sequence number seen.

        Raises:
            TierdError: The daemon has ended or cannot be reached.
        """
        request = requests.watch_request(after)
        link = self._verbs.connected(due(self._deadline(None)))
        replies = link.transport.stream("Watch", request)
        try:
            for message in replies:
                yield from events_of(message)
        finally:
            replies.close()

    def close(self) -> None:
        """Ends the session after all puts with wait=False. Live views stay readable; leases and
        reservations end."""
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
    """Opens the synchronous transport. Only a remote daemon's transport loads grpc."""
    if link.session is not None:
        return LocalTransport(link, address)
    from tierd.client.transport.grpc_calls import SyncTransport  # noqa: PLC0415

    return SyncTransport(link, address)
