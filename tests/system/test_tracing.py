"""Traces over OTLP, from a span of the client's user to a transfer of the daemon."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed: pip install 'tierd[otel]'")
pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.grpc", reason="OpenTelemetry is not installed: pip install 'tierd[otel]'"
)

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.system.collector import Collector
from tests.system.tcp import free_port
from tierd import tracing
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.client import AsyncClient, Client, NamespaceSpec
from tierd.errors import DeadlineExceeded
from tierd.testing import Daemon
from tierd.testing.daemon import SMALL

SPEC = NamespaceSpec(model="traced", tokens_per_block=16, block_bytes=4096)
TOKENS = range(1_234_567_000, 1_234_567_064)
"""Four blocks of tokens that nothing else resembles."""
BLOCKS = [bytes([number]) * 4096 for number in range(4)]
CACHE = "tierd.v1.Cache/"


@pytest.fixture(scope="module")
def user() -> Iterator[tuple[Any, TracerProvider]]:
    """The tracer of the client's user, whose provider is the process's own."""
    provider = TracerProvider(resource=Resource({"service.name": "engine"}), shutdown_on_exit=False)
    trace.set_tracer_provider(provider)
    return provider.get_tracer("test"), provider


@pytest.fixture
def collector(user: tuple[Any, TracerProvider]) -> Iterator[Collector]:
    """A collector that gets the user's spans too."""
    with Collector() as collector:
        processor = SimpleSpanProcessor(OTLPSpanExporter(endpoint=collector.url, timeout=10))
        user[1]._active_span_processor._span_processors = (processor,)
        yield collector


def configured(url: str, server: str = "") -> str:
    return (
        SMALL.replace("[server]", f"[server]\nlog_level = 'debug'\n{server}", 1)
        + f"\n[telemetry]\notlp_endpoint = '{url}'\n"
    )


def test_a_trace_goes_from_the_user_to_the_tier(user: tuple[Any, TracerProvider], collector: Collector) -> None:
    """Spans of the user, the client and the daemon have one trace and the right parents, down to the
    transfer from NVMe. No span has a token, or more than twelve digits of a hash. The
    metrics have the traces as exemplars."""
    port = free_port()
    server = f"metrics_listen = '127.0.0.1:{port}'"
    with Daemon(configured(collector.url, server)) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        with user[0].start_as_current_span("request"):
            client.put(space, TOKENS, BLOCKS, durable=True)
        with user[0].start_as_current_span("first"):
            client.acquire(space, space.hash(TOKENS)).release()
        with connect(daemon.target) as operator:
            operator.ask(pb.EvictRequest(tier="host.0"))
        with user[0].start_as_current_span("again"):
            assert client.get(space, TOKENS).tokens == 64
        assert client.get(space, TOKENS).tokens == 64  # in no trace
        text = scraped(port)
        hashes = [bytes(name).hex() for name in space.hash(TOKENS)]
    put, get = collector.one("tierd put"), collector.one("tierd get")
    assert (put.parent, get.parent) == (collector.one("request").id, collector.one("again").id)
    assert get.attributes == {"tierd.tokens": 64, "tierd.blocks": 4, "tierd.outcome": "ok"}
    commit = collector.one(f"{CACHE}Commit", of=put)
    assert collector.one("commit", of=commit).attributes["tierd.bytes"] == 4 * 4096
    collector.one("persist", of=commit)
    acquire = collector.one(f"{CACHE}Acquire", of=get)
    assert collector.one("plan", of=acquire).attributes["tierd.tokens"] == 64
    assert collector.one("wait", of=acquire).attributes["tierd.transfers"] == 4
    read = collector.one("transfer nvme.0>host.0", of=acquire)
    assert (read.attributes["tierd.blocks"], read.attributes["tierd.ready_blocks"]) == (4, 4)
    assert read.attributes["tierd.bytes"] == 4 * 4096
    first = collector.one("tierd acquire")
    checked = collector.one("verify", of=collector.one(f"{CACHE}Acquire", of=first))
    assert (checked.attributes["tierd.tier"], checked.attributes["tierd.blocks"]) == ("host.0", 4)
    assert len({span.trace for span in collector.spans}) == 3
    of_daemon = [span for span in collector.spans if span.service == "tierd"]
    assert {span.trace for span in of_daemon} == {put.trace, first.trace, get.trace}
    assert_private(collector, hashes)
    for trace_id in (put.trace, get.trace):
        assert re.search(rf'tierd_call_seconds_bucket.* # {{trace_id="{trace_id}"}}', text)


