"""Consecutive puts: pages of the next puts are reserved while one copies; results are unchanged."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.depth import count, report
from tests.system.blocks import await_true
from tests.system.sdk import NOTHING, await_nothing_held, count_calls, empty, held
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.client import Client, Group, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.client.blocks import page_grants, writing
from tierd.client.transport.local import LocalTransport
from tierd.client.transport.local_rpc import Line
from tierd.core.formats.model import BlockStatus
from tierd.core.requests.puts import AHEAD_SHARE
from tierd.errors import InvalidArgument, RetryError, StaleHandle
from tierd.testing import chain, content_of

SPEC = NamespaceSpec(model="spares", tokens_per_block=16, block_bytes=256 << 10)
BLOCKS = 8
KILLS = count(test=6, nightly=200, weekly=2_000)
CONFIG = """\
nvme = []
[[host]]
capacity = "64 MiB"
segment = "4 MiB"
"""
READY, EXISTS = BlockStatus.READY, BlockStatus.EXISTS


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """A daemon of 64 MiB; a put of 2 MiB is a small part of it."""
    with Daemon(CONFIG) as running:
        yield running


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, emptied after each test."""
    yield shared
    empty(shared, "a test of spares")


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls of each method that the client waited for."""
    return count_calls(monkeypatch)


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of calls that the client sent without waiting."""
    sent, inner = list[str](), LocalTransport.begin

    def begin(self: LocalTransport, method: str, *what: Any) -> Any:
        sent.append(method)
        return inner(self, method, *what)

    monkeypatch.setattr(LocalTransport, "begin", begin)
    return sent


def blocks_of(names: np.ndarray, *, last: int = SPEC.block_bytes) -> list[np.ndarray]:
    """The bytes of a sequence's blocks. last: bytes of its last block."""
    blocks = [content_of(name, SPEC.block_bytes) for name in names]
    return [*blocks[:-1], blocks[-1][:last]]


def put(client: Client, space: OpenedNamespace, number: int, count: int = BLOCKS) -> list[int]:
    """The status of each block. Waits for pages ordered for the next put."""
    names = chain(number, count)
    statuses = client.put(space, names, blocks_of(names)).statuses.tolist()
    await_order(client)
    return statuses


def await_order(client: Client) -> None:
    """Waits for the answer to the client's order, if it has one."""
    link = client._connector.link
    assert link is not None
    assert link.page_grants is not None
    order = link.page_grants._order
    await_true(lambda: order is None or order[1].is_answered, "the order's answer")


def is_right(client: Client, space: OpenedNamespace, number: int, count: int = BLOCKS) -> bool:
    """Whether a get serves the complete sequence, byte for byte."""
    names = chain(number, count)
    got = client.get(space, names)
    return got.blocks == count and all(map(np.array_equal, got.views, blocks_of(names)))


def test_from_the_third_on_a_put_is_one_call(daemon: Daemon, waited: Counter[str]) -> None:
    """From the third consecutive put on, pages are already reserved and the right bytes are stored."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(10):
            assert put(client, space, number) == [READY] * BLOCKS
        assert (waited["Reserve"], waited["Commit"]) == (2, 10)
        assert all(is_right(client, space, number) for number in range(10))


def test_one_order_is_for_several_puts(daemon: Daemon, ordered: list[str]) -> None:
    """One order reserves pages for several puts, so most puts need no Reserve."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(14):
            assert put(client, space, number) == [READY] * BLOCKS
        assert len(ordered) <= 5
        assert all(is_right(client, space, number) for number in range(14))


def test_pages_that_have_become_too_few_go_back(daemon: Daemon, waited: Counter[str]) -> None:
    """When puts grow, the client orders larger sets of pages and releases the smaller ones."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(3):
            put(client, space, number, 4)
        for number in range(3, 7):
            assert put(client, space, number, 10) == [READY] * 10
        assert waited["Reserve"] == 3
        reservations, pages = held(daemon)[1], held(daemon)[3]
        assert reservations > 0
        assert pages == 10 * reservations
        assert all(is_right(client, space, number, 10) for number in range(3, 7))


def sized(space: OpenedNamespace, names: np.ndarray, last: int) -> PutGroup:
    """Full blocks, except that the last has `last` bytes."""
    return PutGroup(space, names, lengths=[SPEC.block_bytes] * (len(names) - 1) + [last])


def test_smaller_puts_fit(daemon: Daemon, waited: Counter[str]) -> None:
    """A smaller put takes pages reserved for a larger one, and the rest go back. A larger put reserves."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number, count in enumerate((8, 8, 5, 12)):
            assert put(client, space, number, count) == [READY] * count
        assert waited["Reserve"] == 3
        names, last = chain(9, 6), SPEC.block_bytes - 1000
        assert client.put(space, sized(space, names, last), blocks_of(names, last=last)).stored == 6
        assert waited["Reserve"] == 3
        assert [len(view) for view in client.get(space, names).views] == [SPEC.block_bytes] * 5 + [last]
        assert all(is_right(client, space, number, count) for number, count in enumerate((8, 8, 5, 12)))


