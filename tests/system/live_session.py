"""A model of a live session's namespaces, leases and reservations, for messages that name real
things.

`LiveSession.request` makes a good request for any RPC, even a new one. It fills fields by their
names from the session's state. `needs` lists the good calls that must come first, and `learn` reads
replies. The caller sends the messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from tests.system.mutation import Mutator
from tests.system.raw import put_blocks
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.checksum import record_checksum
from tierd.core.formats.model import COMMIT_BLOCK, HANDLE, PUT_BLOCK, ROOT
from tierd.tcp.codecs import Lz4Planes
from tierd.testing import chain, content_of

SERVICES = [*pb.DESCRIPTOR.services_by_name.values(), *apb.DESCRIPTOR.services_by_name.values()]
METHODS: list[MethodDescriptor] = [method for service in SERVICES for method in service.methods]
"""Every RPC of the proto files."""

BLOCK_BYTES, TOKENS, RANKS = 4096, 16, 2
LZ4 = Lz4Planes()
HELD_LIMIT = 8
"""Limit of the leases, and of the reservations, that the session keeps."""
SEQUENCES, LENGTH = 12, 6
"""Number and length of the block chains in requests."""
SPECS = [
    pb.OpenNamespaceRequest(
        model=f"fuzzed-{i}",
        tokens_per_block=TOKENS,
        block_bytes=BLOCK_BYTES,
        weights_digest="w",
        adapter="a",
        group="g",
        salt="s",
        rank_count=RANKS,
        geometry=pb.Geometry(layers=2, kv_heads=2, head_dim=8, dtype="f16", layout="NHD"),
    )
    for i in range(3)
]
Call = tuple[str, list[Message]]
"""Name of an RPC and its request: one message, or the chunks of a Put."""


@dataclass(frozen=True)
class Reserved:
    """A reservation: its number and the hashes of its blocks."""

    number: int
    names: np.ndarray


@dataclass
class LiveSession:
    """The state of one session. mutator: also chooses from this state."""

    mutator: Mutator
    namespaces: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=lambda: [999, 0])
    leases: list[tuple[int, int]] = field(default_factory=list)  # number and blocks
    reservations: list[Reserved] = field(default_factory=list)
    gone: list[int] = field(default_factory=lambda: [1, 0])
    stored: list[str] = field(default_factory=list)  # hexadecimal hashes, the newest ones
    fresh: int = 1000

    # -- good calls

    def needs(self, method: str) -> Iterator[Call]:
        """Calls to make first, so that the request can name real things. `learn` must read each reply."""
        if len(self.namespaces) < len(SPECS):
            yield from (("OpenNamespace", [spec]) for spec in SPECS)
        if method in ("Release", "ReportAttention", "Ask") and len(self.leases) < 2:
            yield from self._leased()
        if method in ("Commit", "Abort", "Ask") and len(self.reservations) < 2:
            yield "Reserve", [self._reserve()]
        if not self.stored or self.chance(0.02):
            yield "Put", self.chunks()
        if len(self.leases) > HELD_LIMIT:
            yield "Release", [pb.ReleaseRequest(leases=[number for number, _ in self.leases[:-2]])]
        for held in self.reservations[:-HELD_LIMIT]:
            yield "Abort", [pb.AbortRequest(reservation=held.number)]

    def learn(self, method: str, request: Any, reply: Any) -> None:
        """Updates the state after a successful call."""
        if method == "Ask":
            self._learn_answer(request, reply)
            return
        if method == "OpenNamespace" and request in SPECS and reply.namespace not in self.namespaces:
            self.namespaces.append(reply.namespace)
        elif method in ("Acquire", "Commit") and reply.lease:
            blocks = reply.groups[0].count if method == "Acquire" and reply.groups else 1
            self.leases.append((reply.lease, blocks))
        elif method == "Reserve" and reply.reservation:
            names = np.frombuffer(request.groups[0].blocks, dtype=PUT_BLOCK)["hash"]
            self.reservations.append(Reserved(reply.reservation, names))
        elif method == "Put":
            self.stored = [*self.stored[-6:], *(name.tobytes().hex() for name in _names_of(request))]
        if method == "Release":
            self.gone += [number for number, _ in self.leases if number in request.leases]
            self.leases = [held for held in self.leases if held[0] not in request.leases]
        elif method in ("Abort", "Commit") and not getattr(request, "keep_open", False):
            self.gone.append(request.reservation)
            self.reservations = [held for held in self.reservations if held.number != request.reservation]
        del self.gone[:-20]

    def _learn_answer(self, ask: pb.Ask, answer: pb.Answer) -> None:
        found = next((each for each in METHODS if each.name == ask.method and each.input_type.name in dir(pb)), None)
        if found is None or answer.status:
            return
        asked, told = found.input_type._concrete_class, found.output_type._concrete_class
        self.learn(found.name, asked.FromString(ask.message), told.FromString(answer.message))

    def failed(self, method: str, request: Any) -> None:
        """Forgets a reservation that a refused commit named, and at times the namespaces of a refused call."""
        if method == "Commit":
            self.reservations = [held for held in self.reservations if held.number != request.reservation]
        for group in getattr(request, "groups", ()):
            if group.namespace in self.namespaces and self.chance(0.2):
                self.namespaces.remove(group.namespace)
                self.ended.append(group.namespace)

    def chance(self, share: float) -> bool:
        """True with this probability."""
        return self.mutator.random.random() < share

    def request(self, method: MethodDescriptor) -> list[Message]:
        """A request with good values, or with formerly good ones."""
        if method.input_type is pb.PutChunk.DESCRIPTOR:
            return self.chunks()
        made = getattr(self, f"_{method.input_type.name}", None)
        return [made() if made else self._by_names(method.input_type)]

    def chunks(self) -> list[Message]:
        """A good Put: a sequence of one to three blocks, each in two chunks, half of the time encoded."""
        names, made, is_encoded = self._names(), list[Any](), self.chance(0.5)
        names = names[: self.mutator.random.randrange(1, 4)]
        for index, name in enumerate(names):
            data, half = content_of(name, BLOCK_BYTES).tobytes(), BLOCK_BYTES // 2
            for offset in (0, half):
                part = data[offset : offset + half]
                made.append(pb.PutChunk(index=index, offset=offset, data=part, checksum=record_checksum(part)))
                if is_encoded:
                    made[-1].data, made[-1].plain_length = LZ4.encode(part), half
        group = pb.PutGroup(namespace=self._namespace(), rank=1, parent=ROOT, blocks=put_blocks(names).tobytes())
        made[0].group.CopyFrom(group)
        made[0].codec = LZ4.name if is_encoded else ""
        return made

    # -- makers of messages that need more than their fields' names

    def _Ask(self) -> Message:  # noqa: N802
        alone = [
            each
            for each in pb.DESCRIPTOR.services_by_name["Cache"].methods
            if not (each.client_streaming or each.server_streaming)
        ]
        method = self.mutator.random.choice(alone)
        message = self.request(method)[0].SerializeToString()
        return pb.Ask(
            method=method.name, message=message, timeout_us=self.mutator.random.choice((0, 100_000)), request="r"
        )

    def _LookupRequest(self) -> Message:  # noqa: N802  # the message's name
        computed = pb.Computed(request=b"r", tokens=TOKENS, load_s=1.0, compute_s=0.5)
        return pb.LookupRequest(groups=self._groups(), computed=[computed] * self.mutator.random.randrange(2))

    def _ExplainRequest(self) -> Message:  # noqa: N802
        block = self.mutator.random.choice(self.stored or ["00"])[: self.mutator.random.choice((1, 12, 64))]
        return self.mutator.random.choice(
            (
                apb.ExplainRequest(last=5, misses=self.chance(0.5)),
                apb.ExplainRequest(request="r"),
                apb.ExplainRequest(block=block),
                apb.ExplainRequest(hashes=self._names().tobytes(), namespace=self._namespace()),
            )
        )

    def _AcquireRequest(self) -> Message:  # noqa: N802
        return pb.AcquireRequest(groups=self._groups(), tier=pb.TIER_KIND_HOST)

    def _PrefetchRequest(self) -> Message:  # noqa: N802
        return pb.PrefetchRequest(groups=self._groups(), tier=pb.TIER_KIND_HOST)

    def _GetRequest(self) -> Message:  # noqa: N802
        codec = self.mutator.random.choice(("", LZ4.name))
        return pb.GetRequest(group=self._group(1), first=self.mutator.random.randrange(3), codec=codec)

    def _OpenNamespaceRequest(self) -> Message:  # noqa: N802
        made = pb.OpenNamespaceRequest()
        made.CopyFrom(self.mutator.random.choice(SPECS))
        return made

    def _ReserveRequest(self) -> Message:  # noqa: N802
        return self._reserve()

    def _CommitRequest(self) -> Message:  # noqa: N802
        held = self.mutator.random.choice(self.reservations) if self.reservations else Reserved(1, chain(1, 2))
        request = pb.CommitRequest(reservation=held.number, lease=self.chance(0.3), keep_open=self.chance(0.3))
        request.durability = pb.DURABILITY_DURABLE if self.chance(0.02) else pb.DURABILITY_MEMORY
        if self.chance(0.8):
            request.blocks.blocks = _commit_blocks(held).tobytes()
        return request

    def _AbortRequest(self) -> Message:  # noqa: N802
        number = self.reservations[0].number if self.reservations and self.chance(0.7) else self._old()
        return pb.AbortRequest(reservation=number)

    def _ReleaseRequest(self) -> Message:  # noqa: N802
        number = self.leases[0][0] if self.leases and self.chance(0.7) else self._old()
        return pb.ReleaseRequest(leases=[number, self._old()])

    def _ReportAttentionRequest(self) -> Message:  # noqa: N802
        number, blocks = self.mutator.random.choice(self.leases) if self.leases else (self._old(), 1)
        return pb.ReportAttentionRequest(lease=number, group=0, mass=np.ones(blocks, dtype="<f4").tobytes())

    # -- parts

    def _by_names(self, message: Any) -> Message:
        made = message._concrete_class()
        for part in message.fields:
            self._fill(made, part)
        return made

    def _fill(self, made: Any, part: FieldDescriptor) -> None:
        if part.message_type is not None or part.type == FieldDescriptor.TYPE_BOOL:
            return
        values = self._values(part)
        if part.is_repeated:
            getattr(made, part.name).extend(self.mutator.random.sample(values, self.mutator.random.randrange(3)))
        else:
            setattr(made, part.name, self.mutator.random.choice(values))

    def _values(self, part: FieldDescriptor) -> list[Any]:
        hexes = self.stored or ["00"]
        known: dict[str, list[Any]] = {
            "hash": hexes,
            "hashes": [*hexes, hexes[0][:12]],
            "hash_prefix": ["", hexes[0][:6]],
            "tier": ["", "host.0", "nvme.0"],
            "sort": ["", "recent", "-hits", "position", "bytes"],
            "model": [spec.model for spec in SPECS],
            "namespace": [0, self._namespace()],
            "deadline_s": [0.001, 0.002],
        }
        zero = {FieldDescriptor.TYPE_STRING: ["", "host.0"], FieldDescriptor.TYPE_BYTES: [b"", bytes(32)]}
        return known.get(part.name) or zero.get(part.type) or [0, 1, 5]

    def _leased(self) -> Iterator[Call]:
        chunks: list[Any] = self.chunks()
        yield "Put", chunks
        wanted = pb.Group(
            namespace=chunks[0].group.namespace, ranks=[1], hashes=_names_of(chunks[0]).tobytes(), need=pb.NEED_PREFIX
        )
        yield "Acquire", [pb.AcquireRequest(groups=[wanted], tier=pb.TIER_KIND_HOST)]

    def _groups(self) -> list[pb.Group]:
        return [self._group(self.mutator.random.randrange(RANKS)) for _ in range(self.mutator.random.choice((1, 1, 2)))]

    def _group(self, rank: int) -> pb.Group:
        names = self._names()
        return pb.Group(
            namespace=self._namespace(),
            ranks=[rank],
            hashes=names.tobytes(),
            tokens_per_block=TOKENS,
            tokens=TOKENS * len(names) - self.mutator.random.choice((0, 0, 3)),
            need=self.mutator.random.choice((pb.NEED_PREFIX, pb.NEED_PREFIX, pb.NEED_LAST_TOKENS, pb.NEED_LAST_STATE)),
            need_tokens=self.mutator.random.choice((0, TOKENS)),
            request=self.mutator.random.choice((b"", b"r")),
        )

    def _reserve(self) -> pb.ReserveRequest:
        self.fresh += 1
        names = chain(self.fresh, 3) if self.chance(0.7) else self._names()
        groups = [
            pb.PutGroup(namespace=self._namespace(), parent=ROOT, position=0, blocks=put_blocks(names).tobytes()),
            pb.PutGroup(namespace=self._namespace(), rank=1, blocks=put_blocks(np.zeros((2, 32), np.uint8)).tobytes()),
        ]
        return pb.ReserveRequest(groups=groups[: self.mutator.random.choice((1, 1, 2))], tier=pb.TIER_KIND_HOST)

    def _namespace(self) -> int:
        known = self.namespaces if self.namespaces and self.chance(0.95) else self.ended
        return self.mutator.random.choice(known)

    def _names(self) -> np.ndarray:
        return chain(self.mutator.random.randrange(SEQUENCES), LENGTH)

    def _old(self) -> int:
        return self.mutator.random.choice(self.gone)


def stored_handles(reply: Any) -> np.ndarray:
    """HANDLE of every block of an AcquireReply."""
    return np.frombuffer(b"".join(group.handles for group in reply.groups), dtype=HANDLE)


def _names_of(first: Any) -> np.ndarray:
    """Hashes of the blocks that the first chunk of a Put names."""
    blocks = first.group.blocks
    return np.frombuffer(blocks[: len(blocks) // PUT_BLOCK.itemsize * PUT_BLOCK.itemsize], dtype=PUT_BLOCK)["hash"]


def _commit_blocks(held: Reserved) -> np.ndarray:
    blocks = np.zeros(min(2, len(held.names)), dtype=COMMIT_BLOCK)
    blocks["hash"], blocks["index"] = held.names[: len(blocks)], np.arange(len(blocks))
    blocks["hash"][~blocks["hash"].any(axis=1)] = chain(held.number % 1000, 1)[0]
    blocks["position"], blocks["tokens"], blocks["length"] = np.arange(len(blocks)), TOKENS, BLOCK_BYTES
    return blocks
