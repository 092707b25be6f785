"""KV events of a real daemon over real ZMQ: a router that follows them has the true block locations."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import zmq

from tests.depth import count, percentile, report
from tests.system.blocks import await_true
from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import About, Client, NamespaceSpec, OpenedNamespace, PutGroup, PutResult
from tierd.core.formats.block import NamespaceSpec as Spec
from tierd.errors import Unavailable
from tierd.events.feed import AGAIN_S
from tierd.events.payloads import Cleared, Event, Hash, Removed, Stored, short_hash
from tierd.integrations import store as store_module
from tierd.integrations.events import Message, Subscriber, Whereabouts
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.store import EngineStore

KIB, MIB = 1 << 10, 1 << 20
SPEC = NamespaceSpec("m", tokens_per_block=16, block_bytes=64 * KIB, adapter="lora")
CONFIG = """\
[[host]]
capacity = "4 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "8 MiB"
segment = "1 MiB"

[events]
enabled = true
bind = "ipc://{root}/events"
replay_bind = "ipc://{root}/replays"
"""
MEDIUM = {"host.0": "CPU", "nvme.0": "STORAGE"}


def name(number: int) -> bytes:
    """The hash by which an engine names a block."""
    return hashlib.sha256(number.to_bytes(4, "big")).digest()


def tokens_of(number: int) -> np.ndarray:
    return np.arange(16 * number, 16 * number + 16, dtype=np.uint32)


def put(client: Client, space: OpenedNamespace, *numbers: int, durable: bool = False) -> PutResult:
    """Stores consecutive blocks with their names and tokens, like an engine."""
    names = [name(number) for number in numbers]
    about = About(names, tokens=np.concatenate([tokens_of(number) for number in numbers]))
    group = PutGroup(space, space.fold(names), about=about)
    return client.put(space, group, [np.full(SPEC.block_bytes, n % 251, np.uint8) for n in numbers], durable=durable)


@dataclass
class Router:
    """A subscriber, all messages received, and the block locations derived from them."""

    subscriber: Subscriber
    heard: list[Message] = field(default_factory=list)
    beliefs: Whereabouts = field(default_factory=Whereabouts)

    def listen(self, timeout_s: float = 0.05) -> None:
        """Applies all messages that have arrived."""
        while messages := self.subscriber.poll(timeout_s):
            self.take(messages)

    def take(self, messages: list[Message]) -> None:
        self.heard += messages
        for message in messages:
            self.beliefs.apply(message.batch.events)

    @property
    def events(self) -> list[Event]:
        return [event for message in self.heard for event in message.batch.events]

    def believes(self) -> dict[Hash, set[str]]:
        self.listen()
        return self.beliefs.media


def addresses(daemon: Daemon) -> tuple[str, str]:
    return f"ipc://{daemon.root}/events", f"ipc://{daemon.root}/replays"


@contextlib.contextmanager
def routed(daemon: Daemon, *, replay: bool = True) -> Iterator[Router]:
    """A router that receives all events from now on, and the events kept for replay."""
    events, replays = addresses(daemon)
    with Subscriber(events, replays if replay else "") as subscriber:
        router = Router(subscriber)
        router.take(subscriber.catch_up())
        yield router


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(CONFIG) as running:
        yield running


def is_so(daemon: Daemon, space: OpenedNamespace, numbers: range) -> dict[Hash, set[str]]:
    """The media of these blocks as the daemon lists them, under the engine's names."""
    folded = {row.tobytes(): n for n, row in zip(numbers, space.fold([name(n) for n in numbers]), strict=True)}
    with RawClient(daemon.target) as raw:
        raw.call(raw.admin.Quiesce, apb.QuiesceRequest())
        listed = raw.call(raw.admin.Blocks, apb.BlocksRequest(limit=10_000)).blocks
    return {
        short_hash(name(folded[block.hash])): {MEDIUM[tier] for tier in block.tiers}
        for block in listed
        if block.namespace == space.id
    }


