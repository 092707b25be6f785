"""Clients that together exceed a daemon: `python -m tests.system.overload_load KIND TARGET JSON`.

    closed    polite: SDK threads that each acquire, check bytes and release, sequence by sequence
    open      raw: acquires at a fixed rate, whatever the replies; releases its leases
    probe     raw: one acquire after another, to measure the time of a refusal
    flood     raw: lookups, with a fixed number in flight
    greedy    raw: gets that it never reads, beyond its credits; reconnects when cut off
    lookups   polite: lookups by some threads
    health    health checks at an even pace
    slow      gets and watches whose replies it never reads
    idle      silent connections to both sockets, and idle sessions

Each prints `ready` and reads its end from standard input, as a time of the monotonic clock, so that
all end together. At the end it prints one JSON object: counts, latencies in seconds, whole answers
by the end, and the generations of their pages. A page's generation is new after every disk read. So
the generations count each useful disk read once. All kinds but probe and health have a lower
priority than the daemon, so a small machine measures the daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.system.raw import RawClient, ask, connect, hello
from tierd._proto import cache_pb2 as pb
from tierd._proto import cache_pb2_grpc
from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.client.transport import requests
from tierd.core.formats.model import HANDLE
from tierd.errors import ERROR_KEY, RetryError, TierdError
from tierd.testing import chain, is_content

TOKENS = 16
DEADLINE_S = 4.0
"""Of every call of the load."""
PATIENCE_S = 2.0
"""Of an open client. Less than the disk needs to fill memory, so an unbounded queue serves nobody."""
SETUP_S = 20.0
"""Of the calls before the load: all processes begin at one moment."""
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))
OWN = (("grpc.use_local_subchannel_pool", 1),)
WHOLE = ("whole", "warm")
"""Every block was served."""


class Tally:
    """Results by name, with their seconds, from many threads. in_time, pages: of whole answers by the end."""

    def __init__(self, end: float) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        self.in_time = 0
        self.pages: set[int] = set()
        self._end = end
        self._turn = threading.Lock()

    def add(self, name: str, begun: float, *, pages: Iterable[int] = ()) -> None:
        now = time.monotonic()
        with self._turn:
            self.counts[name] += 1
            self.seconds.setdefault(name, []).append(now - begun)
            if name in WHOLE and now < self._end:
                self.in_time += 1
                self.pages.update(pages)

    def print(self) -> None:
        pages = sorted(self.pages)
        print(json.dumps({"counts": self.counts, "seconds": self.seconds, "in_time": self.in_time, "pages": pages}))


def main() -> None:
    kind, target, options = sys.argv[1:]
    given = json.loads(options)
    os.nice(0 if kind in {"health", "probe"} else 5)
    print("ready", flush=True)
    end = float(sys.stdin.readline())
    tally = Tally(end)
    KINDS[kind](target, end, tally, **given)
    tally.print()


def sequences(seeds: list[int]) -> Iterator[int]:
    """Cycles through the seeds without end from a random start: a seed returns only after all others."""
    start = random.randrange(len(seeds))
    while True:
        for i in range(len(seeds)):
            yield seeds[(start + i) % len(seeds)]


def spec(block_bytes: int) -> NamespaceSpec:
    return NamespaceSpec(model="load", tokens_per_block=TOKENS, block_bytes=block_bytes)


def closed(
    target: str, end: float, tally: Tally, *, seeds: list[int], blocks: int, block_bytes: int, threads: int
) -> None:
    """Whole: every block was served, and the checked one was right."""
    turn, wanted = threading.Lock(), sequences(seeds)
    with Client(target, timeout_s=DEADLINE_S) as client:
        space = client.open_namespace(spec(block_bytes), timeout_s=SETUP_S)

        def one() -> None:
            while time.monotonic() < end:
                with turn:
                    hashes = chain(next(wanted), blocks)
                begun = time.monotonic()
                try:
                    with client.acquire(space, hashes) as lease:
                        count = len(lease)
                        right = not count or is_content(np.array(lease.view(count - 1)), hashes[count - 1])
                        name = "wrong" if not right else kind_of(count, blocks, lease.tier_tokens)
                        tally.add(name, begun, pages=lease.handles["generation"].tolist())
                except RetryError as error:
                    tally.add(type(error).__name__, begun)

        run(one, threads)


def kind_of(count: int, blocks: int, tier_tokens: Sequence[int]) -> str:
    """whole: all blocks, the first from the disk; warm: all blocks, some from memory."""
    if count < blocks:
        return "short" if count else "nothing"
    return "warm" if tier_tokens[0] else "whole"


def lookups(
    target: str, end: float, tally: Tally, *, seeds: list[int], blocks: int, block_bytes: int, threads: int
) -> None:
    with Client(target, timeout_s=DEADLINE_S) as client:
        space = client.open_namespace(spec(block_bytes), timeout_s=SETUP_S)
        hashes = chain(seeds[0], blocks)

        def one() -> None:
            while time.monotonic() < end:
                begun = time.monotonic()
                try:
                    client.lookup(space, hashes)
                    tally.add("whole", begun)
                except TierdError as error:
                    tally.add(type(error).__name__, begun)

        run(one, threads)


def run(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def open_(
    target: str, end: float, tally: Tally, *, seeds: list[int], blocks: int, block_bytes: int, rate: float
) -> None:
    wanted = sequences(seeds)
    with RawClient(target) as client:
        asked = requests.open_namespace_request(OpenedNamespace(spec(block_bytes)))
        opened = client.call(client.cache.OpenNamespace, asked)
        begun, made = time.monotonic(), 0
        while (now := time.monotonic()) < end:
            if made < (now - begun) * rate:
                made += 1
                group = pb.Group(namespace=opened.namespace, hashes=chain(next(wanted), blocks).tobytes())
                send(client, pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST), tally, blocks=blocks)
            else:
                time.sleep(0.001)
        time.sleep(DEADLINE_S)


def probe(target: str, end: float, tally: Tally, *, seeds: list[int], blocks: int) -> None:
    wanted = sequences(seeds)
    with RawClient(target) as client:
        while time.monotonic() < end:
            request = pb.AcquireRequest(groups=[group_of(next(wanted), blocks)], tier=pb.TIER_KIND_HOST)
            begun = time.monotonic()
            try:
                reply = client.cache.Acquire(request, **given(client))
                tally.add("served" if reply.lease else "nothing", begun)
                client.cache.Release(pb.ReleaseRequest(leases=[reply.lease]), **given(client))
            except grpc.RpcError as error:
                tally.add(name_of(error), begun)
            time.sleep(0.02)


def send(client: RawClient, request: pb.AcquireRequest, tally: Tally, *, blocks: int) -> None:
    """Sends one acquire without waiting for its answer."""
    begun = time.monotonic()
    call = client.cache.Acquire.future(request, metadata=client.metadata, timeout=PATIENCE_S)

    def ended(done: Any) -> None:
        if done.exception() is not None:
            tally.add(name_of(done), begun)
            return
        reply = done.result()
        handles = np.frombuffer(b"".join(group.handles for group in reply.groups), dtype=HANDLE)
        tally.add(kind_of(len(handles), blocks, reply.tier_tokens), begun, pages=handles["generation"].tolist())
        if reply.lease:
            release = client.cache.Release.future(
                pb.ReleaseRequest(leases=[reply.lease]), metadata=client.metadata, timeout=DEADLINE_S
            )
            release.add_done_callback(
                lambda done: tally.add("released" if done.exception() is None else "unreleased", begun)
            )

    call.add_done_callback(ended)


def name_of(error: Any) -> str:
    """The class name of the daemon's error, or the status of a transport error."""
    trailing = dict(error.trailing_metadata() or ())
    if ERROR_KEY in trailing:
        return trailing[ERROR_KEY] + (
            "" if trailing.get("tierd-retry-ms") else "-unhinted" * (trailing[ERROR_KEY] == "Overloaded")
        )
    return str(error.code().name)


