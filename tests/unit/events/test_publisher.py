"""The publisher's thread and sockets: messages that it keeps, drops and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.system.blocks import await_true
from tests.system.tcp import free_port, has_ipv6
from tierd.config import EventsConfig
from tierd.errors import ConfigError
from tierd.events import publisher as module
from tierd.events.payloads import END, Cleared, Event, Stored
from tierd.events.publisher import Publisher, parts
from tierd.events.router_view import RouterView
from tierd.integrations.events import Subscriber


def stored(number: int, tokens: int = 1) -> Stored:
    return Stored((number,), None, tuple(range(tokens)), tokens, "CPU")


@pytest.fixture
def settings(tmp_path: Path) -> EventsConfig:
    return EventsConfig(enabled=True, bind=f"ipc://{tmp_path}/e", replay_bind=f"ipc://{tmp_path}/r", buffer=5)


@pytest.fixture
def publisher(settings: EventsConfig) -> Iterator[Publisher]:
    running = Publisher(settings, RouterView(("CPU",), 10))
    yield running
    running.close(timeout_s=10)


def send(publisher: Publisher, *events: Event) -> int:
    return publisher.do(lambda _told: list(events)).result(10)


def replay(settings: EventsConfig) -> list[tuple[Event, ...]]:
    """The kept messages that have events, from the first on."""
    with Subscriber(settings.bind, settings.replay_bind) as subscriber:
        return [m.batch.events for m in subscriber.catch_up() if m.batch.events]


def test_what_is_kept_is_bounded(publisher: Publisher, settings: EventsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher bounds kept messages by count and bytes; an older replay begins with cleared."""
    for number in range(20):
        send(publisher, stored(number))
    kept = replay(settings)
    assert kept[0] == (Cleared(),) and len(kept) <= 6 and kept[-1] == (stored(19),)
    monkeypatch.setattr(module, "REPLAY_BYTES", 10)
    send(publisher, stored(20))
    assert replay(settings) == [(Cleared(),)]


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 on its loopback")
def test_ipv6() -> None:
    """The publisher binds [::1], and a subscriber there receives live and kept messages."""
    settings = EventsConfig(
        enabled=True, bind=f"tcp://[::1]:{free_port('::1')}", replay_bind=f"tcp://[::1]:{free_port('::1')}", buffer=5
    )
    running = Publisher(settings, RouterView(("CPU",), 10))
    try:
        send(running, stored(1))
        assert replay(settings)[-1] == (stored(1),)
    finally:
        running.close(timeout_s=10)


def test_work_that_fails_tells_its_caller_and_ends_nothing(publisher: Publisher, settings: EventsConfig) -> None:
    """An exception reaches the caller that submitted the work; the next work still runs."""

    def broken(_told: RouterView) -> list[Event]:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        publisher.do(broken).result(10)
    assert send(publisher, stored(1)) == 1 and (stored(1),) in replay(settings)


def test_many_events_are_many_messages(publisher: Publisher, settings: EventsConfig) -> None:
    """Events are split over bounded messages, in order and without loss; no events make no message."""
    many = [stored(number, 5000) for number in range(9)]
    assert send(publisher, *many) == 3 and send(publisher) == 0
    assert [event for part in parts(many) for event in part] == many
    assert [event for events in replay(settings)[1:] for event in events] == many


def test_a_long_replay_is_whole(tmp_path: Path) -> None:
    """A replay delivers every kept message in order, also to a reader that starts after the last send."""
    count = 3000
    settings = EventsConfig(enabled=True, bind=f"ipc://{tmp_path}/e", replay_bind=f"ipc://{tmp_path}/r", buffer=count)
    publisher = Publisher(settings, RouterView(("CPU",), 10))
    try:
        for number in range(count):
            publisher.do(lambda _told, number=number: [stored(number)])  # type: ignore[misc]
        assert send(publisher) == 0
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.RCVHWM, 1)
            asking.connect(settings.replay_bind)
            asking.send_multipart((b"", bytes(8)))
            assert asking.poll(10_000)
            assert send(publisher, stored(0)) == 1  # queued behind the replay, so the replay has been sent
            frames = []
            while not frames or frames[-1][2] != END:
                assert asking.poll(10_000)
                frames.append(asking.recv_multipart())
        numbers = [int.from_bytes(number, "big") for _, _, number, _ in frames[1:-1]]
        assert len(numbers) >= count and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    finally:
        publisher.close(timeout_s=10)


def test_silence_is_broken(publisher: Publisher, settings: EventsConfig) -> None:
    """An idle publisher sends a numbered empty message, so a reader detects a lost last message."""
    with Subscriber(settings.bind) as subscriber:
        heard = []

        def has_two() -> bool:
            heard.extend(message for message in subscriber.poll(0.1) if not message.batch.events)
            return len(heard) > 1

        await_true(has_two, "two messages without events")
    assert heard[1].number == heard[0].number + 1


def test_an_address_in_use_is_said(publisher: Publisher, tmp_path: Path) -> None:
    """An address that cannot be bound raises ConfigError with the setting and the address."""
    wrong = EventsConfig(enabled=True, bind=f"ipc://{tmp_path}/other", replay_bind=f"ipc://{tmp_path}/none/r")
    with pytest.raises(ConfigError, match=r"events\.replay_bind: ipc://.*cannot be bound"):
        Publisher(wrong, RouterView(("CPU",), 10))
