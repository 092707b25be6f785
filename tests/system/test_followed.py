"""Puts that the hash process follows: the daemon learns from their board that they are written, and from a message where it does not."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.system.blocks import SOON_S, await_true
from tests.system.sdk import BIG, HOST, NOTHING, held, put, right
from tests.system.warm import Daemon
from tierd.client import AsyncClient, Client, OpenedNamespace, writing
from tierd.client import session as session_module
from tierd.client.lines import Line, Lines
from tierd.client.local import LocalTransport
from tierd.client.progress import Progress
from tierd.client.session import Session
from tierd.errors import InvalidArgument, Overloaded
from tierd.testing import chain

BLOCKS = 4
CONFIG = "nvme = []\n" + HOST


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(CONFIG) as running:
        yield running


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many messages of which kind sessions have sent without waiting for an answer."""
    sent, inner = Counter[str](), Session._tell

    def tell(self: Session, request: Any) -> None:
        sent[request["op"]] += 1
        inner(self, request)

    monkeypatch.setattr(Session, "_tell", tell)
    return sent


def followed(client: Client, space: OpenedNamespace) -> Session:
    """A session whose last put was followed: the hash process may not run yet when the first ones come."""
    seeds = iter(range(1000, 2000))

    def is_followed() -> bool:
        assert put(client, space, next(seeds), BLOCKS).stored == BLOCKS
        return bool(client._verbs.connector.link.session.is_followed)

    await_true(is_followed, "a put was followed")
    session: Session = client._verbs.connector.link.session
    return session


