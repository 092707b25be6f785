"""The online ceiling of real daemons: it meets what they measure, and engines' calls count once."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.sim.test_ceiling import conversations
from tests.system.inside import CONFIG as INSIDE
from tests.system.inside import inside
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.ceiling.estimator import Estimator
from tierd.cli.admin import connect
from tierd.cli.ctl import cli
from tierd.client import Client, NamespaceSpec
from tierd.core.plan import GroupQuery
from tierd.server.operators import ceiling as operators
from tierd.server.operators.ceiling import Ceiling
from tierd.testing import chain

CONFIG = """\
nvme = []

[server]
ceiling = true
clock = "replay"
metrics_listen = "127.0.0.1:0"

[[host]]
capacity = "1200 KiB"
segment = "240 KiB"
"""
SMALL = 'nvme = []\n\n[server]\nceiling = {ceiling}\n\n[[host]]\ncapacity = "{capacity}"\nsegment = "64 KiB"\n'
ESTIMATING = INSIDE.replace("[server]", "[server]\nceiling = true")
BLOCK_BYTES, TOKENS = 4096, 16


def asked(*arguments: str) -> dict[str, Any]:
    """A verb's JSON."""
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def address_of(daemon: Daemon) -> str:
    """The address of the daemon's metrics, by its log."""
    (found,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", daemon.log)
    return str(found)


def written(path: Path, count: int) -> Path:
    """The made-up conversations as a file."""
    trace = conversations(count)
    rows = [
        {"timestamp": round(1000 * at_s), "input_length": tokens, "hash_ids": trace.of(number).tolist()}
        for number, (at_s, tokens) in enumerate(zip(trace.times_s.tolist(), trace.tokens.tolist(), strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_replayed_trace_gives_what_the_daemon_measures(tmp_path: Path) -> None:
    """At its own size the estimate is the daemon's own hit ratio; more memory serves more, and the
    metric says the same."""
    trace = written(tmp_path / "made-up.jsonl", 150)
    with Daemon(CONFIG) as daemon:
        sums = asked("replay", str(trace), "--target", daemon.target, "--lockstep", "--block-bytes", "4 KiB")
        answer = asked("ceiling", "--target", daemon.target)
        metrics = urllib.request.urlopen(address_of(daemon), timeout=10).read().decode()
    (quarter, *_), whole = answer["windows"], answer["windows"][-1]
    assert (quarter["seconds"], whole["seconds"], answer["trouble"]) == (900.0, 86400.0, "")
    assert whole["hit_ratio"] == pytest.approx(sums["hit_ratio"])
    shares = {point["factor"]: point["hit_ratio"] for point in whole["points"]}
    assert list(shares) == [0.5, 1.0, 2.0, 4.0, 0.0]
    assert shares[1.0] == pytest.approx(sums["hit_ratio"], abs=0.02)
    assert shares[0.5] < shares[1.0] < shares[2.0] <= shares[4.0] <= shares[0.0]
    assert [point["bytes"] for point in whole["points"]] == [614400, 1228800, 2457600, 4915200, 0]
    assert f'tierd_ceiling_hit_ratio{{window="86400",factor="2"}} {shares[2.0]}' in metrics


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon with memory for 64 blocks, shared by this file."""
    with Daemon(SMALL.format(ceiling="true", capacity="256 KiB")) as started:
        yield started


def test_a_lookup_and_its_get_count_once(daemon: Daemon) -> None:
    """An engine that looks up, gets and puts has asked for its prompts, each once."""
    spec = NamespaceSpec(model="m", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES)
    with Client(daemon.target) as client, connect(daemon.target) as operator:
        space, hashes = client.open_namespace(spec), chain(1, 32)
        for blocks in (8, 16, 32):
            found = client.lookup(space, hashes[:blocks]).tokens // TOKENS
            if found:
                with client.acquire(space, hashes[:found]) as lease:
                    assert len(lease.handles) == found
            assert client.put(space, hashes[:blocks], [bytes(BLOCK_BYTES)] * blocks)
        told = operator.ask(pb.CeilingRequest())
    (*_, day) = told.windows
    assert day.tokens == (8 + 16 + 32) * TOKENS
    assert [round(point.hit_ratio * day.tokens) for point in day.points] == [(8 + 16) * TOKENS] * 5
    assert day.hit_ratio == pytest.approx((8 + 16) / (8 + 16 + 32))


def test_people_see_one_line_and_a_table(daemon: Daemon) -> None:
    """The verb prints the line that `top` shows, then a row for each size."""
    shown = CliRunner().invoke(cli, ["ceiling", "--target", daemon.target]).output
    assert "ceiling over 15 min   at 256 KiB " in shown
    assert "no limit" in shown and "measured" in shown


@pytest.mark.parametrize(
    ("ceiling", "capacity", "remedy"), [("false", "256 KiB", "set it to true"), ("true", "64 KiB", "tierctl simulate")]
)
def test_without_an_estimate_the_reason_is_named(ceiling: str, capacity: str, remedy: str) -> None:
    """A daemon whose estimate is off, or whose memory is too small for one, says so and names the
    remedy."""
    with Daemon(SMALL.format(ceiling=ceiling, capacity=capacity)) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(NamespaceSpec(model="m", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES))
        client.get(space, chain(1, 8))
        answer = asked("ceiling", "--target", daemon.target)
        shown = CliRunner().invoke(cli, ["ceiling", "--target", daemon.target])
    assert remedy in answer["trouble"]
    assert not any(window.get("points") for window in answer["windows"])
    assert shown.exit_code == 0 and remedy in shown.output


@contextlib.asynccontextmanager
async def asked_for() -> AsyncIterator[tuple[Ceiling, GroupQuery]]:
    """The ceiling of a daemon in this process, and a query of eight blocks."""
    async with inside(ESTIMATING) as daemon:
        cache, estimate = daemon.daemon.cache, daemon.listeners._ceiling
        cache.open_session(7, tenant="t")
        namespace = cache.open_namespace(7, NamespaceSpec("m", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES))
        assert estimate is not None
        yield estimate, GroupQuery((namespace.id,), chain(1, 8), TOKENS, 8 * TOKENS)


async def test_a_fault_of_the_estimate_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an unforeseen error calls are served on, and the answer says what happened."""
    async with asked_for() as (estimate, group):

        def fails(*_: object) -> None:
            raise ZeroDivisionError("made up")

        monkeypatch.setattr(Estimator, "ask", fails)
        estimate.note([group], is_lookup=False)
        told = await estimate.reply()
        estimate.note([group], is_lookup=False)
        assert "made up" in told.trouble and not told.windows


async def test_calls_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls beyond the queue are left out and counted; the others are in the estimate."""
    monkeypatch.setattr(operators, "QUEUE_BLOCKS", 16)
    async with asked_for() as (estimate, group):
        for _ in range(3):
            estimate.note([group], is_lookup=False)
        told = await estimate.reply()
        assert (told.lost, told.windows[0].tokens) == (1, 2 * 8 * TOKENS)
        estimate.note([group], is_lookup=False)
        assert (await estimate.reply()).windows[0].tokens == 3 * 8 * TOKENS


@pytest.mark.parametrize(
    ("changed", "size"),
    [
        ({"host.0.capacity": "4 MiB"}, 20 << 20),
        ({"host.0.eviction": "lru", "nvme.0.eviction": "lru"}, 24 << 20),
        ({"host.0.headroom": "0.5", "host.0.low_watermark": "0.1"}, 24 << 20),
    ],
)
async def test_other_tiers_have_another_estimate(changed: dict[str, str], size: int) -> None:
    """When a tier gets another size, policy or watermark, the estimate is of it and begins anew."""
    async with inside(ESTIMATING) as daemon:
        cache, estimate, live = daemon.daemon.cache, daemon.listeners._ceiling, daemon.listeners.live
        assert estimate is not None
        cache.open_session(7, tenant="t")
        namespace = cache.open_namespace(7, NamespaceSpec("m", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES))
        group = GroupQuery((namespace.id,), chain(1, 8), TOKENS, 8 * TOKENS)
        sizes = []
        for settings in ({}, changed, {"server.call_timeout": "9 s"}):
            await live.set(settings, is_check=False, who={})
            estimate.note([group], is_lookup=False)
            told = (await estimate.reply()).windows[0]
            sizes.append((told.tokens, told.points[1].bytes))
        assert sizes == [(8 * TOKENS, 24 << 20), (8 * TOKENS, size), (16 * TOKENS, size)]
        fresh = Ceiling(daemon.daemon)
        assert estimate._estimator._levels == fresh._estimator._levels
