"""The daemon's answers for `tierctl top`, asked in threads: keys and frames never wait for a call.

One thread asks for each frame. It reconnects after a failure, within a deadline. Another asks
rarely for answers that may take seconds: wear, prefix tree, ceiling.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from google.protobuf.message import Message

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import Connection
from tierd.cli.hits import Hits, hits_of
from tierd.cli.models import Models
from tierd.errors import TierdError

CALL_S = 5.0
"""Wait for the answers of a frame."""
RARE_CALL_S = 30.0
RECONNECT_S = 60.0
"""A daemon that is away for longer ends the program."""
RETRY_S = 0.5
WEAR_EVERY_S = 30.0
RARE_EVERY_S = 5.0
TREE_REST = 20
"""The next tree waits so many times as long as the last one took."""
TREE_RUNS, TREE_DEPTH = 200, 5

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon's answers at one moment. at_s: monotonic seconds."""

    at_s: float
    status: pb.StatusReply
    tiers: pb.TiersReply
    sessions: pb.SessionsReply


@dataclass(frozen=True, slots=True)
class Change:
    """Two samples, the older first; rates are differences over the time between them."""

    before: Sample
    after: Sample

    @property
    def seconds(self) -> float:
        """Time between the samples; never zero."""
        return max(self.after.at_s - self.before.at_s, 1e-6)

    def per_second(self, before: float, after: float) -> float:
        """A counter's rate. A counter that fell (the daemon restarted) counts from zero."""
        return (after - before if after >= before else after) / self.seconds

    @property
    def hits(self) -> Hits:
        """The hits between the samples."""
        return hits_of(self.after.status.counters).since(hits_of(self.before.status.counters))

    def rates(self) -> dict[str, float]:
        """The counters that grew, with their rates."""
        old, new = self.before.status.counters, self.after.status.counters
        rates = {name: self.per_second(old.get(name, 0), count) for name, count in new.items()}
        return {name: rate for name, rate in rates.items() if rate > 0}


@dataclass(slots=True)
class Rare:
    """Answers that are asked for rarely; empty before they come, or if the daemon has none."""

    wear: pb.WearReply = field(default_factory=pb.WearReply)
    tree: pb.TreeReply = field(default_factory=pb.TreeReply)
    ceiling: pb.CeilingReply = field(default_factory=pb.CeilingReply)
    namespaces: pb.NamespacesReply = field(default_factory=pb.NamespacesReply)


def sample(daemon: Connection) -> Sample:
    """Requests all data of a frame. Raises the daemon's errors."""
    status = daemon.ask(pb.StatusRequest(), timeout_s=CALL_S)
    tiers = daemon.ask(pb.TiersRequest(), timeout_s=CALL_S)
    return Sample(time.monotonic(), status, tiers, daemon.ask(pb.SessionsRequest(), timeout_s=CALL_S))


class Sampler:
    """See the module; a context manager. Its attributes are replaced whole.

    trouble: why there is no new sample. error: ends the program. samples: so many so far.
    """

    def __init__(self, connect: Callable[[], Connection], *, interval_s: float, tree_sort: str) -> None:
        """Raises the errors of `connect` and of the first sample."""
        self._connect, self._interval_s, self._tree_sort = connect, interval_s, tree_sort
        self._daemon = connect()
        first = sample(self._daemon)
        self.change, self.rare = Change(first, first), Rare()
        self.trouble, self.samples = "", 1
        self.error: TierdError | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._ended, self._hurried = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._ask_often, self._ask_rarely)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self._wake()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._hurried.set()
        self._daemon.__exit__(None, None, None)  # ends the calls that the threads wait for
        for thread in self._threads:
            thread.join(CALL_S)

    def wait(self, fds: Sequence[int]) -> bool:
        """Returns after a new answer, after CALL_S, or when a descriptor can be read: then True."""
        ready = select.select([self._reader, *fds], [], [], CALL_S)[0]
        if self._reader in ready:
            os.read(self._reader, 1 << 12)
        return any(fd in ready for fd in fds)

    def sort_tree(self, sort: str) -> None:
        """Asks for the tree in this order from now on, at once."""
        self._tree_sort = sort
        self._hurried.set()

    def _wake(self) -> None:
        try:
            os.write(self._writer, b".")
        except BlockingIOError:  # nobody reads, and there is enough to read
            return

    def _ask_often(self) -> None:
        lost_s: float | None = None
        while not self._ended.wait(self._interval_s if lost_s is None else RETRY_S):
            try:
                if lost_s is not None:
                    self._reconnect()
                self.change = Change(self.change.after, sample(self._daemon))
            except (TierdError, ValueError) as error:  # grpc's error for a closed channel
                if lost_s is None:
                    lost_s = time.monotonic()
                if time.monotonic() - lost_s >= RECONNECT_S and isinstance(error, TierdError):
                    self.error = error
                self.trouble = str(error)
            else:
                lost_s, self.trouble = None, ""
                self.samples += 1
            self._wake()

    def _reconnect(self) -> None:
        """Opens a new session: the old one ended with its daemon."""
        daemon = self._connect()
        self._daemon.__exit__(None, None, None)
        self._daemon = daemon

    def _ask_rarely(self) -> None:
        wear_s = tree_s = 0.0
        while not self._ended.is_set():
            rare, now = self.rare, time.monotonic()
            is_due = now >= tree_s or self._hurried.is_set()
            self._hurried.clear()
            tree = self._asked(
                pb.TreeRequest(limit=TREE_RUNS, depth=TREE_DEPTH, sort=self._tree_sort), rare.tree, when=is_due
            )
            wear = self._asked(pb.WearRequest(), rare.wear, when=now >= wear_s)
            if is_due:
                tree_s = time.monotonic() + max(RARE_EVERY_S, TREE_REST * tree.took_s)
            if now >= wear_s:
                wear_s = time.monotonic() + WEAR_EVERY_S
            ceiling = self._asked(pb.CeilingRequest(), pb.CeilingReply())
            known = Models(rare.namespaces.namespaces)
            are_new = any(node.namespace not in known for node in tree.nodes)  # the daemon counts all blocks for them
            self.rare = Rare(
                wear, tree, ceiling, self._asked(pb.NamespacesRequest(), rare.namespaces, when=is_due and are_new)
            )
            self._wake()
            self._hurried.wait(RARE_EVERY_S)

    def _asked(self, request: Message, last: Reply, *, when: bool = True) -> Reply:
        """The answer, or the last one: the daemon is away, or too old for this call."""
        try:
            return self._daemon.ask(request, timeout_s=RARE_CALL_S) if when else last  # type: ignore[call-overload]
        except (TierdError, ValueError):
            return last
