"""Faults during consecutive puts: a page grant costs no client a wrong byte, a wait or a page."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.system.blocks import await_true
from tests.system.raw import RawClient, put_blocks
from tests.system.sdk import NOTHING, empty, held
from tests.system.warm import Daemon
from tierd._proto import cache_pb2 as pb
from tierd.client import Client, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.client.blocks import page_grants, writing
from tierd.client.session.session import Session
from tierd.client.transport.local import Later
from tierd.core.formats.model import BlockStatus
from tierd.errors import DeadlineExceeded, InvalidArgument
from tierd.testing import chain, content_of

SPEC = NamespaceSpec(model="spares", tokens_per_block=16, block_bytes=256 << 10)
BLOCKS = 8
CONFIG = """\
nvme = []
[[host]]
capacity = "64 MiB"
segment = "4 MiB"
"""
READY = BlockStatus.READY
HELD_S = 3
"""Seconds for which a daemon hangs."""


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


def put(client: Client, space: OpenedNamespace, number: int, blocks: int = BLOCKS) -> list[int]:
    """The status of each block."""
    names = chain(number, blocks)
    return client.put(space, names, [content_of(name, space.spec.block_bytes) for name in names]).statuses.tolist()


def in_a_row(client: Client, space: OpenedNamespace) -> None:
    """Puts after which the client has pages reserved for the next one."""
    for number in range(3):
        assert put(client, space, number) == [READY] * BLOCKS


def test_a_namespace_that_another_daemon_has_named(daemon: Daemon) -> None:
    """Reserved pages are never used for a namespace that another daemon gave the same number."""
    other = NamespaceSpec(model="other", tokens_per_block=16, block_bytes=SPEC.block_bytes)
    with Daemon(CONFIG) as second, Client(daemon.target) as client, Client(second.target) as its:
        mine, strange = client.open_namespace(SPEC), its.open_namespace(other)
        while strange.id < mine.id:  # other tests opened some here
            strange = its.open_namespace(
                NamespaceSpec(model=f"other {strange.id}", tokens_per_block=16, block_bytes=SPEC.block_bytes)
            )
        assert strange.id == mine.id
        in_a_row(client, mine)
        assert put(client, strange, 9) == [READY] * BLOCKS
        assert client.get(mine, chain(9, BLOCKS)).blocks == 0
        assert client.get(strange, chain(9, BLOCKS)).blocks == BLOCKS


@pytest.mark.parametrize("size", [256 << 10, 2 << 20], ids=["short", "long"])
@pytest.mark.parametrize("credits", [1, 2])
def test_a_session_of_few_calls_at_a_time(size: int, credits: int) -> None:
    """A client whose session has one free credit puts and gets as if no pages were reserved."""
    spec = NamespaceSpec(model="spares", tokens_per_block=16, block_bytes=size)
    config = f"nvme = []\n[server]\nsession_credits = {credits}\n[[host]]\ncapacity = '512 MiB'\nsegment = '16 MiB'\n"
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=3.0) as client:
        space = client.open_namespace(spec)
        in_a_row(client, space)
        turns = client._verbs.connector.link.credits
        others = [turns.ask("Acquire") for _ in range(credits - 1)]
        assert client.get(space, chain(1, BLOCKS)).blocks == BLOCKS
        assert put(client, space, 4) == [READY] * BLOCKS
        for _ in others:
            turns.give("Acquire")


def test_a_daemon_that_hangs_costs_a_call_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client drops a stale unanswered order without waiting; the daemon takes its pages back later."""
    with (
        Daemon(CONFIG).start(failpoints=f"cache.reserve.before_hold=delay:{HELD_S}@3x1") as daemon,
        Client(daemon.target) as client,
        Client(daemon.target) as other,
    ):
        space, its = client.open_namespace(SPEC), other.open_namespace(SPEC)
        monkeypatch.setattr(page_grants, "STALE_S", 60.0)
        for number in range(2):  # two Reserves succeed, and the order after them hangs
            assert put(client, space, number) == [READY] * BLOCKS
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            while time.monotonic() - begun < HELD_S:  # until it hangs
                other.lookup(its, chain(1, 1), timeout_s=0.1)
        monkeypatch.setattr(page_grants, "STALE_S", -1.0)
        with pytest.raises(DeadlineExceeded):
            client.get(space, chain(1, BLOCKS), timeout_s=0.1)
        assert time.monotonic() - begun < HELD_S
        await_true(lambda: held(daemon) == NOTHING, "what was ordered went back")
        monkeypatch.undo()
        in_a_row(client, client.open_namespace(NamespaceSpec(model="next", tokens_per_block=16, block_bytes=256 << 10)))


