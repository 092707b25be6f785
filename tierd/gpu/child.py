"""The inside of the GPU process: verbs, and the threads that carry them out.

A request becomes a call of slabs, hosts, copies, sums or direct reads, and its result an answer.
The answer is sent after the work has ended. Every piece is checked against its slab and host memory
before a byte moves. When the GPU's context is lost, the process reports it and ends, since it can
do no more work.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

import numpy as np

from tierd.errors import TierdError, TierFailed
from tierd.gpu.coding import Coder
from tierd.gpu.copies import Copies
from tierd.gpu.device import Device, Lane
from tierd.gpu.direct import DirectReads
from tierd.gpu.hosts import Hosts
from tierd.gpu.protocol import Coding, Inbox, Message, frame, pack_sums, unpack_pieces
from tierd.gpu.runs import Runs, coalesced
from tierd.gpu.slabs import Slabs
from tierd.gpu.sums import Sums, open_sums

THREADS = 8
"""Requests carried out at one time; they mostly wait for the GPU."""
EXIT_LOST, EXIT_BROKEN = 3, 4
"""Exit statuses: the context was lost; a fault of this program, printed to stderr."""

Body = dict[str, Any]


class Engine:
    """State of one GPU here, and a method for each verb. Raises the errors that are answered."""

    def __init__(self, ordinal: int) -> None:
        """Raises Unsupported, Overloaded, TierFailed."""
        self.device = Device(ordinal)
        self.lane = Lane(self.device)
        self.slabs, self.hosts = Slabs(self.device, self.lane), Hosts(self.device)
        self.copies = Copies(self.device)
        self.sums: Sums = open_sums(self.device, self.copies)
        self.direct = DirectReads(self.device, self.slabs, self.sums)
        self.coder = Coder(self.device, self.slabs, self.hosts.regions, copies=self.copies, sums=self.sums)

    def facts(self) -> Body:
        """As GpuFacts."""
        return asdict(self.device.facts(hashes=self.sums.kind, gather_bytes=self.copies.gather_bytes))

    def copy(self, packed: bytes, *, to_device: bool) -> Body:
        """load or store; a load answers the sums of the bytes that arrived."""
        pieces = unpack_pieces(packed)
        with self.slabs.regions.used(pieces) as slabs, self.hosts.regions.used(pieces) as hosts:
            here, there = (slabs, hosts) if to_device else (hosts, slabs)
            lengths = pieces["length"].astype(np.uint64)
            owners = pieces["slab"].astype(np.uint64) << np.uint64(32) | pieces["host"]
            runs = coalesced(Runs(here.addresses, there.addresses, lengths), owners)
            self.copies.run(runs, to_device=to_device, is_direct=hosts.is_direct)
            return pack_sums(self.sums.of(slabs.addresses, pieces)) if to_device else {}

    def copy_coded(self, packed: bytes, coding: Body, *, to_device: bool) -> Body:
        """load_coded or store_coded."""
        pieces, how = unpack_pieces(packed), Coding(**coding)
        if to_device:
            return pack_sums(self.coder.load(pieces, how))
        done = self.coder.store(pieces, how)
        return pack_sums(done.tables) | {"errors": done.errors.tobytes()}

    def sums_of(self, packed: bytes) -> Body:
        """sums."""
        pieces = unpack_pieces(packed)
        with self.slabs.regions.used(pieces) as slabs:
            return pack_sums(self.sums.of(slabs.addresses, pieces))

    def is_lost(self) -> bool:
        """Whether the GPU does no more work, or its state is unknown."""
        return self.device.is_lost or not self.lane.is_alive()

    def close(self) -> None:
        """Release everything, after all copies have ended."""
        self.direct.end_all()
        self.slabs.regions.end_all()
        self.hosts.regions.end_all()
        for part in (self.direct, self.coder, self.sums, self.copies, self.lane, self.device):
            part.close()


class Child:
    """Serves one daemon over one socket until that ends."""

    def __init__(self, peer: socket.socket, ordinal: int) -> None:
        self._peer, self._ordinal = peer, ordinal
        self._sending = threading.Lock()
        # The other end bounds it, by its limit of requests in flight.
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._verbs: dict[str, Callable[[Message], Body]] = {
            "begin": self._begin,
            "adopt": self._adopt,
            "make": self._make,
            "drop": lambda asked: self._ended(self._ready().slabs.drop, asked.body["slab"]),
            "attach": self._attach,
            "detach": lambda asked: self._ended(self._ready().hosts.detach, asked.body["host"]),
            "load": lambda asked: self._ready().copy(asked.body["pieces"], to_device=True),
            "store": lambda asked: self._ready().copy(asked.body["pieces"], to_device=False),
            "load_coded": lambda asked: self._coded(asked, to_device=True),
            "store_coded": lambda asked: self._coded(asked, to_device=False),
            "sums": lambda asked: self._ready().sums_of(asked.body["pieces"]),
            "probe": lambda asked: {"way": self._ready().direct.probe(_descriptor(asked), asked.body["by"])},
            "open_file": self._open_file,
            "close_file": lambda asked: self._ended(self._ready().direct.close_file, asked.body["file"]),
            "read": lambda asked: self._ready().direct.read(asked.body["reads"]),
        }

    def serve(self) -> None:
        """Serve until the other end is gone. Any other error in a thread ends the process."""
        threading.excepthook = _broken
        for number in range(THREADS):
            threading.Thread(target=self._work, name=f"tierd-gpu-{number}", daemon=True).start()
        inbox = Inbox()
        while not inbox.is_ended:
            for message in inbox.receive(self._peer):
                self._requests.put(message)

    def _work(self) -> NoReturn:
        while True:
            asked = self._requests.get()
            try:
                answer = Message(self._verbs[asked.body["verb"]](asked))
            except TierdError as error:
                answer = Message({"error": [type(error).__name__, str(error)]})
            self._answer(asked, answer)

    def _answer(self, asked: Message, answer: Message) -> None:
        asked.close()
        if "error" in answer.body and self._engine is not None and self._engine.is_lost():
            # No answer: the GPU's work ends only with this process, and its memory may be reused
            # only then.
            self._send({"lost": answer.body["error"][1]}, [])
            os._exit(EXIT_LOST)
        answer.descriptors = answer.body.pop("descriptors", [])
        self._send(answer.body | {"id": asked.body["id"]}, answer.descriptors)
        answer.close()

    def _send(self, body: Body, descriptors: list[int]) -> None:
        packed = memoryview(frame(body, descriptors=len(descriptors)))
        with self._sending:
            sent = socket.send_fds(self._peer, [packed], descriptors)
            if sent < len(packed):  # sending zero bytes would be an error, once the other end has all and is gone
                self._peer.sendall(packed[sent:])

    def _ready(self) -> Engine:
        """The engine, with the GPU's context set in this thread, which may lack it."""
        assert self._engine, "begin comes first"
        self._engine.device.enter()
        return self._engine

    def _begin(self, _: Message) -> Body:
        self._engine = Engine(self._ordinal)
        return {"facts": self._engine.facts()}

    def _adopt(self, asked: Message) -> Body:
        self._ready().slabs.adopt(asked.body["slab"], _descriptor(asked), asked.body["length"])
        return {}

    def _make(self, asked: Message) -> Body:
        return {"descriptors": [self._ready().slabs.make(asked.body["slab"], asked.body["length"])]}

    def _attach(self, asked: Message) -> Body:
        body = asked.body
        return {"notices": self._ready().hosts.attach(body["host"], _descriptor(asked), body["length"])}

    def _coded(self, asked: Message, *, to_device: bool) -> Body:
        return self._ready().copy_coded(asked.body["pieces"], asked.body["coding"], to_device=to_device)

    def _open_file(self, asked: Message) -> Body:
        self._ready().direct.open_file(asked.body["file"], _descriptor(asked))
        return {}

    @staticmethod
    def _ended(end: Callable[[int], None], number: int) -> Body:
        end(number)
        return {}


def _descriptor(asked: Message) -> int:
    if not asked.descriptors:
        raise TierFailed("GPU process: a descriptor did not arrive, the process has too many open; raise LimitNOFILE")
    return asked.descriptors[0]


def _broken(failed: threading.ExceptHookArgs) -> NoReturn:
    """End the process; a daemon that is gone is no fault."""
    if not issubclass(failed.exc_type, BrokenPipeError | ConnectionResetError):
        threading.__excepthook__(failed)
    os._exit(EXIT_BROKEN)
