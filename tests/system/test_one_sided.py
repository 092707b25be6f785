"""One-sided gets: the client serves near blocks without a call and reports each get to the daemon.
If anything is in doubt, the client asks the daemon and never serves wrong bytes."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.depth import count
from tests.system.blocks import await_true
from tests.system.damaged import flip, pages
from tests.system.sdk import await_nothing_held, count_calls
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import Connection, connect
from tierd.client import Client, Group, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.client.blocks import copying, one_sided_get
from tierd.client.blocks.asking import Asking
from tierd.client.session import notices
from tierd.client.session.notices import UNASKED_LIMIT, Notices
from tierd.core.formats.directory import MIN_BLOCKS, Directory, directory_bytes, keys_of
from tierd.core.formats.meta import META_BYTES
from tierd.core.formats.model import BlockStatus
from tierd.errors import InvalidArgument, StaleHandle, TierdError
from tierd.server.session.hit_reports import LOOKED_UP, USED
from tierd.testing import chain, content_of

SPEC = NamespaceSpec(model="one-sided", tokens_per_block=16, block_bytes=8192)
TIGHT = 'nvme = []\n[[host]]\ncapacity = "1 MiB"\nsegment = "256 KiB"\neviction = "lru"\n'
BLOCKS, SEQUENCES = 8, 40
NOWHERE = chain(1 << 20, 1)
"""A lookup of it calls the daemon, which handles all earlier reports first."""
TOKENS = BLOCKS * SPEC.tokens_per_block
HELD = (1 << 20) // (BLOCKS * SPEC.block_bytes)
"""Sequences that fit in the tier."""
HOSTILE = count(test=100, nightly=3_000, weekly=30_000)
ROUNDS = count(test=1_500, nightly=50_000, weekly=500_000)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose last call counts as recent for 600 s, on slow machines too."""
    monkeypatch.setattr(notices, "NOTICE_S", 600.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of this process, by method."""
    return count_calls(monkeypatch)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(TIGHT) as running:
        yield running


def blocks_of(number: int) -> list[np.ndarray]:
    """The bytes of a sequence's blocks."""
    return [content_of(name, SPEC.block_bytes) for name in chain(number, BLOCKS)]


class Reader:
    """A client and its buffer for copies."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.space: OpenedNamespace = client.open_namespace(SPEC)
        self._out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)

    def put(self, number: int) -> None:
        self.client.put(self.space, chain(number, BLOCKS), blocks_of(number))

    def get(self, number: int) -> int:
        """The number of blocks served; asserts that each has the right bytes."""
        self._out[:] = 0
        got = self.client.get(self.space, chain(number, BLOCKS), out=self._out)
        assert all((self._out[i] == block).all() for i, block in enumerate(blocks_of(number)[: got.blocks])), number
        assert got.tokens == got.blocks * SPEC.tokens_per_block
        return got.blocks

    def known(self, number: int) -> None:
        """Puts a sequence, so that a get of it needs no call."""
        self.put(number)
        assert self.get(number) == BLOCKS


def test_what_is_near_is_got_without_a_call(daemon: Daemon, asked: Counter[str]) -> None:
    """The first get of another client's near sequence needs no call and returns the same result. It
    holds no lease. After UNASKED_LIMIT such calls the client asks the daemon again."""
    with Client(daemon.target) as client, Client(daemon.target) as other:
        reader, out = Reader(client), np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        Reader(other).put(1)
        asked.clear()
        client.lookup(reader.space, NOWHERE)
        alone = [client.get(reader.space, chain(1, BLOCKS), out=out) for _ in range(UNASKED_LIMIT)]
        assert asked == {"Lookup": 1}
        assert [(out[i] == block).all() for i, block in enumerate(blocks_of(1))] == [True] * BLOCKS
        assert alone == [client.get(reader.space, chain(1, BLOCKS), out=out)] * UNASKED_LIMIT
        assert asked == {"Lookup": 1, "Acquire": 1}
        await_nothing_held(daemon, after="gets that ask nobody")


def test_what_is_near_is_looked_up_without_a_call(daemon: Daemon, asked: Counter[str]) -> None:
    """A lookup of only near blocks needs no call and returns the same result; other lookups call."""
    with Client(daemon.target) as client, Client(daemon.target) as other:
        reader = Reader(client)
        Reader(other).put(1)
        said = [client.lookup(reader.space, chain(1, BLOCKS + more)) for more in (1, 0, 0, 0)]
        assert asked["Lookup"] == 1
        assert [found.tokens for found in said] == [TOKENS] * 4
        assert all(found.tier_tokens == said[0].tier_tokens for found in said)
        assert all((found.tier_of[0][:, :BLOCKS] == said[0].tier_of[0][:, :BLOCKS]).all() for found in said)


def test_lookups_without_a_call_are_counted_and_recorded(daemon: Daemon) -> None:
    """Lookups without a call are counted and recorded as lookups, not as gets."""
    with Client(daemon.target) as client, connect(daemon.target) as operator:
        reader = Reader(client)
        reader.put(1)
        operator.ask(pb.RecordStartRequest(name="looked"))
        before = _counted(operator)
        for _ in range(3):
            assert client.lookup(reader.space, chain(1, BLOCKS)).tokens == TOKENS
        client.lookup(reader.space, NOWHERE)
        await_true(
            lambda: _counted(operator)["tierd_lookups_total"] == before["tierd_lookups_total"] + 4, "all heard of"
        )
        assert _counted(operator)["tierd_gets_one_sided_total"] == before["tierd_gets_one_sided_total"]
        assert operator.ask(pb.RecordStopRequest()).requests == 4


def test_a_part_of_a_sequence_is_got_without_a_call(daemon: Daemon, asked: Counter[str]) -> None:
    """A get of part of a sequence, from any block on, needs no call."""
    with Client(daemon.target) as client:
        reader, names = Reader(client), chain(1, BLOCKS)
        reader.put(1)
        asked.clear()
        for first, stop in ((0, 3), (2, BLOCKS), (5, 6)):
            out = np.zeros((stop - first, SPEC.block_bytes), np.uint8)
            assert client.get(reader.space, names[first:stop], out=out).blocks == stop - first
            assert all((out[i] == blocks_of(1)[first + i]).all() for i in range(stop - first))
        assert not asked


@pytest.mark.parametrize("verify", ["first_hit", "sampled", "always"])
def test_every_such_get_verifies_every_byte(verify: str, asked: Counter[str]) -> None:
    """For every `verify` setting, a one-sided get detects a bit flip that follows good gets. It
    then calls the daemon, and all later gets serve the blocks before the bad one."""
    with Daemon(TIGHT + f'verify = "{verify}"\n') as daemon, Client(daemon.target) as client:
        reader, names = Reader(client), chain(1, BLOCKS)
        reader.known(1)
        assert [reader.get(1) for _ in range(3)] == [BLOCKS] * 3
        flip(pages(daemon, names, length=SPEC.block_bytes)[names[3].tobytes()], 4097)
        asked.clear()
        assert [reader.get(1) for _ in range(3)] == [3] * 3
        assert asked["Acquire"] >= 3


def test_a_farther_tier_has_what_a_near_page_has_lost(asked: Counter[str]) -> None:
    """If NVMe holds a block whose near page is corrupt, the same get serves the complete sequence."""
    with (
        Daemon(TIGHT.replace("nvme = []", "") + '[[nvme]]\ncapacity = "4 MiB"\nsegment = "512 KiB"\n') as daemon,
        Client(daemon.target) as client,
    ):
        reader, names = Reader(client), chain(1, BLOCKS)
        assert client.put(reader.space, names, blocks_of(1), durable=True).stored == BLOCKS
        flip(pages(daemon, names, length=SPEC.block_bytes)[names[3].tobytes()], 4097)
        assert [reader.get(1) for _ in range(2)] == [BLOCKS] * 2


def test_the_daemon_counts_them(daemon: Daemon) -> None:
    """The daemon counts each one-sided get as a hit of the tier, like a get that calls."""
    with Client(daemon.target) as client, connect(daemon.target) as operator:
        reader = Reader(client)
        reader.put(1)
        before = _counted(operator)
        for _ in range(5):
            assert reader.get(1) == BLOCKS
        client.lookup(reader.space, NOWHERE)
        name, hits = "tierd_gets_one_sided_total", 'tierd_tokens_hit_total{tier="host.0"}'
        await_true(lambda: _counted(operator)[name] == before[name] + 5, "all of them heard of")
        assert _counted(operator)[hits] - before[hits] == 5 * TOKENS


def test_a_page_that_its_writer_goes_on_writing_to(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is bad at both copies of a get is a miss, even if the daemon's check between was good."""
    with Client(daemon.target) as writer, Client(daemon.target) as client:
        reader, names = Reader(client), chain(1, 1)
        pages = writer.reserve(PutGroup(writer.open_namespace(SPEC), names))
        page = pages.buffer(0)[:]
        page[:] = content_of(names[0], SPEC.block_bytes)
        assert pages.commit().statuses.tolist() == [BlockStatus.READY]
        inner, calls = Asking._leased, list[Any]()

        def leased(self: Asking, *what: Any, doubted: Any = None) -> Any:
            calls.append(doubted)
            page[100] ^= 0xFF * (len(calls) == 2)
            try:
                return inner(self, *what, doubted=doubted)
            finally:
                page[100] ^= 0xFF * (len(calls) == 2)

        monkeypatch.setattr(Asking, "_leased", leased)
        page[100] ^= 0xFF
        out = np.zeros((1, SPEC.block_bytes), np.uint8)
        assert client.get(reader.space, names, out=out).blocks == 0
        assert len(calls) == 2


@pytest.mark.parametrize("shape", [(1, 1), (1, 31), (32,), (1, 33)])
def test_hashes_that_are_none(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Every verb refuses a Group whose hashes have a wrong shape, before it reads them."""
    with Client(daemon.target) as client:
        reader = Reader(client)
        reader.known(1)
        monkeypatch.setattr(one_sided_get, "_located", None)
        group, out = Group(reader.space, np.zeros(shape, np.uint8)), np.zeros(SPEC.block_bytes, np.uint8)
        for verb in (lambda: client.get(reader.space, group, out=out), lambda: client.lookup(group)):
            with pytest.raises(InvalidArgument, match="hashes"):
                verb()


def test_they_keep_what_they_read_in_memory(daemon: Daemon) -> None:
    """A sequence that one-sided gets read repeatedly is not evicted by puts of other sequences."""
    with Client(daemon.target) as client, Client(daemon.target) as other:
        reader, writer = Reader(client), Reader(other)
        reader.known(1)
        for number in range(2, 2 + 2 * HELD):
            assert reader.get(1) == BLOCKS
            client.lookup(reader.space, NOWHERE)
            writer.put(number)
        assert reader.get(1) == BLOCKS


def test_a_client_that_closes_is_heard(daemon: Daemon) -> None:
    """Reports that a client sends just before it closes are counted."""
    with connect(daemon.target) as operator:
        with Client(daemon.target) as client:
            reader = Reader(client)
            reader.put(1)
            for _ in range(5):
                assert reader.get(1) == BLOCKS
        await_true(lambda: _counted(operator)["tierd_gets_one_sided_total"] == 5, "all of them heard of")


def test_they_are_recorded(daemon: Daemon) -> None:
    """A recording contains one-sided gets as requests."""
    with Client(daemon.target) as client, connect(daemon.target) as operator:
        reader = Reader(client)
        reader.put(1)
        operator.ask(pb.RecordStartRequest(name="alone"))
        for _ in range(3):
            reader.get(1)
        client.lookup(reader.space, NOWHERE)
        await_true(lambda: _counted(operator)["tierd_gets_one_sided_total"] == 3, "all of them heard of")
        assert operator.ask(pb.RecordStopRequest()).requests == 3 + 1


def test_none_after_its_epoch(daemon: Daemon) -> None:
    """After an epoch ends, a one-sided get serves nothing of it; another client's lease reads on."""
    with Client(daemon.target) as client, Client(daemon.target) as other, connect(daemon.target) as operator:
        reader = Reader(client)
        reader.known(1)
        with other.acquire(other.open_namespace(SPEC), chain(1, BLOCKS)) as lease:
            operator.ask(pb.BumpEpochRequest(model=SPEC.model))
            with pytest.raises(StaleHandle):
                reader.get(1)
            assert lease.check() == BLOCKS


def test_none_of_what_scrub_found_bad(daemon: Daemon) -> None:
    """A page that scrub marked bad is not served, even if another client's lease pins it."""
    with Client(daemon.target) as client, Client(daemon.target) as other, connect(daemon.target) as operator:
        reader, names = Reader(client), chain(1, BLOCKS)
        reader.known(1)
        with other.acquire(other.open_namespace(SPEC), names):
            flip(pages(daemon, names, length=SPEC.block_bytes)[names[3].tobytes()], 4097)
            list(operator.follow(pb.ScrubRequest()))
            assert reader.get(1) == 3


def test_none_of_a_daemon_that_has_gone(daemon: Daemon) -> None:
    """A get does not serve from the mapped memory of a dead daemon."""
    with Client(daemon.target) as client:
        reader = Reader(client)
        reader.known(1)
        daemon.kill()
        with pytest.raises(TierdError):
            reader.get(1)


def test_none_when_the_daemon_was_not_heard_of_for_long(
    daemon: Daemon, asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without a recent answer calls the daemon; if the daemon is stopped, it serves nothing."""
    with Client(daemon.target) as client:
        reader = Reader(client)
        reader.known(1)
        monkeypatch.setattr(notices, "NOTICE_S", 0.0)
        asked.clear()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TierdError):
                client.get(reader.space, chain(1, BLOCKS), out=bytearray(BLOCKS * SPEC.block_bytes), timeout_s=0.2)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert asked == {"Acquire": 1}


def test_a_sequence_is_all_of_its_hashes(daemon: Daemon) -> None:
    """Two sequences with the same last block are distinct: each get serves the one it names."""
    with Client(daemon.target) as client:
        space, names = client.open_namespace(SPEC), chain(1, 3)
        for first in (0, 1):
            client.put(space, names[[first, 2]], [content_of(names[at], SPEC.block_bytes) for at in (first, 2)])
        for first in (0, 1, 0, 1):
            out = np.zeros((2, SPEC.block_bytes), np.uint8)
            assert client.get(space, names[[first, 2]], out=out).blocks == 2
            assert (out[0] == content_of(names[first], SPEC.block_bytes)).all()


def test_a_namespace_that_another_daemon_has_numbered(daemon: Daemon) -> None:
    """A namespace object that another daemon renumbered is opened again before use."""
    other = NamespaceSpec(model="another", tokens_per_block=16, block_bytes=SPEC.block_bytes)
    with Daemon(TIGHT) as elsewhere, Client(daemon.target) as client, Client(elsewhere.target) as stranger:
        reader, space, name = Reader(client), client.open_namespace(other), chain(1, 1)
        out = np.zeros((1, SPEC.block_bytes), np.uint8)
        for its, byte in ((reader.space, 1), (space, 2)):
            client.put(its, name, [np.full(SPEC.block_bytes, byte, np.uint8)])
            assert client.get(its, name, out=out).blocks == 1 and (out == byte).all()
        assert stranger.lookup(space, name).tokens == 0 and space.id == reader.space.id
        assert client.get(space, name, out=out).blocks == 1 and (out == 2).all()


def test_long_sequences_are_told_of_too(asked: Counter[str]) -> None:
    """A get of 512 blocks needs no call. One of 700 calls, because a report cannot carry its hashes."""
    with Daemon('nvme = []\n[[host]]\ncapacity = "32 MiB"\n') as daemon, Client(daemon.target) as client:
        space, blocks = client.open_namespace(SPEC), [bytes(SPEC.block_bytes)] * 700
        for count_of, calls in ((512, 0), (700, 3)):
            names, out = chain(count_of, count_of), bytearray(count_of * SPEC.block_bytes)
            client.put(space, names, blocks[:count_of])
            client.get(space, names, out=out)
            asked.clear()
            assert [client.get(space, names, out=out).blocks for _ in range(3)] == [count_of] * 3
            assert asked["Acquire"] == calls


def test_the_tiers_of_its_blocks_are_told() -> None:
    """When several host tiers hold the blocks, a one-sided get returns the same tiers as one that calls."""
    with Daemon(TIGHT + TIGHT.partition("\n")[2]) as daemon, Client(daemon.target) as client:
        space, out = client.open_namespace(SPEC), bytearray(BLOCKS * SPEC.block_bytes)
        client.put(space, chain(1, BLOCKS), blocks_of(1))
        got = [client.get(space, chain(1, BLOCKS), out=out) for _ in range(3)]
        assert got[0] == got[1] == got[2] and min(got[0].tier_tokens) > 0


def test_none_of_a_daemon_that_goes_during_the_copy(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A get fails if the daemon dies during the copy, since the client cannot report it."""
    with Client(daemon.target) as client:
        reader, copy = Reader(client), copying.sum_and_copy
        reader.known(1)

        def copied(*given: Any, **how: Any) -> list[bytes]:
            sums = copy(*given, **how)
            if not daemon.has_ended:
                daemon.kill()
            return sums

        monkeypatch.setattr(copying, "sum_and_copy", copied)
        with pytest.raises(TierdError):
            reader.get(1)


def test_a_mailbox_that_is_full(daemon: Daemon, asked: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the client cannot report a get, it calls the daemon, which serves the blocks."""
    with Client(daemon.target) as client:
        reader = Reader(client)
        reader.known(1)
        monkeypatch.setattr(Notices, "report_hit", lambda _self, _group: False)
        asked.clear()
        assert reader.get(1) == BLOCKS and asked == {"Acquire": 1}


@pytest.mark.parametrize("word", [b"", b"\x01", bytes(100), b"\xff" * 64, b"\x08\xff\xff\xff\xff\x0f"])
@pytest.mark.parametrize("kind", [USED, LOOKED_UP], ids=["used", "looked up"])
def test_words_about_nothing(daemon: Daemon, kind: bytes, word: bytes) -> None:
    """A malformed report, or one of another session's namespace, is ignored and ends nothing."""
    with Client(daemon.target) as client:
        reader = Reader(client)
        reader.known(1)
        link = client._connector.link
        assert link is not None and link.session is not None and link.session.notices.socket is not None
        link.session.notices.socket.send(kind + word)
        client.lookup(reader.space, NOWHERE)
        assert reader.get(1) == BLOCKS and "Traceback" not in daemon.log


def test_right_bytes_while_pages_change_hands(daemon: Daemon, asked: Counter[str]) -> None:
    """While two clients put and get three times the tier's capacity, every counted block has the
    right bytes. At least a fifth of the gets need no call."""
    chance, gets = random.Random(3), 0
    with Client(daemon.target) as one, Client(daemon.target) as other:
        readers = [Reader(one), Reader(other)]
        for _ in range(ROUNDS):
            reader, number = chance.choice(readers), min(int(chance.expovariate(0.3)), SEQUENCES)
            if chance.random() < 0.2:
                reader.put(number)
            else:
                reader.get(number)
                gets += 1
    assert asked["Acquire"] < 0.8 * gets


def test_right_bytes_where_pages_are_reused_in_the_middle(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A get does not serve a page that was reused between its copy and its second check."""
    with Client(daemon.target) as client, Client(daemon.target) as other:
        reader, writer = Reader(client), Reader(other)
        reader.known(1)
        copy = copying.sum_and_copy

        def copied(*given: Any, **how: Any) -> list[bytes]:
            sums = copy(*given, **how)
            with monkeypatch.context() as inner:
                inner.setattr(copying, "sum_and_copy", copy)
                for number in range(2, 2 + 2 * HELD):
                    writer.put(number)
            return sums

        with monkeypatch.context() as late:
            late.setattr(copying, "sum_and_copy", copied)
            assert reader.get(1) == 0


def test_whatever_the_directory_says(daemon: Daemon) -> None:
    """A directory with wrong, absent or swapped places costs only a call, never wrong bytes or an error."""
    chance = np.random.default_rng(5)
    with Client(daemon.target) as client, Client(daemon.target) as other:
        reader, writer = Reader(client), Reader(other)
        for number in range(4):
            writer.put(number)
        session = client._connector.link.session
        true = session.directory
        words = np.zeros(directory_bytes(MIN_BLOCKS) // 8, np.uint64)
        for round_ in range(HOSTILE):
            wild = Directory.new(words)
            wild.note_runs(range(reader.space.id, reader.space.id + 1), runs=True)
            for number in range(4):
                keys = keys_of(reader.space.id, chain(number, BLOCKS))
                hints = [true.place(reader.space.id, name.tobytes()) for name in chain(number, BLOCKS)]
                places = np.array([hint and hint[0] << 24 | hint[1] for hint in hints], np.uint64)
                chance.shuffle(places)
                places[chance.integers(BLOCKS)] = chance.integers(1 << 63, dtype=np.uint64) >> np.uint64(
                    chance.integers(64)
                )
                wild.add(keys, places)
            session.directory = wild
            assert reader.get(round_ % 4) == BLOCKS
            assert client.lookup(reader.space, chain(round_ % 4, BLOCKS)).tokens == TOKENS


def test_whatever_the_catalogue_says(daemon: Daemon) -> None:
    """Corrupt catalogue entries and slice tables cost only a call, never wrong bytes or an error."""
    chance = np.random.default_rng(6)
    with Client(daemon.target) as client:
        reader = Reader(client)
        reader.known(1)
        session = client._connector.link.session
        for round_ in range(HOSTILE):
            for place, segment in list(session.segments._mapped.items()):
                metas, tables = (np.frombuffer(its, np.uint8).copy() for its in (segment.metas, segment.tables))
                for raw, width in ((metas, META_BYTES), (tables, 8)) if round_ % 2 else ((metas, META_BYTES),):
                    rows = raw.reshape(-1, width)
                    at = chance.integers(width, size=4)
                    rows[:, at] = chance.integers(256, size=(len(rows), 4), dtype=np.uint8)
                session.segments.add(place, replace(segment, metas=memoryview(metas), tables=memoryview(tables)))
            assert reader.get(1) in (0, BLOCKS)
            assert client.lookup(reader.space, chain(1, BLOCKS)).tokens == TOKENS
            session.unmap()


def _counted(operator: Connection) -> Counter[str]:
    return Counter(operator.ask(pb.StatusRequest()).counters)
