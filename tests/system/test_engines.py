"""`tierctl engines` against a real daemon and clients that describe their engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from tierd.cli import ctl
from tierd.client import Client, KVGeometry, NamespaceSpec
from tierd.integrations.facts import EngineFacts
from tierd.testing import Daemon

FACTS = EngineFacts("vllm", "0.32.0", "TierdConnector", "llama", "sha256_cbor", "", "16", role="worker")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


def engine(daemon: Daemon, facts: EngineFacts, *, layout: str) -> Client:
    """A client that describes its engine and has opened that engine's namespace."""
    client = Client(daemon.target, name=f"vllm {layout}")
    client.introduce(facts.words())
    geometry = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", layout=layout)
    client.open_namespace(NamespaceSpec("llama", 16, 4096, geometry=geometry))
    return client


def shown(daemon: Daemon, *options: str) -> str:
    result = CliRunner().invoke(ctl.cli, ["engines", "--target", daemon.target, *options], prog_name="tierctl")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_engines_are_listed_with_what_keeps_them_apart(daemon: Daemon) -> None:
    """The list shows engines with their namespaces; advice names two that differ only in their layout."""
    assert "no engine is connected" in shown(daemon)
    with engine(daemon, FACTS, layout="NHD"), engine(daemon, FACTS, layout="HND"), Client(daemon.target) as plain:
        plain.open_namespace(NamespaceSpec("other", 16, 4096))
        answer: dict[str, Any] = json.loads(shown(daemon, "--json"))
        assert [row["engine"]["version"] for row in answer["engines"]] == ["0.32.0", "0.32.0"]
        assert [row["namespaces"] for row in answer["engines"]] == [[1], [2]]
        (said,) = answer["advice"]
        assert said["sessions"] == [row["id"] for row in answer["engines"]]
        picture = shown(daemon)
    assert "vllm NHD" in said["fault"] and "vllm HND" in said["fault"] and "KV layouts NHD and HND" in said["fault"]
    assert "VLLM_KV_CACHE_LAYOUT" in picture and "remedy" in picture and "\x1b" not in picture


def test_engines_that_share_are_not_warned(daemon: Daemon) -> None:
    """Two engines of one namespace are listed without advice, and a closed client is listed no more."""
    with engine(daemon, FACTS, layout="NHD"), engine(daemon, FACTS, layout="NHD"):
        answer = json.loads(shown(daemon, "--json"))
        assert [row["namespaces"] for row in answer["engines"]] == [[1], [1]] and answer["advice"] == []
    assert "no engine is connected" in shown(daemon)
