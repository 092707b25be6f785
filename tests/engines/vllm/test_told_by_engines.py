"""tierd's KV events of blocks from a real vLLM engine, beside the engine's events of its own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

from vllm.config import KVEventsConfig

from tests.engines.heard import EVENTS, stored_events
from tests.engines.vllm import tiered
from tests.engines.vllm.connected import BLOCK_TOKENS, await_hits, connector
from tests.engines.vllm.engine import Engine
from tests.engines.vllm.tiered import VERIFIED, flushed, prompt
from tests.system.blocks import await_true
from tierd.events.payloads import Hash, Stored
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(900)
Block = tuple[Hash | None, tuple[int, ...], int, int | None]
"""A published block: the hash of the block before it, its tokens, their number, its group."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(VERIFIED + EVENTS) as daemon:
        yield daemon


def publishing(daemon: Daemon, name: str) -> KVEventsConfig:
    """The settings of vLLM's own publisher, at an address beside the daemon's."""
    address = f"ipc://{daemon.root}/{name}"
    return KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=address, replay_endpoint=f"{address}-replays"
    )


def told(daemon: Daemon, name: str, *, medium: str) -> dict[Hash, Block]:
    """All blocks that a publisher has published for a medium so far."""
    found: dict[Hash, Block] = {}
    for event in stored_events(daemon, name):
        if event.medium == medium:
            found |= blocks_of(event)
    return found


def blocks_of(event: Stored) -> dict[Hash, Block]:
    """The blocks of an event, by hash."""
    parents, size = (event.parent, *event.hashes), event.block_size
    return {
        one: (parents[i], event.tokens[i * size : (i + 1) * size], size, event.group)
        for i, one in enumerate(event.hashes)
    }


def told_of_both(daemon: Daemon, name: str, *, least: int) -> tuple[dict[Hash, Block], dict[Hash, Block]]:
    """vLLM's blocks, at least so many, and tierd's equivalents, once tierd has published all of them."""
    theirs = told(daemon, name, medium="GPU")
    assert len(theirs) >= least
    await_true(lambda: theirs.keys() <= told(daemon, "events", medium="CPU").keys(), "tierd tells of every block")
    ours = told(daemon, "events", medium="CPU")
    return theirs, {one: ours[one] for one in theirs}


def test_the_connectors_blocks(daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """tierd publishes vLLM's hash, parent, tokens and group of each block, generated tokens
    included. Under a salt it omits the tokens, which alone do not determine the block."""
    llm = engine(make_model(), connector=connector(daemon), kv_events_config=publishing(daemon, "vllm"))
    await_hits(llm, prompt(100, 70))
    llm.generate([prompt(1, 200)], max_tokens=60)
    llm.settle()
    plain, ours = told_of_both(daemon, "vllm", least=259 // BLOCK_TOKENS)
    assert ours == plain and {len(tokens) for _, tokens, _, _ in ours.values()} == {BLOCK_TOKENS}
    llm.generate([prompt(1, 200)], max_tokens=2, salts=["salt"])
    llm.settle()
    theirs, ours = told_of_both(daemon, "vllm", least=len(plain) + 200 // BLOCK_TOKENS)
    salted = theirs.keys() - plain.keys()
    assert {one: ours[one] for one in salted} == {one: (theirs[one][0], (), 0, 0) for one in salted}


def test_a_restart_forgets_no_names(
    daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """After a restart tierd publishes stored blocks under vLLM's hashes once vLLM hits them; none
    is stored twice."""
    llm = engine(make_model(), connector=connector(daemon), kv_events_config=publishing(daemon, "vllm"))
    before = told(daemon, "vllm", medium="GPU")
    llm.generate([prompt(3, 200)], max_tokens=2)
    llm.settle()
    named = told(daemon, "vllm", medium="GPU").keys() - before.keys()
    stored = len(flushed(daemon))
    daemon.restart()
    await_true(lambda: bool(told(daemon, "events", medium="STORAGE")), "the store's blocks are told")
    assert named and not named & told(daemon, "events", medium="STORAGE").keys()
    await_hits(llm, prompt(3, 200))
    llm.settle()
    await_true(lambda: named <= told(daemon, "events", medium="STORAGE").keys(), "they are told by vLLM's hashes")
    assert len(flushed(daemon)) == stored


def test_the_tiers_blocks(daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """For a chunk of vLLM's offloading tierd publishes vLLM's hash, parent and group; a tier gets
    no tokens."""
    of_blocks = tiered.connector(daemon, extra={"blocks_per_chunk": 1})
    llm = engine(make_model(), connector=of_blocks, kv_events_config=publishing(daemon, "offloading"))
    for length in (100, 200):  # the second time some chunks are stored: the rest has a parent of another job
        llm.generate([prompt(2, length)], max_tokens=2)
        llm.settle()
    assert llm.reset(connector=True)
    theirs, ours = told_of_both(daemon, "offloading", least=200 // BLOCK_TOKENS)
    assert ours == {one: (parent, (), 0, group) for one, (parent, _, _, group) in theirs.items()}
