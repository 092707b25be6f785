"""AsyncClient: the verbs of tierd for asyncio, with the same API as Client.

Each verb runs in a thread. A client may be used in one event loop after another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from tierd.client.blocks.lease import Lease
from tierd.client.blocks.reservation import AsyncReservation
from tierd.client.blocks.writing import Until
from tierd.client.client import CLOSE_S, Face
from tierd.client.connect.calls import Deadline, due
from tierd.client.connect.threads import NotBegun, Threads
from tierd.client.session.gpu_arrays import seen_here
from tierd.client.transport import requests
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
from tierd.core.formats.block import NamespaceSpec
from tierd.core.formats.model import StructArray
from tierd.errors import TierdError

T = TypeVar("T")


class AsyncClient(Face):
    """As Client, but every verb is a coroutine. Explicit releases do not wait for the daemon."""

    _is_acknowledged = False

    @cached_property
    def _threads(self) -> Threads:
        return Threads()

    async def connect(self, *, timeout_s: float | None = None) -> None:
        """As Client.connect."""
        await self._run(self._verbs.connect, self._deadline(timeout_s))

    async def open_namespace(
        self, spec: NamespaceSpec, *, error_limit: float = 0.0, timeout_s: float | None = None
    ) -> OpenedNamespace:
        """As Client.open_namespace."""
        work = partial(self._verbs.open_namespace, spec, error_limit)
        return await self._run(work, self._deadline(timeout_s))

    async def lookup(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        intent: str = "default",
        timeout_s: float | None = None,
    ) -> Found:
        """As Client.lookup."""
        wanted = (groups, hashes, tokens)
        return await self._run(partial(self._verbs.lookup, wanted, intent), self._deadline(timeout_s))

    async def prefetch(
        self,
        groups: OpenedNamespace | Group | Sequence[Group],
        hashes: Hashes | None = None,
        *,
        tokens: int | None = None,
        tier: str | Target = "host",
        timeout_s: float | None = None,
    ) -> Prefetch:
        """As Client.prefetch."""
        wanted = (groups, hashes, tokens)
        return await self._run(partial(self._verbs.prefetch, wanted, tier), self._deadline(timeout_s))

    async def cancel(self, prefetch: Prefetch, *, timeout_s: float | None = None) -> None:
        """As Client.cancel."""
        return await self._run(partial(self._verbs.cancel, prefetch), self._deadline(timeout_s))

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
        return await self._run(partial(self._verbs.acquire, wanted, tier), self._deadline(timeout_s))

    async def acquire_by_layer(
        self, groups: Group | Sequence[Group], *, tier: str = "host", timeout_s: float | None = None
    ) -> Lease:
        """As Client.acquire_by_layer."""
        work = partial(self._verbs.acquire, (groups, None, None), tier, by_layer=True)
        return await self._run(work, self._deadline(timeout_s))

    async def get(
        self,
        namespace: OpenedNamespace,
        what: Tokens | Hashes | Group,
        *,
        out: Any = None,
        request: str = "",
        timeout_s: float | None = None,
    ) -> GetResult:
        """As Client.get."""
        get = partial(self._verbs.get, namespace, what, seen_here(out), request=request)
        return await self._run(get, self._deadline(timeout_s))

    async def reserve(
        self, groups: PutGroup | Sequence[PutGroup], *, tier: str = "host", timeout_s: float | None = None
    ) -> AsyncReservation:
        """As Client.reserve."""
        reserve: Any = partial(self._verbs.reserve, groups, tier)
        return cast("AsyncReservation", await self._run(reserve, self._deadline(timeout_s)))

    async def put(
        self,
        namespace: OpenedNamespace,
        what: Tokens | Hashes | PutGroup,
        blocks: Sequence[Any],
        *,
        durable: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> PutResult:
        """As Client.put."""
        blocks = seen_here(blocks, has_rows=True)
        put = partial(self._verbs.put, namespace, what, blocks, until=partial(Until.of, durable=durable, wait=wait))
        return await self._run(put, self._deadline(timeout_s))

    async def flush(self, *, timeout_s: float | None = None) -> Lost:
        """As Client.flush."""
        return await self._run(self._verbs.flush, self._deadline(timeout_s))

    async def report_attention(
        self, lease: Lease, mass: Any, *, group: int = 0, timeout_s: float | None = None
    ) -> None:
        """As Client.report_attention."""
        await self._run(partial(self._verbs.report_attention, lease, mass, group), self._deadline(timeout_s))

    async def watch(self, *, after: int = 0) -> AsyncIterator[Event]:
        """As Client.watch."""
        request = requests.watch_request(after)
        link = await self._run(lambda deadline: self._verbs.connected(due(deadline)), self._deadline(None))
        replies = link.transport.stream("Watch", request)
        try:
            while (message := await asyncio.to_thread(next, replies, None)) is not None:
                for event in events_of(message):
                    yield event
        finally:
            replies.close()

    async def close(self) -> None:
        """As Client.close."""
        await self._run(self._verbs.finish, self._deadline(CLOSE_S))
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

    async def _run(self, verb: Callable[[Deadline], T], deadline: Deadline) -> T:
        if isinstance(deadline, TierdError):
            return verb(deadline)
        try:
            return await self._threads.run(partial(verb, deadline), timeout_s=deadline - time.monotonic())
        except NotBegun as error:
            return verb(error)
