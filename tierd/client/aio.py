"""AsyncClient: the verbs of tierd on asyncio, the same face as Client, awaited.

Purpose: nothing but that: each verb is carried out in a thread, as Client's are in their caller's. A client may be used in one
loop after another.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self, TypeVar

from tierd.client import protocol
from tierd.client.calls import NO_TIMEOUT
from tierd.client.client import Face, open_transport
from tierd.client.lease import Lease
from tierd.client.reservation import AsyncReservation
from tierd.client.steps import Steps, fail, run
from tierd.client.threads import NotBegun, Threads
from tierd.client.values import Event, Found, GetResult, Group, Hashes, OpenedNamespace, PutGroup, PutResult, Tokens
from tierd.core.block import NamespaceSpec
from tierd.core.model import StructArray
from tierd.errors import InvalidArgument

T = TypeVar("T")


class AsyncClient(Face):
    """As Client; every verb is a coroutine. Explicit releases do not wait for the daemon."""

    _is_acknowledged = False

    @cached_property
    def _threads(self) -> Threads:
        return Threads()

    async def connect(self, *, timeout_s: float | None = None) -> None:
        """As Client.connect."""
        deadline = self._deadline(timeout_s)
        await self._run(self._verbs.shrunk(lambda: self._connecting(deadline), lambda: None), timeout_s)

    async def open_namespace(self, spec: NamespaceSpec, *, timeout_s: float | None = None) -> OpenedNamespace:
        """As Client.open_namespace."""
        return await self._run(self._verbs.open_namespace(spec, self._deadline(timeout_s)), timeout_s)

    async def lookup(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Found:
        """As Client.lookup."""
        wanted = (groups, hashes, tokens)
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
        wanted = (groups, hashes, tokens)
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
        wanted = (groups, hashes, tokens)
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
        steps = self._verbs.reserve(groups, tier, self._deadline(timeout_s))
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

    async def _run(self, steps: Steps[T], timeout_s: float | None = None) -> T:
        patience_s = self._seconds(timeout_s)
        if math.isnan(patience_s):
            return fail(steps, InvalidArgument(NO_TIMEOUT.format(timeout_s)))
        try:
            return await self._threads.run(partial(run, steps, open_transport), timeout_s=patience_s)
        except NotBegun as error:
            return fail(steps, error)
