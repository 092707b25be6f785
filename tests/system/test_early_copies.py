"""Gets that begin to copy before the daemon has answered: nothing but what it leases, byte for byte, however pages change hands meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.depth import count
from tests.system.damaged import flip, pages
from tests.system.test_restart import wipe_arena
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.client import Client, NamespaceSpec
from tierd.client.early import EarlyCopy
from tierd.client.local import LocalTransport
from tierd.client.mailbox import Mailbox
from tierd.testing import chain, content_of

SPEC = NamespaceSpec(model="early", tokens_per_block=16, block_bytes=8192)
TIGHT = """\
nvme = []
[[host]]
capacity = "1 MiB"
segment = "256 KiB"
eviction = "lru"
"""
LARGE = NamespaceSpec(model="large", tokens_per_block=16, block_bytes=1 << 20)
ROOMY = """\
nvme = []
[[host]]
capacity = "64 MiB"
segment = "4 MiB"
"""
BLOCKS, SEQUENCES = 8, 40
ROUNDS = count(test=1_500, nightly=50_000, weekly=500_000)


@pytest.fixture(autouse=True)
def asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of which every get asks (test_one_sided.py has the others)."""
    monkeypatch.setattr(Mailbox, "takes_gets", False)


@pytest.fixture
def covered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each get needed not copy any more."""
    found, inner = list[int](), EarlyCopy.covers

    def covers(self: EarlyCopy, handles: Any) -> int:
        found.append(inner(self, handles))
        return found[-1]

    monkeypatch.setattr(EarlyCopy, "covers", covers)
    return found


def blocks_of(number: int) -> list[np.ndarray]:
    """What a sequence holds."""
    return [content_of(name, SPEC.block_bytes) for name in chain(number, BLOCKS)]


def large(number: int) -> list[np.ndarray]:
    """What a sequence of large blocks holds."""
    return [content_of(name, LARGE.block_bytes) for name in chain(number, BLOCKS)]


def test_the_second_get_copies_early(covered: list[int]) -> None:
    """What one get gave, the next one of the same sequence copies while it asks; of one buffer or many, with the same bytes."""
    with Daemon(TIGHT) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SPEC)
        client.put(space, chain(1, BLOCKS), blocks_of(1))
        for out in (np.zeros((BLOCKS, SPEC.block_bytes), np.uint8), bytearray(BLOCKS * SPEC.block_bytes)):
            for _ in range(2):
                np.frombuffer(out, np.uint8)[:] = 7
                assert client.get(space, chain(1, BLOCKS), out=out).blocks == BLOCKS
                assert bytes(out) == b"".join(block.tobytes() for block in blocks_of(1))
        assert covered == [0, *[BLOCKS] * 3]


def test_no_early_copy_is_served_without_an_answer() -> None:
    """What has left since the last get is a miss, though its bytes may lie in the buffer; so is everything once the epoch has ended."""
    with Daemon(TIGHT) as daemon, Client(daemon.target) as client, connect(daemon.target) as operator:
        space, out = client.open_namespace(SPEC), np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        client.put(space, chain(1, BLOCKS), blocks_of(1))
        assert client.get(space, chain(1, BLOCKS), out=out).blocks == BLOCKS
        with client.acquire(space, chain(1, BLOCKS)):  # whose pins keep the pages what they are
            operator.ask(pb.BumpEpochRequest(model=SPEC.model))
            assert client.get(client.open_namespace(SPEC), chain(1, BLOCKS), out=out).blocks == 0


def test_the_first_get_copies_while_it_is_verified(covered: list[int]) -> None:
    """What is large is copied while the daemon looks at it, also by a client that has mapped nothing yet; from then on nothing is told before."""
    with Daemon(ROOMY) as daemon, Client(daemon.target) as writer, Client(daemon.target) as reader:
        writer.put(writer.open_namespace(LARGE), chain(1, BLOCKS), large(1))
        space, out = reader.open_namespace(LARGE), np.zeros((BLOCKS, LARGE.block_bytes), np.uint8)
        assert reader.get(space, chain(1, BLOCKS), out=out).blocks == BLOCKS
        assert covered == [BLOCKS] and (out == np.stack(large(1))).all()


@pytest.mark.parametrize("bad", range(BLOCKS))
def test_what_is_no_longer_what_was_put_is_not_served(covered: list[int], bad: int) -> None:
    """A block that changed since its commit is a miss, with what follows it, though it may have been copied early; those before it are served, and again by the next get."""
    with Daemon(ROOMY) as daemon, Client(daemon.target) as client:
        space, names = client.open_namespace(LARGE), chain(1, BLOCKS)
        client.put(space, names, large(1))
        flip(pages(daemon, names)[names[bad].tobytes()], 4097)
        for _ in range(2):
            out = np.zeros((BLOCKS, LARGE.block_bytes), np.uint8)
            assert client.get(space, names, out=out).blocks == bad
            assert (out[:bad] == np.stack(large(1))[:bad]).all()
        assert set(covered) <= {bad, 0}


@pytest.mark.parametrize("bad", [(3,), (6,), (7, 5)])
def test_every_hit_is_verified_and_some_are_bad(bad: tuple[int, ...]) -> None:
    """Where every hit is verified, a bad page has the others looked at once more: the answer, and those of the calls that follow, are each to their own question."""
    with Daemon(ROOMY + 'verify = "always"\n') as daemon, Client(daemon.target) as client:
        space = client.open_namespace(LARGE)
        for number in (1, 2):
            client.put(space, chain(number, BLOCKS), large(number))
        names, out = chain(1, BLOCKS), np.zeros((BLOCKS, LARGE.block_bytes), np.uint8)
        for block in bad:
            flip(pages(daemon, names)[names[block].tobytes()], 4097)
        for number, good in ((1, min(bad)), (2, BLOCKS), (1, min(bad)), (2, BLOCKS)):
            out[:] = 0
            assert client.get(space, chain(number, BLOCKS), out=out).blocks == good
            assert (out[:good] == np.stack(large(number))[:good]).all()


def test_an_early_copy_of_a_daemon_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon with a new arena takes the place of the one that a get was sent to, and its handles look just like those that were copied: its bytes are served."""
    with Daemon(TIGHT) as daemon, Client(daemon.target) as client:
        space, out, ask = (
            client.open_namespace(SPEC),
            np.zeros((BLOCKS, SPEC.block_bytes), np.uint8),
            LocalTransport.call,
        )
        client.put(space, chain(1, BLOCKS), blocks_of(1))
        assert client.get(space, chain(1, BLOCKS), out=out).blocks == BLOCKS
        answers = [_handles_of(client)]

        def ask_late(self: Any, method: str, request: Any, **given: Any) -> Any:
            late.undo()
            given.pop("meanwhile").run()
            daemon.kill()
            wipe_arena(daemon)
            daemon.start()
            with Client(daemon.target) as other:
                other.put(other.open_namespace(SPEC), chain(1, BLOCKS), blocks_of(2))
                answers.append(_handles_of(other))
            return ask(self, method, request, **given)

        with monkeypatch.context() as late:
            late.setattr(LocalTransport, "call", ask_late)
            assert client.get(space, chain(1, BLOCKS), out=out).blocks == BLOCKS
        assert answers[0] == answers[1]
        assert bytes(out) == b"".join(block.tobytes() for block in blocks_of(2))