@pytest.mark.parametrize(("queue", "shape"), [(10_000, "map"), (10_000, "array"), (1, "map")])
def test_a_router_believes_what_is_so(queue: int, shape: str) -> None:
    """A router follows every demotion and eviction, even when the log constantly drops events.
    After drops the daemon announces all blocks again, at most once a second."""
    began = time.monotonic()
    config = f'[server]\nwatch_queue_events = {queue}\n{CONFIG}format = "{shape}"\n'
    numbers = range(count(test=240, nightly=1000, weekly=4000))
    with Daemon(config) as daemon, Client(daemon.target) as client, routed(daemon) as router:
        space = client.open_namespace(SPEC)
        for first in range(0, len(numbers), 4):
            put(client, space, *numbers[first : first + 4])
            router.listen(0)
        put(client, space, *numbers[-4:], durable=True)
        await_true(lambda: router.believes() == is_so(daemon, space, numbers), "the router believes what is so")
        assert {medium for held in router.beliefs.media.values() for medium in held} == {"CPU", "STORAGE"}
        with RawClient(daemon.target) as raw:
            raw.call(raw.admin.Evict, apb.EvictRequest(tier="nvme.0"))
        await_true(lambda: router.believes() == is_so(daemon, space, numbers), "the disk's are taken back")
        numbered = [message.number for message in router.heard]
        assert numbered == list(range(numbered[0], numbered[0] + len(numbered)))
    if queue == 1:
        cleared = router.events[2:].count(Cleared())  # beyond the first events of a replay and of the daemon
        assert 0 < cleared <= (time.monotonic() - began) / AGAIN_S + 1
    else:
        told = {(type(e), e.medium) for e in router.events if not isinstance(e, Cleared)}
        assert told == {(kind, medium) for kind in (Stored, Removed) for medium in ("CPU", "STORAGE")}


def test_copies_have_their_tokens(daemon: Daemon) -> None:
    """A durable put announces memory and disk, with names, parent, tokens, block size and adapter."""
    with Client(daemon.target) as client, routed(daemon) as router:
        put(client, client.open_namespace(SPEC), 1, 2, durable=True)
        await_true(lambda: len(router.believes()) == 2, "two blocks are told")
        stored = [event for event in router.events if isinstance(event, Stored)]
    names, tokens = (short_hash(name(1)), short_hash(name(2))), tuple(range(16, 48))
    assert stored == [Stored(names, None, tokens, 16, medium, "lora") for medium in ("CPU", "STORAGE")]