def flood(target: str, end: float, tally: Tally, *, seeds: list[int], blocks: int, in_flight: int) -> None:
    """Lookups by a client that does not wait for the answers."""
    with RawClient(target) as client:
        request = pb.LookupRequest(groups=[group_of(seeds[0], blocks)])
        keep_up(lambda: client.cache.Lookup.future(request, **given(client)), end, tally, in_flight=in_flight)


def greedy(target: str, end: float, tally: Tally, *, seeds: list[int], blocks: int, in_flight: int) -> None:
    """Gets by a client that ignores its credits."""
    request = pb.GetRequest(group=group_of(seeds[0], 2))
    while time.monotonic() < end:
        with contextlib.suppress(OSError, KeyError), narrow(target) as stub, RawClient(target) as client:
            keep_up(lambda: stub.Get(request, **given(client)), end, tally, in_flight=in_flight)
        time.sleep(0.05)


def keep_up(call: Callable[[], Any], end: float, tally: Tally, *, in_flight: int) -> None:
    """Keeps this many calls in flight until the end time or the session's end."""
    room, is_over, calls = threading.Semaphore(in_flight), threading.Event(), deque[Any](maxlen=2 * in_flight)

    def ended(done: Any, begun: float) -> None:
        name = "whole" if done.code() is grpc.StatusCode.OK else name_of(done)
        tally.add(name, begun)
        if name == "SessionLost" and not is_over.is_set():
            tally.add("cut off" if "credits" in done.details() else "lost", begun)
            is_over.set()
        room.release()

    while time.monotonic() < end and not is_over.is_set():
        if room.acquire(timeout=0.1):
            begun = time.monotonic()
            calls.append(call())
            calls[-1].add_done_callback(lambda done, begun=begun: ended(done, begun))
    for made in calls:
        made.cancel()