def scraped(port: int) -> str:
    """The daemon's metrics in the format that has exemplars."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        return str(reply.read().decode())


def assert_private(collector: Collector, hashes: list[str]) -> None:
    """No token and no hash is in any message."""
    text = collector.raw.decode("latin-1") + str([span.attributes for span in collector.spans])
    assert [token for token in TOKENS if str(token) in text] == []
    assert [name for name in hashes if name[:13] in text or bytes.fromhex(name)[:8] in collector.raw] == []


def test_asyncio_and_grpc_carry_the_trace(
    user: tuple[Any, TracerProvider], collector: Collector, tmp_path: Path
) -> None:
    """AsyncClient's verbs, which run in threads, and calls over TCP continue the caller's trace."""
    secret = tmp_path / "secret"
    secret.write_text("a-credential-of-enough-characters\n")
    secret.chmod(0o600)
    address = f"127.0.0.1:{free_port()}"
    server = f"tcp_listen = '{address}'\ntcp_credential_file = '{secret}'"

    async def both(local: str) -> None:
        async with AsyncClient(local) as client:
            space = await client.open_namespace(SPEC)
            with user[0].start_as_current_span("async"):
                assert not (await client.acquire(space, space.hash(TOKENS))).tokens
        async with AsyncClient(address, credential_file=str(secret)) as client:
            space = await client.open_namespace(SPEC)
            with user[0].start_as_current_span("remote"):
                assert (await client.get(space, TOKENS)).tokens == 0

    with Daemon(configured(collector.url, server)) as daemon:
        asyncio.run(both(daemon.target))
    for name, verb, call in (("async", "acquire", "Acquire"), ("remote", "get", "Get")):
        top = collector.one(name)
        collector.one(f"{CACHE}{call}", of=collector.one(f"tierd {verb}", of=top))


def test_a_failed_call_says_so_without_its_text(user: tuple[Any, TracerProvider], collector: Collector) -> None:
    """The span of a failed call has the error's class as its outcome, and no event with its text."""
    with Daemon(configured(collector.url)) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        with user[0].start_as_current_span("request"), pytest.raises(DeadlineExceeded):
            client.get(space, TOKENS, timeout_s=0.0)
    failed = collector.one("tierd get")
    assert failed.is_failed and failed.attributes["tierd.outcome"] == "DeadlineExceeded"
    assert b"deadline has passed" not in collector.raw


@pytest.mark.parametrize(
    "parent",
    [
        "x" * 55,
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-00",
        "1" * 55,
        "é" * 55,
    ],
)
def test_only_a_sampled_parent_is_followed(parent: str) -> None:
    """A malformed traceparent, and one that is not sampled, make no span."""
    assert tracing._context_of(parent) is None
    assert tracing._context_of("00-" + "1" * 32 + "-" + "1" * 16 + "-01") is not None


def test_a_collector_that_does_not_answer_slows_nothing(user: tuple[Any, TracerProvider]) -> None:
    """Calls go on while the collector accepts connections and never answers. The queue is bounded,
    and the daemon ends in its time, with one line about it."""
    user[1]._active_span_processor._span_processors = ()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Daemon(configured(url)) as daemon, Client(daemon.target) as client:
            space = client.open_namespace(SPEC)
            hashes = space.hash(TOKENS)
            with user[0].start_as_current_span("request"):
                for _ in range(tracing.QUEUE_SPANS // 2 + 100):  # each makes two or more
                    assert not client.acquire(space, hashes, timeout_s=10.0).tokens
            assert daemon.stop() == 0
            assert daemon.log.count("spans not exported") == 1
            assert "opentelemetry" not in daemon.log, "a line for each dropped span would slow calls"