def test_a_put_of_tokens_tells_them(daemon: Daemon) -> None:
    """Without an engine, events carry tierd's own hashes and tokens, and omit a short last block."""
    with Client(daemon.target) as client, routed(daemon) as router:
        space = client.open_namespace(SPEC)
        tokens = np.arange(40)
        assert client.put(space, tokens, [bytes(SPEC.block_bytes)] * 2 + [bytes(SPEC.block_bytes // 2)])
        put(client, space, 7)  # after its event no other event of the put can follow
        await_true(lambda: len(router.believes()) == 3, "three blocks are told")
        first, _ = (event for event in router.events if isinstance(event, Stored))
    hashes = tuple(short_hash(row.tobytes()) for row in space.hash(tokens))
    assert (first.hashes, first.tokens, first.parent) == (hashes, tuple(range(32)), None)


def test_an_engines_store_tells_names_over_all_its_parts(daemon: Daemon) -> None:
    """One save in several reservations gives one chain of events, with every block under its engine name."""
    numbers = range(40)
    names, space_bytes = [name(n) for n in numbers], SPEC.block_bytes
    options, facts = Options(target=daemon.target), EngineFacts("test", "1", "store")
    with EngineStore(options, facts) as store, routed(daemon) as router, pytest.MonkeyPatch.context() as patched:
        patched.setattr(store_module, "SAVE_BLOCKS", 16)
        space = store.open(SPEC)
        about = About(names, name(1000), np.concatenate([tokens_of(n) for n in numbers]))
        pieces = [[np.full(space_bytes, n, np.uint8)] for n in numbers]
        assert store.save(PutGroup(space, space.fold(names)), pieces, about) == len(numbers)
        await_true(lambda: len(router.believes()) == len(numbers), "all are told")
        stored = [event for event in router.events if isinstance(event, Stored)]
    assert [one for event in stored for one in event.hashes] == [short_hash(one) for one in names]
    assert [event.parent for event in stored] == [short_hash(name(n)) for n in (1000, 15, 31)]
    assert [token for event in stored for token in event.tokens] == list(range(16 * len(numbers)))


def test_what_was_missed_comes_by_replay(daemon: Daemon) -> None:
    """A router detects a gap by its numbers and replays it in order; a late router gets all kept events."""
    with Client(daemon.target) as client, routed(daemon) as router:
        space = client.open_namespace(SPEC)
        put(client, space, 0)
        await_true(lambda: len(router.believes()) == 1, "the first block is told")
        began = len(router.events)
        router.subscriber._socket.disconnect(addresses(daemon)[0])
        for number in range(1, 6):
            put(client, space, number)
        router.subscriber._socket.connect(addresses(daemon)[0])
        numbers = iter(range(6, 40))
        await_true(
            lambda: put(client, space, next(numbers)).stored == 1 and len(router.believes()) > 6, "the gap is closed"
        )
        assert [m.number for m in router.heard] == list(range(router.heard[0].number, router.heard[-1].number + 1))
        assert Cleared() not in router.events[began:]
        with routed(daemon) as late:
            await_true(lambda: late.believes() == router.believes(), "who comes late believes the same")


@pytest.mark.parametrize("replay", [True, False])
def test_what_cannot_be_replayed_clears(replay: bool) -> None:
    """If missed messages cannot be replayed, a router receives "cleared" first and has no stale locations."""
    config = f"{CONFIG}buffer = 2\n"
    with Daemon(config) as daemon, Client(daemon.target) as client, routed(daemon, replay=replay) as router:
        space = client.open_namespace(SPEC)
        numbers = iter(range(100, 1000))
        await_true(lambda: put(client, space, next(numbers)).stored == 1 and len(router.believes()) > 0, "it listens")
        router.subscriber._socket.disconnect(addresses(daemon)[0])
        with RawClient(daemon.target) as raw:
            for number in range(5):
                put(client, space, number)
            raw.call(raw.admin.Evict, apb.EvictRequest())
        router.subscriber._socket.connect(addresses(daemon)[0])
        cleared = router.events.count(Cleared())
        last = iter(range(50, 90))
        wanted = lambda: put(client, space, next(last)).stored == 1 and len(router.believes()) > 0  # noqa: E731
        await_true(lambda: wanted() and router.events.count(Cleared()) > cleared, "the gap is told")
        assert router.believes().items() <= is_so(daemon, space, range(1000)).items()


def test_a_bumped_epoch_is_cleared_and_others_are_told_again(daemon: Daemon) -> None:
    """An epoch bump clears all its blocks, leased ones too; other namespaces' blocks are announced again."""
    with Client(daemon.target) as client, routed(daemon) as router, RawClient(daemon.target) as raw:
        old, other = client.open_namespace(SPEC), client.open_namespace(Spec("other", 16, SPEC.block_bytes))
        put(client, old, 1, 2)
        put(client, other, 3)
        await_true(lambda: len(router.believes()) == 3, "all are told")
        began = len(router.events)
        with client.acquire(old, old.fold([name(1), name(2)])):
            raw.call(raw.admin.BumpEpoch, apb.BumpEpochRequest(model="m"))
            await_true(lambda: set(router.believes()) == {short_hash(name(3))}, "only the other's is believed")
        assert router.events[began:].count(Cleared()) == 1


def test_after_a_kill_routers_hear_of_a_new_life(daemon: Daemon) -> None:
    """After a kill, a router gets a gap and "cleared"; blocks found are announced once the engine
    names them again. A clean stop clears."""
    with Client(daemon.target) as client, routed(daemon) as router:
        space = client.open_namespace(SPEC)
        put(client, space, 1, 2, durable=True)
        await_true(lambda: len(router.believes()) == 2, "two blocks are told")
        began = len(router.events)
        daemon.kill()
        daemon.wait()
        daemon.start()
        assert put(client, space, 1, 2).stored == 2
        await_true(
            lambda: router.believes() == is_so(daemon, space, range(5)) and Cleared() in router.events[began:],
            "told again",
        )
        daemon.stop()
        await_true(lambda: not router.believes(), "a daemon that has ended holds nothing")
        assert router.events[-1] == Cleared()


def test_who_does_not_read_slows_nobody(daemon: Daemon) -> None:
    """Ten stuck subscribers and one stuck replay client do not slow puts; another router misses nothing."""
    events, replays = addresses(daemon)
    puts = count(test=100, nightly=2000, weekly=20_000)
    with Client(daemon.target) as client, contextlib.ExitStack() as stack, routed(daemon) as router:
        space = client.open_namespace(SPEC)
        numbers = iter(range(10**6))
        before = [_timed(client, space, next(numbers), router) for _ in range(puts)]
        context = stack.enter_context(zmq.Context())
        for _ in range(10):
            stuck = stack.enter_context(context.socket(zmq.SUB))
            stuck.setsockopt(zmq.LINGER, 0)
            stuck.setsockopt(zmq.RCVHWM, 1)
            stuck.setsockopt(zmq.RCVBUF, 4096)
            stuck.subscribe(b"")
            stuck.connect(events)
        beside = [_timed(client, space, next(numbers), router) for _ in range(puts)]
        asking = stack.enter_context(context.socket(zmq.DEALER))
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.RCVHWM, 1)
        asking.connect(replays)
        asked = []
        for _ in range(puts):
            asking.send_multipart((b"", bytes(8)))  # for all kept messages, with each put
            asked.append(_timed(client, space, next(numbers), router))
        await_true(lambda: router.believes() == is_so(daemon, space, range(3 * puts)), "the good router misses nothing")
    medians = [percentile(times, 0.5) for times in (before, beside, asked)]
    names = ("alone_us", "beside_stuck_us", "beside_replays_us")
    figures = {name: round(median * 1e6) for name, median in zip(names, medians, strict=True)}
    report("put beside subscribers that do not read", messages=len(router.heard), **figures)
    assert max(medians[1:]) < 10 * medians[0]


def _timed(client: Client, space: OpenedNamespace, number: int, router: Router) -> float:
    begun = time.perf_counter()
    assert put(client, space, number).stored == 1
    took = time.perf_counter() - begun
    router.listen(0)
    return took


def test_over_loopback_with_a_topic() -> None:
    """TCP events under a topic carry full hashes; the daemon ignores malformed replay requests."""
    ports = _free_ports(2)
    config = CONFIG.replace("ipc://{root}/events", f"tcp://127.0.0.1:{ports[0]}")
    config = config.replace("ipc://{root}/replays", f"tcp://127.0.0.1:{ports[1]}")
    with Daemon(f'{config}topic = "kv@pod@m"\nhashes = "bytes"\n') as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(f"tcp://127.0.0.1:{ports[1]}")
            for frames in ((b"",), (b"", b"1"), (bytes(8),), (b"", b"", bytes(8))):
                asking.send_multipart(frames)
        with Subscriber(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", topic="kv@pod") as subscriber:
            router = Router(subscriber)
            router.take(subscriber.catch_up())
            numbers = iter(range(100))
            await_true(
                lambda: put(client, space, next(numbers)).stored == 1 and len(router.believes()) > 1, "it is told"
            )
    assert {message.topic for message in router.heard} == {"kv@pod@m"} and name(1) in router.beliefs.media


def test_without_pyzmq_the_daemon_says_what_to_install(tmp_path: object) -> None:
    """If events are on and pyzmq is missing, the start fails with a sentence that names the remedy."""
    (tmp_path / "zmq.py").write_text("raise ImportError('none here')")  # type: ignore[operator]
    with pytest.raises(Unavailable), Daemon(CONFIG, env={"PYTHONPATH": str(tmp_path)}) as daemon:
        pytest.fail(f"it started: {daemon.log}")
    # `broken` keeps the log of a failed start
    broken = Daemon(CONFIG, env={"PYTHONPATH": str(tmp_path)})
    with contextlib.suppress(Unavailable):
        broken.start()
    assert "pip install 'tierd[events]'" in broken.log and "Traceback" not in broken.log


def test_events_are_off_unless_they_are_asked_for() -> None:
    """Without events in its configuration, a daemon opens no event socket and clients send it no names."""
    with Daemon() as daemon, Client(daemon.target) as client:
        put(client, client.open_namespace(SPEC), 1)
        assert "KV events" not in daemon.log
        link = client._connector.link
        assert link is not None and link.session is not None and not link.session.tells_events


def _free_ports(wanted: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(wanted)]
        return [one.getsockname()[1] for one in found]
