"""The answers of the page: what they hide, how long they last, and what is missing."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cache.world import World, opened
from tierd._proto import admin_pb2 as pb
from tierd.errors import NotFound
from tierd.page import view
from tierd.page.view import Seen, Sources, View
from tierd.testing import chain

Verb = Callable[[Any, Any], Awaitable[Any]]
SECRET = "secret"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with opened() as made:
        yield made


def viewed(world: World, **verbs: Verb) -> View:
    """A view of the world's daemon and two sessions, one of which holds something."""
    sessions = [
        Seen(99, {"engine": "vllm", "role": "worker", "host": SECRET}, "restored", 5.4),
        Seen(World.session, {"engine": "sglang", "version": "0.5"}, "open", 1.0),
    ]
    state = {"version": "1", "instance": "i", "started": 0.0}
    return View(
        Sources(
            cache=world.cache,
            **state,
            state=lambda: "serving",
            notices=lambda: ["n"],
            sessions=lambda: sessions,
            verbs=verbs,
        )
    )


async def answered(made: View, *, run: str = "", since: int = 0, walk: int = 0) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return dict(json.loads(await made.answer(run=run, since=since, walk=walk), parse_constant=refuse))


def decision(cause: str) -> pb.RequestDecision:
    told = pb.Cause(cause=cause, text=SECRET, hash=bytes(range(32)), tier="nvme.0", facts={SECRET: SECRET})
    return pb.RequestDecision(
        request=SECRET, model=SECRET, session=77177177, kind="get", tokens_asked=32, tokens_missed=16, cause=told
    )


async def test_decisions_are_cut_to_what_all_may_know(world: World) -> None:
    """A decision is shown without request, model, session, text, facts and hash. A cause that tells
    of another tenant is shown as a block never stored."""
    asked = []

    async def explain(request: pb.ExplainRequest, _context: Any) -> pb.ExplainReply:
        asked.append(request)
        return pb.ExplainReply(requests=[decision("evicted"), decision("other_tenant")])

    answer = await answered(viewed(world, Explain=explain))
    assert (asked[0].last, asked[0].misses) == (view.DECISIONS_SHOWN, True)
    assert [one["cause"] for one in answer["decisions"]] == ["evicted", "never_stored"]
    assert (answer["decisions"][0]["asked"], answer["decisions"][0]["missed"]) == (32, 16)
    text = json.dumps(answer)
    assert [word for word in (SECRET, "77177177", bytes(range(6)).hex()) if word in text] == []


async def test_a_ceiling_without_a_limit_is_json(world: World) -> None:
    """An infinite factor, which JSON cannot say, is 0 in the answer."""

    async def ceiling(_request: Any, _context: Any) -> pb.CeilingReply:
        points = [pb.CeilingPoint(factor=1.0, bytes=8, hit_ratio=0.5), pb.CeilingPoint(factor=math.inf, hit_ratio=0.75)]
        return pb.CeilingReply(windows=[pb.CeilingWindow(seconds=900, tokens=5, hit_ratio=0.25, points=points)])

    (window,) = (await answered(viewed(world, Ceiling=ceiling)))["ceiling"]["windows"]
    assert (window["points"], window["hit"], window["seconds"]) == ([[1.0, 8, 0.5], [0, 0, 0.75]], 0.25, 900)


@pytest.mark.parametrize("fault", [None, NotFound("no"), TimeoutError()])
async def test_a_verb_that_is_missing_or_fails_leaves_its_section_out(world: World, fault: Exception | None) -> None:
    """Without an answer of a verb its section is null, and the rest of the answer is whole."""

    async def failing(_request: Any, _context: Any) -> Any:
        assert fault
        raise fault

    answer = await answered(viewed(world, **({"Explain": failing, "Ceiling": failing} if fault else {})))
    assert (answer["decisions"], answer["ceiling"], answer["state"]) == (None, None, "serving")


async def test_a_verb_that_hangs_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb has a limited time; then the answer comes without it."""
    monkeypatch.setattr(view, "VERB_S", 0.01)

    async def hanging(_request: Any, _context: Any) -> Any:
        await asyncio.sleep(3600)

    assert (await answered(viewed(world, Explain=hanging)))["decisions"] is None


async def test_readers_share_a_state(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a second all readers, also those at the same time, get one state. Verbs are asked once in
    five seconds."""
    asked, now = Counter[str](), [100.0]

    async def explain(_request: Any, _context: Any) -> pb.ExplainReply:
        asked["explain"] += 1
        await asyncio.sleep(0)
        return pb.ExplainReply()

    made = viewed(world, Explain=explain)
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: now[0]))
    seen = []
    for moment, times in ((100.0, 3), (100.9, 2), (101.1, 2), (104.0, 1), (105.5, 1)):
        now[0] = moment
        seen.append({one["uptime_s"] for one in await asyncio.gather(*(answered(made) for _ in range(times)))})
    assert seen == [{100.0}, {100.0}, {101.1}, {104.0}, {105.5}]
    assert asked["explain"] == 2


async def test_sessions_have_their_engine_and_holdings_alone(world: World) -> None:
    """A session has its engine's name, version and role, its state, age and holdings; the one that
    holds most comes first."""
    await world.put(chain(1, 2))
    reply = await world.acquire(chain(1, 2))
    sessions = (await answered(viewed(world)))["sessions"]
    world.cache.release(world.session, [reply.lease])
    first, second = sessions["shown"]
    assert sessions["all"] == 2
    assert (first["engine"], first["state"], first["leases"]) == ("sglang 0.5", "open", 1)
    assert first["pinned"] > 0
    assert (second["engine"], second["state"], second["age_s"], second["pinned"]) == ("vllm worker", "restored", 5, 0)


async def test_a_reader_of_another_run_gets_all(world: World) -> None:
    """A reader lacks nothing of its own run, and everything of another one."""
    made = viewed(world)
    made.history.sample()
    made.history.sample()
    first = await answered(made)
    assert len((await answered(made, run=first["run"], since=1))["rows"]) == 1
    assert (await answered(made, run=first["run"], since=2))["rows"] == []
    assert len((await answered(made, run="another", since=2))["rows"]) == 2
    assert viewed(world)._run != first["run"]