@pytest.mark.parametrize("lengths", [(256, 4), (256, 256, 4), (256, 4, 4), (4, 4, 4, 256)])
def test_no_block_keeps_a_page_that_is_too_large(daemon: Daemon, lengths: tuple[int, ...]) -> None:
    """For any order of block lengths, each block gets the page size that it would get alone."""
    with Client(daemon.target) as client, connect(daemon.target) as operator:
        space, sizes = client.open_namespace(SPEC), [length << 10 for length in lengths * 4]
        for number, size in enumerate(sizes):
            names = chain(number, 1)
            assert client.put(space, sized(space, names, size), blocks_of(names, last=size)).stored == 1
            await_order(client)
        names = chain(99, BLOCKS)
        assert client.put(space, sized(space, names, 4096), blocks_of(names, last=4096)).stored == BLOCKS
        client._connector.link.page_grants.give_back(time.monotonic() + 10)  # type: ignore[union-attr]
        await_true(lambda: held(daemon) == NOTHING, "the spares went back")
        used = operator.ask(pb.TiersRequest()).tiers[0].used_bytes
        assert used == sum(sizes) + (BLOCKS - 1) * SPEC.block_bytes + 4096


def test_a_block_of_no_bytes(daemon: Daemon) -> None:
    """A put of an empty block is refused, with or without reserved pages."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(4):
            names = chain(number, 1)
            client.put(space, sized(space, names, 4096), blocks_of(names, last=4096))
            await_order(client)
        with pytest.raises(InvalidArgument):
            client.put(space, PutGroup(space, chain(9, 1), lengths=[0]), [b""])


def test_short_bursts_order_little_in_vain(daemon: Daemon, ordered: list[str]) -> None:
    """When namespaces get two puts in turns, the client does not repeatedly order pages that go unused."""
    with Client(daemon.target) as client:
        spaces = [client.open_namespace(replace(SPEC, model=f"spares-{i}")) for i in range(2)]
        for number in range(60):
            put(client, spaces[number // 2 % 2], number, 1)
        assert 1 <= len(ordered) <= 3


def test_a_sequence_that_goes_on(daemon: Daemon, waited: Counter[str]) -> None:
    """Consecutive puts that continue a sequence name their parents, so all blocks form one prefix."""
    with Client(daemon.target) as client:
        space, names = client.open_namespace(SPEC), chain(3, 5 * BLOCKS)
        for start in range(0, len(names), BLOCKS):
            part = names[start : start + BLOCKS]
            parent = names[start - 1].tobytes() if start else bytes(32)
            group = PutGroup(space, part, parent=parent, position=start)
            assert client.put(space, group, blocks_of(part)).stored == BLOCKS
            await_order(client)
        assert waited["Reserve"] == 2
        assert is_right(client, space, 3, 5 * BLOCKS)


def test_what_exists_is_said_to_exist(daemon: Daemon, waited: Counter[str]) -> None:
    """A put of existing blocks answers EXISTS, once after a wasted copy; the next puts call Reserve first."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(3):
            put(client, space, number)
        assert waited["Reserve"] == 2
        for _ in range(5):
            assert put(client, space, 0) == [EXISTS] * BLOCKS
        assert (waited["Reserve"], waited["Commit"]) == (2 + 4, 3 + 1)
        assert is_right(client, space, 0)