def group_of(seed: int, blocks: int) -> pb.Group:
    """A group of the first namespace."""
    return pb.Group(namespace=1, hashes=chain(seed, blocks).tobytes())


def given(client: RawClient) -> dict[str, Any]:
    """Options of each call of this client."""
    return {"metadata": client.metadata, "timeout": DEADLINE_S}


@contextlib.contextmanager
def narrow(target: str) -> Iterator[cache_pb2_grpc.CacheStub]:
    """A connection with a small flow-control window: the daemon soon blocks unless the client reads."""
    with grpc.insecure_channel(f"unix:{target}/tierd.sock", options=(*NARROW, *OWN)) as channel:
        yield cache_pb2_grpc.CacheStub(channel)


def health(target: str, end: float, tally: Tally, *, every_s: float) -> None:
    with grpc.insecure_channel(f"unix:{target}/tierd.sock", options=OWN) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=SETUP_S, wait_for_ready=True)
        while time.monotonic() < end:
            begun = time.monotonic()
            try:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
                tally.add("whole", begun)
            except grpc.RpcError as error:
                tally.add(name_of(error), begun)
            time.sleep(max(0.0, begun + every_s - time.monotonic()))


def slow(target: str, end: float, tally: Tally, *, seeds: list[int], blocks: int, count: int) -> None:
    """Makes calls and never reads their replies. Their deadline ends them."""
    with narrow(target) as stub, RawClient(target) as client:
        metadata, left_s = client.metadata, max(1.0, end - time.monotonic())
        requests = [pb.GetRequest(group=group_of(seed, blocks)) for seed in seeds[:count]]
        calls = [stub.Get(request, metadata=metadata, timeout=left_s) for request in requests]
        calls.append(stub.Watch(pb.WatchRequest(after=1), metadata=metadata))
        tally.add("unread", time.monotonic())
        time.sleep(max(0.0, end - time.monotonic()))
        for call in calls:
            call.cancel()


def idle(target: str, end: float, tally: Tally, *, count: int) -> None:
    """A third each: sessions, channels and silent connections, which reconnect every second."""
    third = count // 3
    with contextlib.ExitStack() as stack:
        for _ in range(third):
            connection = stack.enter_context(connected(target, tally))
            tally.add("sessions" if ask(connection, hello(name="idle"))[0].get("ok") else "refused", time.monotonic())
            channel = stack.enter_context(grpc.insecure_channel(f"unix:{target}/tierd.sock", options=OWN))
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SETUP_S)
            tally.add("channels", time.monotonic())
        while time.monotonic() < end:
            silent = [connected(target, tally) for _ in range(third)]
            tally.add("silent", time.monotonic())
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
            for connection in silent:
                connection.close()


def connected(target: str, tally: Tally) -> socket.socket:
    """Connects once the daemon's accept queue has room."""
    begun = time.monotonic()
    while True:
        try:
            return connect(target)
        except BlockingIOError:
            tally.add("queued", begun)
            if time.monotonic() - begun > SETUP_S:
                raise
            time.sleep(0.01)


KINDS: dict[str, Callable[..., None]] = {
    "closed": closed,
    "open": open_,
    "probe": probe,
    "flood": flood,
    "greedy": greedy,
    "lookups": lookups,
    "health": health,
    "slow": slow,
    "idle": idle,
}

if __name__ == "__main__":
    main()
