"""KV events both ways: vLLM's decoder and hashes fit tierd's events; tierd reads vLLM's publisher."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import msgspec
import zmq
from vllm.distributed import kv_events
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils

from tests.engines.heard import EVENTS
from tests.system.blocks import await_true
from tests.system.raw import RawClient
from tierd._proto import admin_pb2 as apb
from tierd.client import About, NamespaceSpec
from tierd.client.values import PutGroup
from tierd.events.payloads import END, Cleared, Removed, Stored, short_hash
from tierd.integrations.events import Subscriber, Whereabouts
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.store import EngineStore
from tierd.testing import Daemon

SIZE, BLOCKS, BYTES = 16, 5, 8192
SPEC = NamespaceSpec("m", SIZE, BYTES, adapter="lora", group="0")
HOST = """\
[[host]]
capacity = "8 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "16 MiB"
segment = "1 MiB"
"""
DECODER = msgspec.msgpack.Decoder(kv_events.KVEventBatch)


def chain(tokens: list[int]) -> list[bytes]:
    """vLLM's hashes of the blocks of a sequence."""
    kv_cache_utils.init_none_hash(sha256_cbor)
    names: list[bytes] = []
    for start in range(0, len(tokens), SIZE):
        parent = names[-1] if names else None
        names.append(kv_cache_utils.hash_block_tokens(sha256_cbor, parent, tokens[start : start + SIZE]))
    return names


def save(daemon: Daemon, tokens: list[int]) -> list[bytes]:
    """Saves through the engines' store, as an integration does, more blocks than it reserves at once."""
    names = chain(tokens)
    with EngineStore(Options(target=daemon.target), EngineFacts("vllm", "0", "test")) as store:
        space = store.open(SPEC)
        group = PutGroup(space, space.fold(names))
        pieces = [[np.full(BYTES, i % 256, np.uint8)] for i in range(len(names))]
        assert store.save(group, pieces, About(names, tokens=tokens)) == len(names)
    return names


def replayed(daemon: Daemon, start: int) -> list[tuple[int, bytes]]:
    """Asks as vLLM's subscribers do, with an empty frame and the first number; reads answers to the end."""
    found = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"ipc://{daemon.root}/events-replays")
        asking.send_multipart((b"", start.to_bytes(8, "big")))
        while asking.poll(10_000):
            empty, topic, number, payload = asking.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if number == END:
                return found
            found.append((int.from_bytes(number, "big"), payload))
    raise AssertionError("the replay has no end")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(HOST + EVENTS) as running:
        yield running


def test_vllm_reads_what_tierd_tells(daemon: Daemon) -> None:
    """vLLM's decoder reads the events that a vLLM would publish for the same blocks, under vLLM's hashes."""
    tokens = list(range(1000, 1000 + SIZE * 70))
    hashes = [kv_cache_utils.maybe_convert_block_hash(name) for name in save(daemon, tokens)]
    with RawClient(daemon.target) as raw:
        raw.call(raw.admin.Evict, apb.EvictRequest(tier="host.0"))
    events: list[object] = []

    def all_told() -> bool:
        events[:] = [e for _, payload in replayed(daemon, 0) for e in DECODER.decode(payload).events]
        return any(isinstance(event, kv_events.BlockRemoved) for event in events)

    await_true(all_told, "the removal is told")
    assert {DECODER.decode(payload).data_parallel_rank for _, payload in replayed(daemon, 0)} == {0}
    stored = [event for event in events if isinstance(event, kv_events.BlockStored)]
    assert [one for event in stored for one in event.block_hashes] == hashes
    assert [token for event in stored for token in event.token_ids] == tokens
    assert stored[0] == kv_events.BlockStored(
        block_hashes=stored[0].block_hashes,
        parent_block_hash=None,
        token_ids=tokens[: len(stored[0].token_ids)],
        block_size=SIZE,
        lora_id=None,
        medium=kv_events.MEDIUM_CPU,
        lora_name="lora",
        group_idx=0,
    )
    assert [event.parent_block_hash for event in stored[1:]] == [event.block_hashes[-1] for event in stored[:-1]]
    removed = [event for event in events if isinstance(event, kv_events.BlockRemoved)]
    assert sorted(one for event in removed for one in event.block_hashes) == sorted(hashes)
    assert {(event.medium, event.group_idx) for event in removed} == {("CPU", 0)}
    assert isinstance(events[0], kv_events.AllBlocksCleared)


def test_a_router_finds_vllms_blocks_in_tierd(daemon: Daemon) -> None:
    """With vLLM's hashes of a prompt a router finds in tierd's events the media that hold each block."""
    tokens = list(range(SIZE * BLOCKS))
    names = save(daemon, tokens)
    with RawClient(daemon.target) as raw:
        raw.call(raw.admin.Flush, apb.FlushRequest())
    beliefs = Whereabouts()
    with Subscriber(f"ipc://{daemon.root}/events", f"ipc://{daemon.root}/events-replays") as subscriber:
        for message in subscriber.catch_up():
            beliefs.apply(message.batch.events)
        held = frozenset({"CPU", "STORAGE"})

        def is_found() -> bool:
            for message in subscriber.poll(0.1):
                beliefs.apply(message.batch.events)
            return all(beliefs.of(short_hash(name)) == held for name in names)

        await_true(is_found, "every block is in memory and on the disk")


def test_tierd_reads_what_vllm_tells() -> None:
    """tierd's subscriber reads the batches of vLLM's publisher, and after a gap its replay."""
    ports = _free_ports(2)
    publisher = kv_events.ZmqEventPublisher(
        0, endpoint=f"tcp://*:{ports[0]}", replay_endpoint=f"tcp://127.0.0.1:{ports[1]}", topic="kv@pod@m"
    )
    stored = kv_events.BlockStored(
        block_hashes=[5, 6],
        parent_block_hash=4,
        token_ids=[1, 2],
        block_size=1,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None, ("salt",)],
        group_idx=3,
        session_id="s",
    )
    told = [stored, kv_events.BlockRemoved(block_hashes=[5], medium="GPU"), kv_events.AllBlocksCleared()]
    try:
        for event in told:
            publisher.publish(kv_events.KVEventBatch(ts=1.0, events=[event]))
        with Subscriber(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", topic="kv@") as subscriber:
            heard = []

            def is_heard() -> bool:
                publisher.publish(kv_events.KVEventBatch(ts=1.0, events=[kv_events.AllBlocksCleared()]))
                heard.extend(subscriber.poll(0.2))
                return len(heard) > 4

            await_true(is_heard, "what was missed came by the replay")
    finally:
        publisher.shutdown()
    assert [message.number for message in heard] == list(range(len(heard)))
    first = [event for message in heard[:3] for event in message.batch.events]
    assert first == [Stored((5, 6), 4, (1, 2), 1, "GPU", None, 3), Removed((5,), "GPU"), Cleared()]


def _free_ports(wanted: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(wanted)]
        return [one.getsockname()[1] for one in found]