def test_nobody_waits_for_an_order(daemon: Daemon, waited: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A put whose pages have not arrived reserves for itself. The daemon gets back pages of a stale order."""
    monkeypatch.setattr(Line, "is_answered", False)
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(4):
            names = chain(number, BLOCKS)
            assert client.put(space, names, blocks_of(names)).stored == BLOCKS
        assert waited["Reserve"] == 4
        monkeypatch.setattr(page_grants, "STALE_S", 0.0)
        client.lookup(space, chain(1, 1))
        await_true(lambda: held(daemon) == NOTHING, "they went back")


def test_what_nobody_takes_goes_back(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call after STALE_S releases pages that were reserved for a next put."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(3):
            put(client, space, number)
        await_true(lambda: held(daemon) == (0, 3, 0, 3 * BLOCKS), "the pages of the next puts are reserved")
        monkeypatch.setattr(page_grants, "STALE_S", 0.0)
        client.lookup(space, chain(1, 1))
        await_true(lambda: held(daemon) == NOTHING, "they went back")
        monkeypatch.undo()
        assert put(client, space, 7) == [READY] * BLOCKS


def test_all_clients_together_reserve_little_ahead(daemon: Daemon, waited: Counter[str]) -> None:
    """All clients together reserve ahead at most an eighth of the tier; other puts call Reserve."""
    clients = [Client(daemon.target, name=f"{i}") for i in range(6)]
    spaces = [client.open_namespace(SPEC) for client in clients]
    for number in range(4):
        for i, client in enumerate(clients):
            assert put(client, spaces[i], 10 * number + i) == [READY] * BLOCKS
    assert held(daemon)[3] * SPEC.block_bytes <= (64 << 20) // AHEAD_SHARE
    assert waited["Commit"] == 24
    assert waited["Reserve"] >= 2 * 6 + 2 * 4
    for client in clients:
        client.close()


def test_an_epoch_that_ended_meanwhile(daemon: Daemon) -> None:
    """After an epoch ends, a put raises StaleHandle and stores nothing, even with pages reserved before."""
    with Client(daemon.target) as client, connect(daemon.target) as operator:
        space = client.open_namespace(SPEC)
        for number in range(3):
            put(client, space, number)
        operator.ask(pb.BumpEpochRequest(model=SPEC.model))
        with pytest.raises(StaleHandle):
            put(client, space, 5)
        fresh = client.open_namespace(SPEC)
        for number in range(3):
            assert put(client, fresh, number) == [READY] * BLOCKS
            assert is_right(client, fresh, number)


def test_a_daemon_that_dies_between_two_puts() -> None:
    """After the daemon dies between two puts, the next put stores its blocks in the successor."""
    with Daemon(CONFIG) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(3):
            put(client, space, number)
        daemon.kill()
        daemon.start()
        for number in range(3, 6):
            assert put(client, space, number) == [READY] * BLOCKS
        assert all(is_right(client, space, number) for number in range(6))


def test_a_daemon_that_dies_while_a_put_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the daemon dies during a copy, the client copies again, to its successor's pages."""
    with Daemon(CONFIG) as daemon, Client(daemon.target) as client:
        space, inner = client.open_namespace(SPEC), writing.Copy.run
        for number in range(3):
            put(client, space, number)

        def run(copy: writing.Copy) -> None:
            inner(copy)
            monkeypatch.undo()
            daemon.kill()
            daemon.start()

        monkeypatch.setattr(writing.Copy, "run", run)
        assert put(client, space, 3) == [READY] * BLOCKS
        assert all(is_right(client, space, number) for number in range(4))


def test_ranks_have_pages_of_their_own(daemon: Daemon) -> None:
    """Pages reserved for one rank's next put are not used for another rank."""
    with Client(daemon.target) as client:
        space, names = client.open_namespace(replace(SPEC, model="ranks", rank_count=2)), chain(4, BLOCKS)
        for number in range(3):
            put(client, space, number)
        assert client.put(space, PutGroup(space, names, rank=1), blocks_of(names)).stored == BLOCKS
        assert not client.acquire([Group(space, names, ranks=(0,))])
        with client.acquire([Group(space, names, ranks=(1,))]) as lease:
            assert len(lease) == BLOCKS


def test_longer_blocks_reserve_for_themselves(daemon: Daemon, waited: Counter[str]) -> None:
    """A put whose blocks are longer than those before it is stored completely."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(3):
            names = chain(number, BLOCKS)
            short = [block[: 160 << 10] for block in blocks_of(names)]
            group = PutGroup(space, names, lengths=[len(block) for block in short])
            assert client.put(space, group, short).stored == BLOCKS
            await_order(client)
        assert waited["Reserve"] == 2
        assert put(client, space, 3) == [READY] * BLOCKS
        assert is_right(client, space, 3)


def test_part_of_the_pages_is_none(daemon: Daemon) -> None:
    """When only some pages of the next put fit, none is reserved ahead and that put reserves for itself."""
    pinned = (32 << 20) // SPEC.block_bytes - BLOCKS + 2  # from half the tier
    with Client(daemon.target) as client, Client(daemon.target) as other:
        space, names = client.open_namespace(SPEC), chain(50, pinned)
        its = other.open_namespace(SPEC)
        for start in range(0, pinned, BLOCKS):
            part = names[start : start + BLOCKS]
            assert other.put(its, part, blocks_of(part)).stored == len(part)
        other.close()
        put(client, space, 1)
        with client.acquire([Group(space, names)]) as lease:
            assert len(lease) == pinned
            put(client, space, 2, 4)
            assert held(daemon) == (1, 0, pinned, 0)
            assert put(client, space, 3, 4) == [READY] * 4
            assert held(daemon) == (1, 0, pinned, 0)


def test_a_child_reserves_for_itself(daemon: Daemon) -> None:
    """A forked child does not use its parent's reserved pages; both store the right bytes."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(3):
            put(client, space, number)
        child = os.fork()
        if not child:
            stored = [put(client, space, number) for number in (13, 14, 15)]
            client.close()
            os._exit(0 if stored == [[READY] * BLOCKS] * 3 else 1)
        assert [put(client, space, number) for number in (3, 4, 5)] == [[READY] * BLOCKS] * 3
        assert os.waitpid(child, 0)[1] == 0
        assert all(is_right(client, space, number) for number in (*range(6), 13, 14, 15))


def test_threads_that_share_a_client(daemon: Daemon) -> None:
    """Threads that put at the same time never write to the same pages."""
    with Client(daemon.target) as client:
        space, wrong = client.open_namespace(SPEC), list[int]()

        def work(first: int) -> None:
            for number in range(first, first + 6):
                names = chain(number, BLOCKS)
                stored = client.put(space, names, blocks_of(names)).stored
                if stored != BLOCKS or not is_right(client, space, number):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []


def test_a_replay_reserves_nothing_ahead() -> None:
    """With a replay clock every put reserves for itself, so a trace always gives the same result."""
    with (
        Daemon(CONFIG.replace("nvme = []", 'nvme = []\n[server]\nclock = "replay"')) as daemon,
        Client(daemon.target) as client,
    ):
        space = client.open_namespace(SPEC)
        for number in range(4):
            assert put(client, space, number) == [READY] * BLOCKS
        assert held(daemon) == NOTHING


class Writer(threading.Thread):
    """Puts sequences until told to stop, through daemon deaths. stored: acknowledged sequences."""

    def __init__(self, target: str, first: int) -> None:
        super().__init__()
        self.stored: list[int] = []
        self.failure: BaseException | None = None
        self.is_over = False
        self._target, self._next = target, first

    def run(self) -> None:
        """Puts until `is_over`."""
        try:
            with Client(self._target, timeout_s=20.0) as client:
                space = OpenedNamespace(SPEC)
                while not self.is_over:
                    self._put(client, space)
        except BaseException as error:
            self.failure = error

    def _put(self, client: Client, space: OpenedNamespace) -> None:
        names = chain(self._next, BLOCKS)
        self._next += 1
        try:
            if client.put(space, names, blocks_of(names)).stored == BLOCKS:
                self.stored.append(self._next - 1)
        except (RetryError, StaleHandle):
            pass


def test_killed_while_pages_are_reserved_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL during puts into reserved pages, gets serve only the bytes that clients put."""
    seed = int(os.environ.get("SPARES_SEED", time.time_ns() % 1_000_000))
    print(f"SPARES_SEED={seed}")
    chance, taken, inner = random.Random(seed), list[int](), writing._into_spare

    def into_spare(*given: Any) -> Any:
        taken.append(1)
        return inner(*given)

    monkeypatch.setattr(writing, "_into_spare", into_spare)
    with Daemon(CONFIG) as daemon:
        writers = [Writer(daemon.target, 1000 * i) for i in (1, 2)]
        for writer in writers:
            writer.start()
        try:
            for _ in range(KILLS):
                before = len(taken)
                await_true(lambda before=before: len(taken) > before + 3, "puts into spare pages")  # type: ignore[misc]
                threading.Event().wait(chance.random() * 0.02)
                daemon.kill()
                daemon.start()
                with Client(daemon.target) as reader:
                    space = reader.open_namespace(SPEC)
                    for writer in writers:
                        check(reader, space, writer.stored[-4:])
        finally:
            for writer in writers:
                writer.is_over = True
            for writer in writers:
                writer.join(60)
        assert [writer.failure for writer in writers] == [None, None]
        assert "Traceback" not in daemon.log, daemon.log
        await_nothing_held(daemon, "the last put")
    report("SIGKILL in puts into spare pages", seed=seed, kills=KILLS, into_spares=len(taken), wrong=0)


def check(client: Client, space: OpenedNamespace, numbers: Sequence[int]) -> None:
    """Asserts that every block served of these sequences has the bytes that were put."""
    for number in numbers:
        names = chain(number, BLOCKS)
        views = client.get(space, names).views
        assert all(np.array_equal(view, block) for view, block in zip(views, blocks_of(names), strict=False)), number


def test_the_last_but_one_orders(daemon: Daemon) -> None:
    """The client orders while its stock is enough for only one more put."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        for number in range(2):
            put(client, space, number)
        link = client._connector.link
        assert link is not None and link.page_grants is not None
        seen = set[tuple[bool, bool]]()
        for number in range(2, 14):
            put(client, space, number)
            seen.add((len(link.page_grants._stock) < 2, link.page_grants._order is not None))
        assert seen == {(False, False), (True, True)}
