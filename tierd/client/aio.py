"""AsyncClient: the verbs of tierd on asyncio, the same face as Client, awaited.

Purpose: nothing but that: each verb is carried out in a thread, as Client's are in their caller's. A client may be used in one
loop after another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from tierd.client import protocol
from tierd.client.client import TIMEOUT_S, in_a_hurry, open_transport
from tierd.client.connection import Connector, Options
from tierd.client.forks import Bound
from tierd.client.lease import Lease
from tierd.client.reservation import AsyncReservation
from tierd.client.steps import Steps, fail, run
from tierd.client.target import resolve_target
from tierd.client.threads import NotBegun, Threads
from tierd.client.values import Event, Found, GetResult, Group, Hashes, OpenedNamespace, PutGroup, PutResult, Tokens
from tierd.client.verbs import Verbs
from tierd.core.block import NamespaceSpec
from tierd.core.model import StructArray

T = TypeVar("T")


class AsyncClient(Bound):
    """As Client; every verb is a coroutine. Explicit releases do not wait for the daemon."""

    def __init__(
        self,
        target: str | None = None,
        *,
        name: str = "",
        timeout_s: float = TIMEOUT_S,
        best_effort: bool = False,
        credential_file: str = "",
    ) -> None:
        self._timeout_s = timeout_s
        how = Options(name, credential_file)
        self._connector = Connector(resolve_target(target), in_a_hurry(how) if best_effort else how)
        self._verbs = Verbs(self._connector, best_effort=best_effort, is_acknowledged=False, pages=self._reservation)
        self._threads = Threads()

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
        """As Client.gpu_tiers."""
        link = self._connector.link
        return tuple(link.session.tiers[i] for i in link.session.gpus) if link and link.session else ()

    @property
    def tells_events(self) -> bool:
        """As Client.tells_events."""
        return self._verbs.tells_events

    def introduce(self, engine: Mapping[str, str]) -> None:
        """As Client.introduce."""
        self._connector.introduce(engine)

    async def connect(self, *, timeout_s: float | None = None) -> None:
        """As Client.connect."""
        steps = self._verbs._shrunk(self._verbs._opened([], self._deadline(timeout_s)), lambda: None)
        await self._run(steps, timeout_s)

    async def open_namespace(self, spec: NamespaceSpec, *, timeout_s: float | None = None) -> OpenedNamespace:
        """As Client.open_namespace."""
        return await self._run(self._verbs.open_namespace(spec.checked(), self._deadline(timeout_s)), timeout_s)

    async def lookup(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Found:
        """As Client.lookup."""
        wanted = protocol.groups_of(groups, hashes, tokens)
        return await self._run(self._verbs.lookup(wanted, self._deadline(timeout_s)), timeout_s)

    async def prefetch(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        tier: str = "host",
        timeout_s: float | None = None,
    ) -> int:
        """As Client.prefetch."""
        wanted = protocol.groups_of(groups, hashes, tokens)
        return await self._run(self._verbs.prefetch(wanted, tier, self._deadline(timeout_s)), timeout_s)

    async def acquire(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        tier: str = "host",
        timeout_s: float | None = None,
    ) -> Lease:
        """As Client.acquire."""
        wanted = protocol.groups_of(groups, hashes, tokens)
        return await self._run(self._verbs.acquire(wanted, tier, self._deadline(timeout_s)), timeout_s)

    async def get(
        self,
        namespace: OpenedNamespace,
        what: Tokens | Hashes | Group,
        *,
        out: Any = None,
        timeout_s: float | None = None,
    ) -> GetResult:
        """As Client.get."""
        return await self._run(self._verbs.get(namespace, what, out, self._deadline(timeout_s)), timeout_s)

    async def reserve(
        self, groups: PutGroup | Sequence[PutGroup], *, tier: str = "host", timeout_s: float | None = None
    ) -> AsyncReservation:
        """As Client.reserve."""
        wanted = [groups] if isinstance(groups, PutGroup) else list(groups)
        steps = self._verbs.reserve(wanted, tier, self._deadline(timeout_s))
        return await self._run(steps, timeout_s)  # type: ignore[arg-type] # `pages` made it, and made this face

    async def put(
        self,
        namespace: OpenedNamespace,
        what: Tokens | Hashes | PutGroup,
        blocks: Sequence[Any],
        *,
        durable: bool = False,
        timeout_s: float | None = None,
    ) -> PutResult:
        """As Client.put."""
        return await self._run(
            self._verbs.put(namespace, what, blocks, self._deadline(timeout_s), durable=durable), timeout_s
        )

    async def report_attention(
        self, lease: Lease, mass: Any, *, group: int = 0, timeout_s: float | None = None
    ) -> None:
        """As Client.report_attention."""
        await self._run(self._verbs.report_attention(lease, mass, group, self._deadline(timeout_s)), timeout_s)

    async def watch(self, *, after: int = 0) -> AsyncIterator[Event]:
        """As Client.watch."""
        request = protocol.watch_request(after)
        link = await self._run(self._verbs.connected(self._deadline(None)))
        replies = link.opened(open_transport).stream("Watch", request)  # type: ignore[attr-defined]
        try:
            while (message := await asyncio.to_thread(next, replies, None)) is not None:
                for event in protocol.events_of(message):
                    yield event
        finally:
            replies.close()

    async def close(self) -> None:
        """As Client.close."""
        self._connector.close()
        self._threads.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _reservation(self, hold: Any, handles: StructArray) -> AsyncReservation:
        return AsyncReservation(hold, handles, ends=self._verbs, run=self._run)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    async def _run(self, steps: Steps[T], timeout_s: float | None = None) -> T:
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return await self._threads.run(partial(run, steps, open_transport), timeout_s=patience_s)
        except NotBegun as error:
            return fail(steps, error)
