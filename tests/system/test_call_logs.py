"""The daemon's log: lines of a call name it, and nothing of a prompt is in the log or the metrics."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.blocks import await_true
from tests.system.tcp import free_port
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.errors import TierdError
from tierd.testing.daemon import SMALL

TOKENS = range(1_234_567_000, 1_234_567_064)
"""Four blocks of tokens that no other number in a log resembles."""
BLOCKS = [bytes([number]) * 4096 for number in range(4)]
SPEC = NamespaceSpec(model="logged", tokens_per_block=16, block_bytes=4096)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def daemon(port: int) -> Iterator[Daemon]:
    """A daemon that logs everything as JSON."""
    more = f'[server]\nlog_level = "debug"\nlog_format = "json"\nmetrics_listen = "127.0.0.1:{port}"'
    with Daemon(SMALL.replace("[server]", more, 1), faults=True) as daemon:
        yield daemon


def lines(daemon: Daemon, event: str) -> list[dict[str, Any]]:
    """The log's lines of this event."""
    found = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]


def to_nvme(daemon: Daemon, client: Client) -> OpenedNamespace:
    """Puts the blocks, which are then on NVMe alone."""
    space = client.open_namespace(SPEC)
    client.put(space, TOKENS, BLOCKS, durable=True)
    with connect(daemon.target) as operator:
        operator.ask(pb.EvictRequest(tier="host.0"))
    return space


def test_a_line_of_a_call_names_it(daemon: Daemon) -> None:
    """A transfer that fails for a get is logged with the get's call and method. A line outside of
    calls has neither, also after a call."""
    with Client(daemon.target) as client, daemon.faults() as faults:
        space = to_nvme(daemon, client)
        faults.arm("mover.load.before_verify", "error:EIO")
        assert not client.get(space, TOKENS).tokens
        faults.disarm()
        await_true(lambda: bool(lines(daemon, "transfers failed")), "the failed transfer is logged")
    for line in lines(daemon, "transfers failed"):
        assert (line["method"], bool(line["call"])) == ("Acquire", True)
    daemon.stop()
    for event in ("serving", "stopping", "ended"):
        assert lines(daemon, event) and not [
            line for line in lines(daemon, event) if "call" in line or "method" in line
        ]


def test_nothing_of_a_prompt_is_logged_or_measured(daemon: Daemon, port: int) -> None:
    """Neither the log, at the level debug, nor the metrics have a token, or more than 16 digits of
    a hash. The load has puts, gets, lookups, failures and bad calls."""
    with Client(daemon.target) as client, daemon.faults() as faults:
        space = to_nvme(daemon, client)
        hashes = space.hash(TOKENS)
        client.lookup(space, hashes)
        client.get(space, TOKENS)
        client.prefetch(space, hashes)
        faults.arm("mover.load.before_verify", "error:EIO@1x4")
        with connect(daemon.target) as operator:
            operator.ask(pb.EvictRequest(tier="host.0"))
            client.get(space, TOKENS)
            for prefix in (bytes(hashes[0]).hex(), "f" * 64):
                with contextlib.suppress(TierdError):
                    operator.ask(pb.EvictRequest(hashes=[prefix]))
        with contextlib.suppress(TierdError):
            client.put(space, TOKENS, [bytes(8192)] * 4)
        for kind in ("text/plain", "application/openmetrics-text"):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": kind})
            with urllib.request.urlopen(request, timeout=10) as reply:
                assert_private(reply.read().decode(), hashes)
    daemon.stop()
    assert_private(daemon.log, hashes)


def assert_private(text: str, hashes: Any) -> None:
    """No token, and no more of a hash than its first 16 digits."""
    assert [token for token in TOKENS if re.search(rf"\b{token}\b", text)] == []
    assert [name for name in hashes if bytes(name).hex()[:17] in text] == []
