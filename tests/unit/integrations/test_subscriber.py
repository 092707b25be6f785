"""A subscriber of KV events, and its publisher's restart."""

from __future__ import annotations

from pathlib import Path

import zmq

from tests.system.blocks import await_true
from tierd.events.payloads import Batch, Cleared, Event, Stored, encode
from tierd.integrations.events import Message, Subscriber, Whereabouts


def stored(number: int) -> Stored:
    return Stored((number,), None, (), 0, "GPU")


def test_a_publisher_that_counts_from_its_beginning_again(tmp_path: Path) -> None:
    """An engine that restarts counts from 0 again: the subscriber clears its first life and misses no
    event."""
    address, heard = f"ipc://{tmp_path}/e", list[Message]()
    with zmq.Context() as context, context.socket(zmq.PUB) as out, Subscriber(address) as subscriber:
        out.setsockopt(zmq.LINGER, 0)
        out.bind(address)

        def send(number: int, event: Event, time_s: float) -> None:
            out.send_multipart((b"", number.to_bytes(8, "big"), encode(Batch(time_s, (event,)))))

        def is_heard(number: int, event: Event, time_s: float) -> bool:
            send(number, event, time_s)
            heard.extend(subscriber.poll(0.1))
            return any(event in message.batch.events for message in heard)

        def has_four() -> bool:
            heard.extend(subscriber.poll(0.1))
            return len(heard) > 3

        await_true(lambda: is_heard(1000, stored(1), 50.0), "the first life")
        heard.clear()
        send(1000, stored(1), 50.0)  # as in a replay
        for number in range(3):
            send(number, stored(10 + number), 60.0 + number)
        await_true(has_four, "the second life")
    assert [message.batch.events[0] for message in heard] == [Cleared(), stored(10), stored(11), stored(12)]
    known = Whereabouts({1: {"GPU"}})
    for message in heard:
        known.apply(message.batch.events)
    assert known.of(12) == {"GPU"} and not known.of(1)
