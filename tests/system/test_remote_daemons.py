"""Another daemon answers at a client's TCP address: the client never confuses equal namespace numbers."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.system.relay import Relay
from tests.system.sdk import BIG, HOST, await_nothing_held, put, right
from tests.system.tcp import free_port, remote_config
from tests.system.warm import Daemon
from tierd.client import AsyncClient, Client, NamespaceSpec
from tierd.core.formats.model import BlockStatus
from tierd.testing import chain, content_of

COUNT = 3
SEEDS = itertools.count(1)
KINDS = [(Client, "", False), (Client, "?codec=lz4", True), (AsyncClient, "", True), (AsyncClient, "?codec=lz4", False)]
NAMES = [f"{kind.__name__}{asking}{' best effort' * careless}" for kind, asking, careless in KINDS]


class Place:
    """Two daemons behind one address. They number the namespaces `spec` and `other` in opposite order."""

    def __init__(self, daemons: list[Daemon], ports: list[int], secret: Path, relay: Relay) -> None:
        self.daemons, self.ports, self.secret, self.relay = daemons, ports, str(secret), relay
        self.watch: Callable[[bytes], None] = lambda part: None
        self.seed = next(SEEDS)
        self.spec, self.other = (
            NamespaceSpec(model=f"{name} {self.seed}", tokens_per_block=16, block_bytes=BIG.block_bytes)
            for name in ("own", "other")
        )
        self.names = chain(self.seed, COUNT)

    def direct(self, which: int) -> Client:
        """A client of one of the daemons."""
        return Client(f"127.0.0.1:{self.ports[which]}", credential_file=self.secret)

    def turn(self) -> None:
        """From now on the second daemon answers."""
        self.relay.turn(("127.0.0.1", self.ports[1]))


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Daemon], list[int], Path]]:
    """Two daemons with one secret."""
    roots, ports = [tmp_path_factory.mktemp(name) for name in ("first", "second")], [free_port(), free_port()]
    first, second = (Daemon(remote_config(root, port)) for root, port in zip(roots, ports, strict=True))
    with first, second:
        yield [first, second], ports, roots[0] / "secret"
        first.kill()
        second.kill()


@pytest.fixture
def place(daemons: tuple[list[Daemon], list[int], Path]) -> Iterator[Place]:
    """The second daemon has wrong bytes for the same hashes, in a namespace that has spec's number."""
    held: list[Place] = []

    def seen(part: bytes) -> bytes:
        held[0].watch(part)
        return part

    with Relay(("127.0.0.1", 0), ("127.0.0.1", daemons[1][0]), change=seen) as relay:
        held.append(Place(*daemons, relay))
        place = held[0]
        with place.direct(0) as first, place.direct(1) as second:
            ids = [first.open_namespace(spec).id for spec in (place.other, place.spec)]
            theirs = [second.open_namespace(spec) for spec in (place.spec, place.other)]
            assert ids == [space.id for space in theirs], "each has the number that the other one has there"
            wrong = [content_of(name, BIG.block_bytes) for name in chain(1000 + place.seed, COUNT)]
            assert second.put(theirs[1], place.names, wrong).stored == COUNT
            yield place
            assert right(second.get(theirs[1], place.names).views, 1000 + place.seed) == COUNT, "they are who they were"
    for daemon in place.daemons:
        await_nothing_held(daemon, "streams")


async def told(result: Any) -> Any:
    """The result of a call of either kind of client."""
    return await result if inspect.isawaitable(result) else result


def blocks(place: Place) -> list[np.ndarray]:
    return [content_of(name, BIG.block_bytes) for name in place.names]


@pytest.mark.parametrize("verb", ["lookup", "prefetch", "put", "get"])
@pytest.mark.parametrize(("kind", "asking", "careless"), KINDS, ids=NAMES)
async def test_number_of_another_daemon(place: Place, kind: Any, asking: str, careless: bool, verb: str) -> None:
    """After a change of daemons, the first call opens its namespace there and touches no other namespace."""
    client = kind(f"127.0.0.1:{place.relay.port}{asking}", credential_file=place.secret, best_effort=careless)
    space = await told(client.open_namespace(place.spec))
    assert (await told(client.put(space, place.names[:1], blocks(place)[:1]))).stored == 1
    place.turn()
    if verb == "lookup":
        assert (await told(client.lookup(space, place.names))).tokens == 0
    if verb == "prefetch":
        assert await told(client.prefetch(space, place.names)) == 0
    if verb == "get":
        assert (await told(client.get(space, place.names))).blocks == 0
    assert (await told(client.put(space, place.names, blocks(place)))).statuses.tolist() == [BlockStatus.READY] * COUNT
    assert right((await told(client.get(space, place.names))).views, place.seed) == COUNT
    await told(client.close())
    with place.direct(1) as second:
        assert right(second.get(second.open_namespace(place.spec), place.names).views, place.seed) == COUNT


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize(("kind", "asking", "careless"), KINDS, ids=NAMES)
async def test_daemon_changes_under_a_stream(place: Place, kind: Any, asking: str, careless: bool, verb: str) -> None:
    """A put or get cut off in its second block by a change of daemons is repeated in full on the new one."""
    client = kind(f"127.0.0.1:{place.relay.port}{asking}", credential_file=place.secret, best_effort=careless)
    space = await told(client.open_namespace(place.spec))
    with place.direct(verb == "get") as filled:  # for a get both have the blocks
        assert verb == "put" or put(filled, filled.open_namespace(place.spec), place.seed, COUNT)
    if verb == "get":
        assert (await told(client.put(space, place.names, blocks(place)))).stored == COUNT
    mark, turned = blocks(place)[1][1 << 20 :][:64].tobytes(), []

    def watch(part: bytes) -> None:
        if not turned and mark in part:
            turned.append(part)
            place.turn()

    place.watch = watch
    if verb == "put":
        assert (await told(client.put(space, place.names, blocks(place)))).stored == COUNT
    out = np.zeros((COUNT, BIG.block_bytes), dtype=np.uint8)
    assert (await told(client.get(space, place.names, out=out))).blocks == COUNT
    assert turned and right(list(out), place.seed) == COUNT
    await told(client.close())
    with place.direct(1) as second:
        assert right(second.get(second.open_namespace(place.spec), place.names).views, place.seed) == COUNT


@pytest.mark.parametrize("careless", [False, True], ids=["", "best effort"])
def test_restart(tmp_path: Path, careless: bool) -> None:
    """A daemon that restarts with its state serves a TCP client's blocks; without state it stores
    them anew."""
    port, results = free_port(), []
    config = remote_config(tmp_path, port, host=HOST)
    place = {"target": f"127.0.0.1:{port}", "credential_file": str(tmp_path / "secret"), "best_effort": careless}
    with Client(**place) as client:
        space = None
        for _life in range(2):
            with Daemon(config) as daemon:
                space = space or client.open_namespace(BIG)
                results.append(put(client, space, 1, COUNT).statuses.tolist())
                assert right(client.get(space, chain(1, COUNT)).views, 1) == COUNT
                daemon.restart()
                assert right(client.get(space, chain(1, COUNT)).views, 1) == COUNT
                assert put(client, space, 1, COUNT).statuses.tolist() == [BlockStatus.EXISTS] * COUNT
                daemon.kill()
    assert results == [[BlockStatus.READY] * COUNT] * 2