def test_a_put_that_is_followed_needs_no_message(
    daemon: Daemon, told: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once one was the next ones say nothing over the socket that the board has said, and are stored as they are."""
    monkeypatch.setattr(writing.Copying, "patience_s", 10.0)
    with Client(daemon.target) as client:
        space = client.open_namespace(BIG)
        followed(client, space)
        before = told["written"]
        for seed in range(8):
            assert put(client, space, seed, BLOCKS).stored == BLOCKS
            assert right(client.get(space, chain(seed, BLOCKS)).views, seed) == BLOCKS
        assert told["written"] == before


def test_a_board_that_did_not_arrive_is_given_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that had no descriptors left when its board came gets it with the next segment that it maps, and its puts are followed."""
    with Client(daemon.target) as client:
        space, real = client.open_namespace(BIG), session_module._check_came

        def check(fds: list[int], count: int, *, what: str) -> None:
            if count == 3:
                monkeypatch.undo()
                raise Overloaded(f"{what}: its descriptors did not come")
            real(fds, count, what=what)

        monkeypatch.setattr(session_module, "_check_came", check)
        with pytest.raises(Overloaded):
            put(client, space, 1, BLOCKS)
        assert followed(client, space).board is not None


@pytest.mark.parametrize(("says", "over"), [("nothing", "a line"), ("half", "a line"), ("nothing", "gRPC")])
def test_what_the_board_does_not_say_a_message_says(
    says: str, over: str, daemon: Daemon, told: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put whose answer does not come in a moment tells the daemon, and one over gRPC at once, so that a hash process which is late, or ends, holds up nobody."""
    with Client(daemon.target) as client:
        space, note = client.open_namespace(BIG), Progress.note
        followed(client, space)
        before = told["written"]
        with monkeypatch.context() as mute:
            if over == "gRPC":
                mute.setattr(Lines, "take", lambda _self, *, timeout_s: None)
            mute.setattr(
                Progress,
                "note",
                lambda self, blocks: note(self, blocks) if says == "half" and blocks <= BLOCKS // 2 else None,
            )
            assert put(client, space, 1, BLOCKS).stored == BLOCKS
        assert told["written"] == before + 1
        assert right(client.get(space, chain(1, BLOCKS)).views, 1) == BLOCKS


def test_a_put_that_was_given_up_is_not_finished_by_the_next_one(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word of a put that fails in the middle is the next one's, which says of its own pages that they are written: of those that were given up nothing is published, though the daemon
    has not heard yet that they were."""
    with Client(daemon.target) as client:
        space, inner, unheard, kept = client.open_namespace(BIG), writing.buffers.copy_all, list[Any](), list[Line]()
        session = followed(client, space)
        board = session.board
        assert board is not None
        del board.free[1:]
        copies, tell = list[int](), Session._tell

        def fail(targets: Any, sources: Any) -> None:
            if len(copies) == BLOCKS // 2:
                raise ValueError("broken off")
            copies.append(1)
            inner(targets, sources)

        def withhold(self: Session, request: Any) -> None:
            if request["op"] in ("release", "revoke"):
                unheard.append(request)
            else:
                tell(self, request)

        monkeypatch.setattr(Session, "_tell", withhold)
        with monkeypatch.context() as failing:
            failing.setattr(writing.buffers, "copy_all", fail)
            failing.setattr(Lines, "drop", lambda _self, line: kept.append(line))
            with pytest.raises(InvalidArgument, match="broken off"):
                client.put(space, chain(1, BLOCKS), [np.full(BIG.block_bytes, 0xAB, np.uint8)] * BLOCKS)
        assert unheard
        assert len(board.free) == 1
        for seed in range(2, 5):
            assert put(client, space, seed, BLOCKS).stored == BLOCKS
        with Client(daemon.target) as other:
            assert not other.get(other.open_namespace(BIG), chain(1, BLOCKS)).blocks
        monkeypatch.undo()
        kept.pop().close()
        for request in unheard:
            session._tell(request)
        link = client._connector.link
        assert link is not None and link.spares is not None
        link.spares.give_back(1e9)
        await_true(lambda: held(daemon) == NOTHING, "what was given up went back")


def test_a_put_that_was_cancelled_while_its_last_piece_is_copied(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller may use its sources for something else when he hears that it has ended: what is copied after that is not said to be written, and is nobody's block."""
    at, go, inner, copies = threading.Event(), threading.Event(), writing.buffers.copy_all, list[int]()

    def copy_all(targets: Any, sources: Any) -> None:
        copies.append(1)
        if len(copies) == BLOCKS:
            at.set()
            go.wait(SOON_S)
        inner(targets, sources)

    async def run() -> None:
        async with AsyncClient(daemon.target) as client:
            space = await client.open_namespace(BIG)
            sources = [np.full(BIG.block_bytes, 0xAB, np.uint8) for _ in range(BLOCKS)]
            monkeypatch.setattr(writing.buffers, "copy_all", copy_all)
            late = asyncio.ensure_future(client.put(space, chain(1, BLOCKS), sources))
            await asyncio.to_thread(at.wait, SOON_S)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            for source in sources:
                source[:] = 0xCD
            go.set()
            await asyncio.to_thread(await_true, lambda: held(daemon) == NOTHING, "its pages went back")

    asyncio.run(run())
    with Client(daemon.target) as client:
        assert not client.get(client.open_namespace(BIG), chain(1, BLOCKS)).blocks


def test_pages_for_the_next_put_are_asked_for_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a commit is under way nothing else comes to the daemon, which would have to read it while the last pages are hashed."""
    said, send, begin = list[str](), LocalTransport._send, LocalTransport.begin
    call = LocalTransport.call

    def sent(self: LocalTransport, method: str, *given: Any, **named: Any) -> Any:
        said.append(method)
        return send(self, method, *given, **named)

    def called(self: LocalTransport, method: str, *given: Any, **named: Any) -> Any:
        reply = call(self, method, *given, **named)
        said.append(f"{method} answered")
        return reply

    monkeypatch.setattr(LocalTransport, "_send", sent)
    monkeypatch.setattr(LocalTransport, "call", called)
    monkeypatch.setattr(LocalTransport, "begin", lambda self, *given: (said.append("order"), begin(self, *given))[1])
    with Daemon(CONFIG.replace('"32 MiB"', '"256 MiB"')) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(BIG)
        for seed in range(12):
            assert put(client, space, seed, BLOCKS).stored == BLOCKS
    assert said.count("order") > 2
    assert {said[at + 1] for at, what in enumerate(said) if what == "Commit"} == {"Commit answered"}
