"""`tierctl explain`: each planted cause is named, by a request's id, a block's hash or a prompt's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.system.blocks import await_true
from tests.system.raw import RawClient
from tests.system.test_corruption import flip_bit
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.cli import ctl
from tierd.cli.admin import connect
from tierd.client import Client, Group, NamespaceSpec, OpenedNamespace
from tierd.core.formats.block import KVGeometry
from tierd.decisions.causes import Cause
from tierd.errors import Overloaded
from tierd.testing import Faults, content_of
from tierd.tiers.store.slots import HEADER_BYTES

SIZE, BLOCK_BYTES, COUNT = 16, 64 << 10, 6
PROMPT = list(range(SIZE * COUNT))
MEMORY = '[[host]]\ncapacity = "4 MiB"\nsegment = "1 MiB"\n'
DISK = '[[nvme]]\ncapacity = "64 MiB"\nsegment = "4 MiB"\n'
SPEC = NamespaceSpec(model="llama", tokens_per_block=SIZE, block_bytes=BLOCK_BYTES)
FILL = NamespaceSpec(model="other", tokens_per_block=SIZE, block_bytes=BLOCK_BYTES)


class World:
    """A daemon, a client that has stored the prompt, and the operator's program."""

    def __init__(self, daemon: Daemon, client: Client, spec: NamespaceSpec, root: Path) -> None:
        self.daemon, self.client, self.root = daemon, client, root
        self.space = client.open_namespace(spec)
        self.put(self.space)

    def put(self, space: OpenedNamespace, tokens: list[int] = PROMPT, *, durable: bool = False) -> None:
        """Stores a prompt."""
        blocks = [content_of(name, BLOCK_BYTES) for name in space.hash(tokens)]
        assert self.client.put(space, tokens[: len(blocks) * SIZE], blocks, durable=durable)

    def fill(self, count: int = 80) -> None:
        """Stores so many other blocks, one a put."""
        space = self.client.open_namespace(FILL)
        for i in range(count):
            self.put(space, list(range(1000 * i, 1000 * i + SIZE)))

    def ctl(self, *arguments: str) -> Any:
        """The JSON of a verb."""
        done = CliRunner().invoke(ctl.cli, [*arguments, "--json", "--target", self.daemon.target], prog_name="tierctl")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def request(self, name: str = "request-7") -> dict[str, Any]:
        """The latest decision about a request."""
        await_true(lambda: bool(self.ctl("explain", name)["requests"]), f"a record of {name}")
        found: dict[str, Any] = self.ctl("explain", name)["requests"][0]
        assert found["request"] == name
        return found

    def prompt(self, tokens: list[int] = PROMPT) -> list[dict[str, Any]]:
        """The causes of a prompt's blocks, of a token file."""
        path = self.root / "prompt.json"
        path.write_text(json.dumps(tokens), encoding="utf-8")
        found: list[dict[str, Any]] = self.ctl("explain", str(path), "--namespace", str(self.space.id))["blocks"]
        return found

    def get(self) -> int:
        """Gets the prompt as the request."""
        return self.client.get(self.space, PROMPT, request="request-7").tokens


@contextmanager
def world(tmp_path: Path, config: str = MEMORY, spec: NamespaceSpec = SPEC, **options: Any) -> Iterator[World]:
    if "[[nvme]]" not in config:
        config = "nvme = []\n" + config
    with Daemon(config, **options) as daemon, Client(daemon.target) as client:
        yield World(daemon, client, spec, tmp_path)


def hit_near(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        assert its.get() == len(PROMPT)
        found = its.request()
        assert found["tier_tokens"] == {"host.0": len(PROMPT)} and found["waited_s"] == 0
        yield found["cause"]


def hit_far(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path, MEMORY + DISK) as its:
        its.put(its.space, durable=True)
        its.ctl("evict", "--tier", "host.0")
        assert its.get() == len(PROMPT)
        found = its.request()
        assert found["tier_tokens"] == {"nvme.0": len(PROMPT)} and found["waited_s"] > 0
        assert f"{1000 * found['waited_s']:.3g} ms" in found["cause"]["text"]
        yield found["cause"]


def never_stored(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        tokens = PROMPT + [7] * SIZE
        assert its.client.get(its.space, tokens, request="request-7").tokens == len(PROMPT)
        found = its.request()
        assert (found["tokens_asked"], found["tokens_missed"]) == (len(tokens), SIZE)
        assert found["cause"]["hash"] == its.space.hash(tokens)[-1].tobytes().hex()
        its.put(its.space, tokens)
        assert its.request()["cause"] == found["cause"], "a later put does not change what was so"
        yield found["cause"]


def evicted(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        its.fill()
        assert its.get() == 0
        found = its.request()["cause"]
        facts = found["facts"]
        assert found["tier"] == "host.0" and found["ago_s"] >= 0 and facts["policy"] in found["text"]
        assert 0 < int(facts["rank"]) <= int(facts["candidates"]) and float(facts["idle_s"]) > 0
        assert int(facts["session"]) and "put" in found["text"]
        assert its.ctl("explain", found["hash"][:16])["blocks"][0]["cause"] == found["cause"]
        assert its.prompt()[0]["facts"] == facts
        yield found


CASES: dict[Cause, Callable[[Path], Iterator[Any]]] = {
    Cause.HIT_NEAR: hit_near,
    Cause.HIT_FAR: hit_far,
    Cause.NEVER_STORED: never_stored,
    Cause.EVICTED: evicted,
}


@pytest.mark.parametrize("cause", CASES)
def test_a_planted_cause_is_named(cause: Cause, tmp_path: Path) -> None:
    """After a situation with one cause, `tierctl explain` names that cause."""
    for found in CASES[cause](tmp_path):
        assert found["cause"] == cause, found