def _handles_of(client: Client) -> bytes:
    with client.acquire(client.open_namespace(SPEC), chain(1, BLOCKS)) as lease:
        return lease.handles.tobytes()


def test_right_bytes_while_pages_change_hands(covered: list[int]) -> None:
    """Three times what the tier holds is put and got by two clients in turns, with evictions in the middle of gets: each block that a get counts is the one asked for."""
    chance, outcomes = random.Random(3), Counter[str]()
    with Daemon(TIGHT) as daemon, Client(daemon.target) as one, Client(daemon.target) as other:
        spaces = {client: client.open_namespace(SPEC) for client in (one, other)}
        out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        for _ in range(ROUNDS):
            client, number = chance.choice((one, other)), min(int(chance.expovariate(0.12)), SEQUENCES)
            if chance.random() < 0.4:
                client.put(spaces[client], chain(number, BLOCKS), blocks_of(number))
                continue
            out[:] = 0
            got = client.get(spaces[client], chain(number, BLOCKS), out=out).blocks
            assert all((out[i] == block).all() for i, block in enumerate(blocks_of(number)[:got])), number
            outcomes["whole" if got == BLOCKS else "part" if got else "miss"] += 1
    assert min(outcomes["whole"], outcomes["miss"]) > ROUNDS // 50, outcomes
    assert Counter(covered)[BLOCKS] > ROUNDS // 50


def test_right_bytes_where_pages_are_reused_in_the_middle(monkeypatch: pytest.MonkeyPatch, covered: list[int]) -> None:
    """Pages that were copied early, and hold other blocks when the daemon comes to the question: what it names is copied again from there, or is missed."""
    with Daemon(TIGHT) as daemon, Client(daemon.target) as client, Client(daemon.target) as other:
        space, theirs = client.open_namespace(SPEC), other.open_namespace(SPEC)
        out, ask = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8), LocalTransport.call
        for again in (True, False):
            client.put(space, chain(1, BLOCKS), blocks_of(1))
            assert client.get(space, chain(1, BLOCKS), out=out).blocks == BLOCKS

            def ask_late(self: Any, method: str, request: Any, *, again: bool = again, **given: Any) -> Any:
                """The copy first, then others' puts, which displace what was copied; the question after them."""
                if method == "Acquire" and given.get("meanwhile") is not None:
                    given.pop("meanwhile").run()
                    for number in (*range(2, 20), *(range(1, 2) if again else ())):
                        other.put(theirs, chain(number, BLOCKS), blocks_of(number))
                return ask(self, method, request, **given)

            with monkeypatch.context() as late:
                late.setattr(LocalTransport, "call", ask_late)
                out[:] = 0
                got = client.get(space, chain(1, BLOCKS), out=out).blocks
            assert got == (BLOCKS if again else 0)
            assert all((out[i] == block).all() for i, block in enumerate(blocks_of(1)[:got]))
        assert covered[0] == 0
