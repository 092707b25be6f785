"""Conversations: calls over streams that stay open, each with one call at a time (`Converse` in cache.proto).

    ask ──▶ a resting stream, or a new one ──▶ message, answer ──▶ the stream rests

Purpose: one call for half of what a call of gRPC's own costs. Non-purpose: which calls are made (rpc.py decides), their errors' names
(protocol.py). Invariants: a call ends by its deadline: a stream whose answer is late is cancelled, by a thread that waits for nothing
else; a stream that did not answer, whatever the reason, is never used again, since the next answer would be the wrong one; no stream
is open during a fork.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from typing import Any

from tierd._proto import cache_pb2 as pb
from tierd.client import forks

CLOSE_WAIT_S = 0.5
"""For streams to end before a fork."""


class Conversation:
    """One stream. One thread at a time asks."""

    def __init__(self, stub: Any, metadata: Any) -> None:
        self._asks: queue.SimpleQueue[pb.Ask | None] = queue.SimpleQueue()
        self._stream = stub.Converse(iter(self._asks.get, None), metadata=metadata)
        # gRPC's thread that waits for asks would wait for ever for those of a client that was collected without a word.
        weakref.finalize(self, self._asks.put, None).atexit = False
        self._over = threading.Event()
        if not self._stream.add_callback(self._over.set):
            self._over.set()
        self._turn = threading.Lock()
        self.deadline = math.inf
        """Of the call in progress, in time.monotonic(); infinite if there is none."""
        self.is_late = False

    def ask(self, ask: pb.Ask, *, deadline: float) -> pb.Answer:
        """One call. Raises grpc.RpcError, `is_late` where it was the deadline; after any exception the stream is to be ended."""
        self.deadline = deadline
        _watch.add(self)
        self._asks.put(ask)
        answer: pb.Answer = next(self._stream)
        with self._turn:
            self.deadline = math.inf
        return answer

    def check(self, now: float) -> None:
        """Cancels a call whose deadline has passed."""
        with self._turn:
            if self.deadline <= now:
                self.deadline, self.is_late = math.inf, True
                self._stream.cancel()

    def end(self) -> None:
        """Cancels the stream."""
        with self._turn:
            self.deadline = math.inf
        self._asks.put(None)
        self._stream.cancel()

    def wait_over(self, timeout_s: float) -> None:
        """Until gRPC's thread is done with it; cancelled it may be long before."""
        self._over.wait(timeout_s)


class Conversations:
    """Those of one link: limit, at one time. Threads may share it."""

    def __init__(self, stub: Any, metadata: Any, *, limit: int) -> None:
        self._stub, self._metadata, self._limit = stub, metadata, limit
        self._resting: list[Conversation] = []
        self._open = 0
        self._turn = threading.Lock()
        forks.register(self)

    def take(self) -> Conversation | None:
        """A stream to ask on; None: all are in use."""
        with self._turn:
            if self._resting:
                return self._resting.pop()
            if self._open >= self._limit:
                return None
            self._open += 1
        try:
            return Conversation(self._stub, self._metadata)
        except BaseException:
            with self._turn:
                self._open -= 1
            raise

    def rest(self, stream: Conversation) -> None:
        """The call has been answered; perhaps in the moment in which its stream was cancelled."""
        if stream.is_late:
            self.drop(stream)
        else:
            self._resting.append(stream)

    def drop(self, stream: Conversation) -> None:
        """The call has not been answered."""
        stream.end()
        with self._turn:
            self._open -= 1

    def close(self) -> None:
        """Ends those that rest; those in use end with the channel."""
        with self._turn:
            resting, self._resting = self._resting, []
            self._open -= len(resting)
        for stream in resting:
            stream.end()

    def forking(self) -> None:
        """Before a fork: gRPC can prepare for it only while no thread of its own is at work on a stream."""
        ended = list(self._resting)
        self.close()
        deadline = time.monotonic() + CLOSE_WAIT_S
        for stream in ended:
            stream.wait_over(max(0.0, deadline - time.monotonic()))

    def forked(self) -> None:
        """In a child: nothing of it is used there, not even to end it."""
        forks.abandon((self._resting, self._stub))
        self._resting, self._turn = [], threading.Lock()


class Watch:
    """Cancels calls whose deadlines have passed: one thread, which sleeps until the first of them."""

    def __init__(self) -> None:
        self.forked()
        forks.register(self)

    def forked(self) -> None:
        """In a child there are no threads, and no streams."""
        self._changed = threading.Condition()
        self._streams: weakref.WeakSet[Conversation] = weakref.WeakSet()
        self._next = 0.0
        """When it looks again; 0: there is no thread."""

    def add(self, stream: Conversation) -> None:
        """A call begins; its stream has its deadline."""
        if stream.deadline >= self._next > 0 and stream in self._streams:
            return
        with self._changed:
            self._streams.add(stream)
            if not self._next:
                threading.Thread(target=self._run, name="tierd-deadlines", daemon=True).start()
                self._next = math.inf  # not before there is one: a process may have no more threads to give
            self._next = min(self._next, stream.deadline)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                left = self._next - time.monotonic()
                if left > 0:
                    self._changed.wait(None if math.isinf(left) else min(left, threading.TIMEOUT_MAX))
                    continue
                self._next = math.inf
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        # Apart from _run, whose frame would keep streams alive while it waits.
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.check(now)
        with self._changed:
            self._next = min([self._next, *(stream.deadline for stream in streams)])


_watch = Watch()
