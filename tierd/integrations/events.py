"""KV events as a router receives them, from tierd and from engines of the same format.

`Subscriber` follows one publisher and closes gaps by replays; `Whereabouts` records which media
hold a block. The format is in tierd/events/payloads.py; choosing a worker is not done here. Batches
come once and in order. A "cleared" event replaces a batch that cannot be recovered, so that no
router keeps stale blocks. Every wait has a timeout. Needs pyzmq: the extra `events`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

import zmq

from tierd.events.payloads import END, Batch, Cleared, Event, Hash, Stored, decode

REPLAY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a publisher, whose messages have numbers that rise by one."""

    number: int
    topic: str
    batch: Batch


class Subscriber:
    """Follows one publisher; a context manager for one thread at a time.

    address, replay: as `events.bind` and `events.replay_bind`. topic: the prefix of wanted topics.
    Without `replay`, gaps clear the state, and it starts with the next message. With it, it starts
    with the messages that the publisher kept. Raises CorruptRecord for a malformed event.
    """

    def __init__(
        self, address: str, replay: str = "", *, topic: str = "", replay_timeout_s: float = REPLAY_TIMEOUT_S
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._socket.connect(address)
        self._replay, self._replay_timeout_s = replay, replay_timeout_s
        self._expected = 0
        self._time_s = 0.0

    def poll(self, timeout_s: float) -> list[Message]:
        """Messages received within the timeout: at least one unless it expires, after any that it had missed."""
        if not self._socket.poll(max(0, round(timeout_s * 1000))):
            return []
        return list(self._received())

    def catch_up(self) -> list[Message]:
        """Kept messages not seen yet. None without a replay address or an answer."""
        found = list(self._replayed(None)) if self._replay else []
        self._note(found)
        return found

    def close(self) -> None:
        """Ends."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _received(self) -> Iterator[Message]:
        topic, number, payload = self._socket.recv_multipart()
        message = _message(topic, number, payload)
        if message.number < self._expected:
            if message.batch.time_s <= self._time_s:
                return  # seen in a replay
            self._expected = 0  # the publisher restarted and counts from its own beginning
            yield _cleared(message)
        missed = list(self._missed(message)) if message.number > self._expected else []
        self._note([message])
        yield from [*missed, message]

    def _missed(self, message: Message) -> Iterator[Message]:
        """The messages before this one; "cleared" replaces those that cannot be recovered."""
        found = list(self._replayed(message.number)) if self._replay else []
        numbers = [one.number for one in found]
        if numbers[-1:] != [message.number - 1] or numbers != list(range(numbers[0], message.number)):
            yield _cleared(message)
        elif numbers[0] > self._expected and found[0].batch.events != (Cleared(),):
            yield _cleared(message)
            yield from found
        else:
            yield from found

    def _replayed(self, stop: int | None) -> Iterator[Message]:
        """From the expected number on, below `stop`."""
        deadline = time.monotonic() + self._replay_timeout_s
        with self._context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.RCVHWM, 0)
            asking.setsockopt(zmq.IPV6, int("[" in self._replay))
            asking.connect(self._replay)
            asking.send_multipart((b"", self._expected.to_bytes(8, "big")))
            while asking.poll(max(0, round((deadline - time.monotonic()) * 1000))):
                _, topic, number, payload = asking.recv_multipart()
                if number == END:
                    return
                if stop is None or int.from_bytes(number, "big") < stop:
                    yield _message(topic, number, payload)

    def _note(self, messages: list[Message]) -> None:
        if messages:
            self._expected, self._time_s = messages[-1].number + 1, messages[-1].batch.time_s


@dataclass
class Whereabouts:
    """The media that hold each block, according to one publisher."""

    media: dict[Hash, set[str]] = field(default_factory=dict)

    def apply(self, events: Iterable[Event]) -> None:
        """In order."""
        for event in events:
            if isinstance(event, Cleared):
                self.media.clear()
            elif isinstance(event, Stored):
                for one in event.hashes:
                    self.media.setdefault(one, set()).add(event.medium or "")
            else:
                for one in event.hashes:
                    self._forget(one, event.medium or "")

    def of(self, block: Hash) -> frozenset[str]:
        """The media that hold a block."""
        return frozenset(self.media.get(block, ()))

    def _forget(self, block: Hash, medium: str) -> None:
        held = self.media.get(block, set())
        held.discard(medium)
        if not held:
            self.media.pop(block, None)


def _message(topic: bytes, number: bytes, payload: bytes) -> Message:
    return Message(int.from_bytes(number, "big"), topic.decode(errors="replace"), decode(payload))


def _cleared(before: Message) -> Message:
    return Message(max(0, before.number - 1), before.topic, Batch(before.batch.time_s, (Cleared(),), before.batch.rank))
