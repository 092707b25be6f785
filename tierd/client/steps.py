"""Verbs as steps: a generator yields what must be waited for, a driver waits, synchronously or not.

    Do(work)                blocking work that is not gRPC: connecting, mapping, copying
    Pause(seconds)          time that passes
    Call / Pull / Push      one call of the daemon

Purpose: the logic of every verb exists once (verbs.py); `run` carries it out, in the caller's thread or in one of AsyncClient's. Invariants: what a step raises is raised
in the generator at its yield; so is that nobody waits for the verb any more, once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tierd.client import stopping
from tierd.client.connection import Link, Meanwhile, OpenTransport
from tierd.errors import TierdError

T = TypeVar("T")
Steps = Generator[Any, Any, T]
"""A verb in progress, which returns T."""


@dataclass(frozen=True, slots=True)
class Do:
    """Blocking work."""

    work: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Time that passes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """One request, one reply. meanwhile: see Transport.call."""

    link: Link
    method: str
    request: Any
    timeout_s: float
    meanwhile: Meanwhile | None = None

    def send(self, open_transport: OpenTransport) -> Any:
        """The reply."""
        transport = self.link.opened(open_transport)
        return transport.call(self.method, self.request, timeout_s=self.timeout_s, meanwhile=self.meanwhile)


@dataclass(frozen=True, slots=True)
class Pull:
    """One request, a stream of replies, each given to take."""

    link: Link
    method: str
    request: Any
    timeout_s: float
    take: Callable[[Any], None]

    def send(self, open_transport: OpenTransport) -> Any:
        """Nothing."""
        transport = self.link.opened(open_transport)
        return transport.pull(self.method, self.request, timeout_s=self.timeout_s, take=self.take)


@dataclass(frozen=True, slots=True)
class Push:
    """A stream of requests, one reply."""

    link: Link
    method: str
    requests: Iterator[Any]
    timeout_s: float

    def send(self, open_transport: OpenTransport) -> Any:
        """The reply."""
        return self.link.opened(open_transport).push(self.method, self.requests, timeout_s=self.timeout_s)


def run(steps: Steps[T], open_transport: OpenTransport) -> T:
    """Runs a verb to its end in this thread."""
    answer: Any = None
    error: BaseException | None = None
    try:
        while True:
            step = steps.send(answer) if error is None else steps.throw(error)
            answer = error = None
            try:
                stopping.check()
                answer = _do(step, open_transport)
            except BaseException as raised:  # noqa: BLE001 - handed to the verb, which cleans up and lets pass what is not its own
                error = stopping.told(raised)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        error = None  # its traceback holds this frame, and through it every view of the verb


def fail(steps: Steps[T], error: TierdError) -> T:
    """What a verb makes of an error that each of its steps would raise. Raises what it raises."""
    try:
        steps.send(None)
        while True:
            steps.throw(error)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _do(step: Any, open_transport: OpenTransport) -> Any:
    if isinstance(step, Pause):
        return stopping.pause(step.seconds)
    return step.work() if isinstance(step, Do) else step.send(open_transport)