def test_a_put_that_is_interrupted_keeps_no_pages(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a copy into reserved pages, with the commit begun, releases them and stores nothing."""
    spec = NamespaceSpec(model="long", tokens_per_block=16, block_bytes=256 << 10)

    def sum_and_copy(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with Client(daemon.target) as client:
        space = client.open_namespace(spec)
        monkeypatch.setattr(page_grants, "PUTS_AHEAD", 1)
        in_a_row(client, space)
        await_true(lambda: held(daemon) == (0, 1, 0, BLOCKS), "pages are reserved")
        monkeypatch.setattr(writing.copying, "sum_and_copy", sum_and_copy)
        with pytest.raises(KeyboardInterrupt):
            put(client, space, 5)
        await_true(lambda: held(daemon) == NOTHING, "they went back")
        monkeypatch.undo()
        assert put(client, space, 5) == [READY] * BLOCKS


def test_an_order_that_nobody_wants_any_more_when_it_is_sent(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one thread releases pages while another orders more, the ordered pages are released too."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        its = client._verbs.connector.link.page_grants
        inner = its._begin

        def begin(*what: Any) -> Any:
            its.give_back(time.monotonic() + 1.0)
            return inner(*what)

        monkeypatch.setattr(its, "_begin", begin)
        in_a_row(client, space)
        await_true(lambda: held(daemon) == NOTHING, "they went back")


def test_a_put_that_is_wrong_keeps_no_pages(daemon: Daemon) -> None:
    """Invalid hashes or positions raise. The put's reserved pages are released or serve the next put."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        in_a_row(client, space)
        blocks = [content_of(name, SPEC.block_bytes) for name in chain(5, BLOCKS)]
        for number in range(6, 10):
            hashes = chain(5, BLOCKS)
            wrong = PutGroup(space, hashes.astype(np.uint16)) if number % 2 else PutGroup(space, hashes, position=-1)
            with pytest.raises((InvalidArgument, ValueError)):
                client.put(space, wrong, blocks)
            gc.collect()
            assert put(client, space, number) == [READY] * BLOCKS
        await_true(lambda: held(daemon) == (0, (n := held(daemon)[1]), 0, n * BLOCKS), "what is left is whole")
        assert held(daemon)[1] <= page_grants.PUTS_AHEAD


def descriptors() -> set[str]:
    """The open files of this process, by the names that the kernel gives them."""
    found = set[str]()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            found.add(os.readlink(path))
    return found


def test_a_closed_client_keeps_no_descriptor(daemon: Daemon) -> None:
    """A client that closes also closes the line of its unanswered order."""
    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        client = Client(daemon.target)
        in_a_row(client, client.open_namespace(SPEC))
        client.close()
        assert descriptors() <= before
    finally:
        gc.enable()


def test_a_closed_client_keeps_no_pages_for_puts(daemon: Daemon) -> None:
    """A closed client releases pages reserved for puts, even if a view keeps its session alive."""
    client = Client(daemon.target)
    space = client.open_namespace(SPEC)
    in_a_row(client, space)
    await_true(lambda: held(daemon)[1] > 1, "pages for several puts are reserved")
    assert put(client, space, 3) == [READY] * BLOCKS
    view = client.get(space, chain(1, BLOCKS)).views[0]
    client.close()
    await_true(lambda: held(daemon) == (1, 0, BLOCKS, 0), "the view's pages alone are held")
    assert np.array_equal(view, content_of(chain(1, 1)[0], SPEC.block_bytes))


def test_pages_of_others_do_not_wait_for_puts_to_end(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused pages are released although puts into other namespaces continue without a pause."""
    monkeypatch.setattr(page_grants, "STALE_S", 0.2)
    with Client(daemon.target) as client:
        in_a_row(client, client.open_namespace(SPEC))
        await_true(lambda: held(daemon)[1] > 0, "pages are reserved")
        others = [client.open_namespace(replace(SPEC, model=model)) for model in ("one", "other")]
        turns = count()

        def is_back() -> bool:
            number = next(turns)
            assert put(client, others[number % 2], number) == [READY] * BLOCKS
            return held(daemon) == NOTHING

        await_true(is_back, "they went back")


def test_pages_that_come_when_nobody_wants_them_any_more(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one thread releases pages while another reads an order's reply, the new pages are released too."""
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        in_a_row(client, space)
        its, inner = client._verbs.connector.link.page_grants, Later.reply

        def reply(self: Later, *, deadline: float) -> Any:
            its.give_back(deadline)
            return inner(self, deadline=deadline)

        for number in range(3, 9):  # if the answer was quick, use up its pages first
            if its._order is None:
                assert put(client, space, number) == [READY] * BLOCKS
        monkeypatch.setattr(Later, "reply", reply)
        await_true(lambda: its._order is not None and its._order[1].is_answered, "the order's answer")
        group = PutGroup(space, chain(9, BLOCKS))
        assert its.take(group, length=SPEC.block_bytes, deadline=time.monotonic() + 5.0) is None
        await_true(lambda: held(daemon) == NOTHING, "they went back")


def test_a_call_that_fails_while_it_gives_pages_back(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reservation that times out while it releases pages for puts still gives all of them back."""

    def abort(_self: Session, reservations: Sequence[int], **_how: Any) -> None:
        assert len(reservations) > 1
        raise DeadlineExceeded("no answer in time")

    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        in_a_row(client, space)
        await_true(lambda: held(daemon)[1] > 1, "pages for several puts are reserved")
        monkeypatch.setattr(Session, "abort", abort)
        with pytest.raises(DeadlineExceeded):
            client.reserve(PutGroup.private(space, (32 << 20) // SPEC.block_bytes))
        await_true(lambda: held(daemon) == NOTHING, "they went back")


def test_an_order_is_no_greater_than_a_call_may_be() -> None:
    """An order has one group, and its pages never exceed the blocks of one call."""
    with Daemon(CONFIG + "[server]\nmax_batch_blocks = 16\n") as daemon, RawClient(daemon.target) as client:
        blocks = put_blocks(np.zeros((7, 32), np.uint8)).tobytes()
        group = pb.PutGroup(namespace=client.open_namespace(), blocks=blocks)
        wanted = {"tier": pb.TIER_KIND_HOST, "ahead": 1000}
        reply = client.call(client.cache.Reserve, pb.ReserveRequest(groups=[group], **wanted))
        assert (reply.reservation, len(reply.ahead), len(reply.handles)) == (0, 2, 2)
        for groups in ([], [group] * 2):
            error = client.error_of(client.cache.Reserve, pb.ReserveRequest(groups=groups, **wanted))
            assert error == "InvalidArgument"
        assert held(daemon) == (0, 2, 0, 14)


def test_a_get_of_all_that_a_session_may_hold(daemon: Daemon) -> None:
    """Pages reserved for next puts shorten no get and no reservation."""
    half = (32 << 20) // SPEC.block_bytes
    with Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        names = chain(50, half)
        for start in range(0, half, BLOCKS):
            part = names[start : start + BLOCKS]
            group = PutGroup(space, part, parent=names[start - 1].tobytes() if start else bytes(32), position=start)
            assert client.put(space, group, [content_of(name, SPEC.block_bytes) for name in part]).stored == BLOCKS
        await_true(lambda: held(daemon)[1] > 0, "pages are reserved")
        got = client.get(space, names)
        assert got.blocks == half
        del got
        in_a_row(client, client.open_namespace(NamespaceSpec(model="next", tokens_per_block=16, block_bytes=256 << 10)))
        await_true(lambda: held(daemon)[1] > 0, "pages are reserved")
        with client.reserve(PutGroup.private(space, half)) as pages:
            assert (pages.statuses == BlockStatus.RESERVED).all()
