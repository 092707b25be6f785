"""The eviction policy `priority` in a real daemon: under pressure, over time and across restarts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner

from tests.system.raw import RawClient, put_blocks
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.cli.admin import TIME_KEY
from tierd.cli.ctl import cli
from tierd.client import Client, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.testing import chain, content_of

TOKENS, BLOCK_BYTES, KEPT = 16, 1 << 19, 4
SPEC = NamespaceSpec(model="m", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES)
HOST = '[[host]]\ncapacity = "16 MiB"\nsegment = "2 MiB"\neviction = "priority"\n'
ROOM = (16 << 20) // BLOCK_BYTES
"""Blocks that fit in the host tier."""
REPLAYED = '[server]\nclock = "replay"\n\n' + HOST
STORED = HOST + '\n[[nvme]]\ncapacity = "64 MiB"\nsegment = "4 MiB"\neviction = "priority"\n'


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with memory alone, on a clock that the test sets."""
    with Daemon(REPLAYED) as running:
        yield running


def put(client: Client, namespace: OpenedNamespace, names: np.ndarray, *, durable: bool = False, **said: Any) -> int:
    """Stores a chain. Returns the number of blocks stored."""
    sources = [content_of(name, BLOCK_BYTES) for name in names]
    return client.put(namespace, PutGroup(namespace, names, **said), sources, durable=durable).stored


def press(client: Client, namespace: OpenedNamespace, seed: int) -> None:
    """Stores twice the host tier's capacity with no priority set."""
    for number in range(2 * ROOM // 8):
        assert put(client, namespace, chain(seed * 1000 + number, 8)) == 8


def held(client: Client, namespace: OpenedNamespace, names: np.ndarray) -> int:
    """Blocks of the chain that a get could serve."""
    return client.lookup(namespace, names).tokens // TOKENS


def set_time(daemon: Daemon, time_s: float) -> None:
    """Moves the daemon's clock."""
    with RawClient(daemon.target) as raw:
        metadata = (*raw.metadata, (TIME_KEY, f"{time_s * 1000:.0f}"))
        raw.admin.Status(apb.StatusRequest(), metadata=metadata, timeout=15.0)


def listed(daemon: Daemon, names: np.ndarray) -> list[dict[str, Any]]:
    """The rows of `tierctl blocks` for a chain, first to last."""
    result = CliRunner().invoke(cli, ["blocks", "--limit", "1000", "--json", "--target", daemon.target])
    assert result.exit_code == 0, result.output
    found = {block["hash"]: block for block in json.loads(result.stdout)["blocks"]}
    return [found[name.tobytes().hex()] for name in names]


def test_a_prompt_stays_for_its_time_under_pressure(daemon: Daemon) -> None:
    """Under pressure a retained prompt stays and default ones are evicted, until its retention ends."""
    older, prompt, newer = chain(1, KEPT), chain(2, KEPT), chain(3, KEPT)
    with Client(daemon.target) as client:
        namespace = client.open_namespace(SPEC)
        assert put(client, namespace, older) == KEPT
        assert put(client, namespace, prompt, priority=90, retention_s=600) == KEPT
        assert put(client, namespace, newer, priority=35) == KEPT
        for turn, (time_s, stays) in enumerate(((0, KEPT), (599, KEPT), (602, 0))):
            set_time(daemon, time_s)
            press(client, namespace, 10 + turn)
            found = [held(client, namespace, names) for names in (older, prompt, newer)]
            assert found == [0, stays, 0], f"after {time_s} s"


def test_each_block_has_its_own(daemon: Daemon) -> None:
    """Each block of a put has its own priority; a later put can raise the priority of existing blocks."""
    names, other = chain(1, KEPT), chain(2, KEPT)
    with Client(daemon.target) as client:
        namespace = client.open_namespace(SPEC)
        put(client, namespace, names, priority=[90, 80, 20, 10], retention_s=[None, 600, None, None])
        put(client, namespace, other)
        put(client, namespace, other, priority=[50, 50, 0, 0])
        assert [block["priority"] for block in listed(daemon, names)] == [90, 80, 20, 10]
        assert [block["retention_s"] for block in listed(daemon, names)] == [
            0,
            pytest.approx(600.5, abs=0.5),
            0,
            0,
        ]
        assert [block["priority"] for block in listed(daemon, other)] == [50, 50, 35, 35]
        press(client, namespace, 10)
        assert (held(client, namespace, names), held(client, namespace, other)) == (2, 2)


@pytest.mark.parametrize("is_memory_lost", [False, True], ids=["killed", "rebooted"])
def test_what_was_said_outlives_a_restart(is_memory_lost: bool) -> None:
    """After SIGKILL, with or without its memory, a daemon keeps a prompt's priority and retention."""
    prompt, plain = chain(1, KEPT), chain(2, KEPT)
    with Daemon(STORED) as daemon:
        with Client(daemon.target) as client:
            namespace = client.open_namespace(SPEC)
            assert put(client, namespace, prompt, durable=True, priority=90, retention_s=3600) == KEPT
            assert put(client, namespace, plain, durable=True) == KEPT
        daemon.kill()
        for path in daemon.arena.iterdir() if is_memory_lost else ():
            shutil.rmtree(path)
        daemon.start()
        blocks = listed(daemon, prompt)
        assert [block["priority"] for block in blocks] == [90] * KEPT
        assert all(3000 < block["retention_s"] <= 3601 for block in blocks)
        assert [block["priority"] for block in listed(daemon, plain)] == [35] * KEPT


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"priorities": [101]}, "group.priorities: 101 is outside 0 to 100"),
        ({"priorities": [35, 36]}, "group.priorities: 2 for 3 blocks"),
        ({"priorities": [35], "retention_s": [1, 2]}, "group.retention_s: 2 for 3 blocks"),
        ({"priorities": [35], "retention_s": [316_224_001]}, "group.retention_s: 316224001 is outside 0 to 316224000"),
        ({"retention_s": [60]}, "group.retention_s: 60 s without a priority"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(daemon: Daemon, said: dict[str, Sequence[int]], told: str) -> None:
    """The daemon refuses an invalid value with field, value and limit, and reserves nothing."""
    with RawClient(daemon.target) as raw:
        blocks = put_blocks(chain(1, 3)).tobytes()
        group = pb.PutGroup(namespace=raw.open_namespace(), blocks=blocks, **said)
        with pytest.raises(grpc.RpcError) as refused:
            raw.call(raw.cache.Reserve, pb.ReserveRequest(groups=[group], tier=pb.TIER_KIND_HOST))
        assert told in str(refused.value.details())
        assert raw.call(raw.admin.Status, apb.StatusRequest()).reservations == 0
