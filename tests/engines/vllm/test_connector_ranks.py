"""TierdConnector on two tensor parallel ranks: each process stores its part, and a hit needs both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")


from tests.depth import report
from tests.engines.vllm.connected import BLOCK_TOKENS, CLOSE, assert_same, await_hits, connector, counted, to_the_store
from tests.engines.vllm.engine import Engine
from tests.engines.vllm.tiered import VERIFIED, flushed, found_bad, pages_like, prompt, spoil
from tests.system.damaged import Place, copy
from tierd.testing import Daemon
from tierd.tiers.store.slots import HEADER_BYTES

pytestmark = [pytest.mark.timeout(900)]
RANKS = 2
BLOCKS = 96
"""vLLM's blocks: few, so that each is checked."""
OF_RANKS: dict[str, Any] = {"tensor_parallel_size": RANKS, "num_gpu_blocks_override": BLOCKS}
PROMPT_TOKENS = 200
WHOLE_BLOCKS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS
WHOLE = WHOLE_BLOCKS * BLOCK_TOKENS
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that verifies blocks at each hit."""
    with Daemon(VERIFIED, faults=True) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def alone(engine: Start, make_model: Callable[..., Path]) -> Engine:
    """An engine of two ranks without tierd."""
    return engine(make_model(), **OF_RANKS)


@pytest.fixture(scope="module")
def llm(daemon: Daemon, engine: Start, make_model: Callable[..., Path]) -> Engine:
    """An engine of two ranks with tierd; each test uses its own prompts."""
    llm = engine(make_model(), connector=connector(daemon), **OF_RANKS)
    await_hits(llm, prompt(100, 70))
    return llm


def loads(llm: Engine) -> float:
    return counted(llm.metrics(), "loads")


def loaded_blocks(llm: Engine) -> float:
    """The blocks that all ranks together have loaded."""
    return counted(llm.metrics(), "loaded_blocks")


def test_restored_on_both_ranks(llm: Engine, alone: Engine, daemon: Daemon) -> None:
    """Two ranks restored from memory or NVMe answer bit-equal to two without tierd; each loads its part."""
    asked = [prompt(1, PROMPT_TOKENS)]
    known = alone.generate(asked, max_tokens=24)[0]
    computed = llm.generate(asked, max_tokens=24)[0]
    assert computed.cached == 0
    assert_same(known, computed)
    for move in (lambda: None, lambda: to_the_store(daemon)):
        assert llm.reset()
        move()
        before = loads(llm), loaded_blocks(llm)
        restored = llm.generate(asked, max_tokens=24)[0]
        assert restored.cached == WHOLE
        assert (loads(llm) - before[0], loaded_blocks(llm) - before[1]) == (RANKS, RANKS * WHOLE_BLOCKS)
        assert_same(known, restored)
    report("vLLM connector, two ranks", loaded_blocks=loaded_blocks(llm), bytes=counted(llm.metrics(), "loaded_bytes"))


def test_what_one_rank_has_is_no_hit(llm: Engine, alone: Engine) -> None:
    """Blocks that only rank 0 has stored are neither claimed nor loaded, until rank 1 stores them too."""
    asked = [prompt(3, PROMPT_TOKENS)]
    known = alone.generate(asked, max_tokens=24)[0]
    assert llm.ask("on_ranks", what="is_writer", given=[[0]]) == [True, False]
    try:
        before = loads(llm), counted(llm.metrics(), "saved_blocks")
        for _ in range(2):
            answer = llm.generate(asked, max_tokens=24)[0]
            assert answer.cached == 0 and llm.reset()
            assert_same(known, answer)
        assert loads(llm) == before[0] and counted(llm.metrics(), "saved_blocks") > before[1]
    finally:
        assert llm.ask("on_ranks", what="is_writer", given=[[0, 1]]) == [True, True]
    llm.generate(asked, max_tokens=24)
    assert llm.reset()
    restored = llm.generate(asked, max_tokens=24)[0]
    assert restored.cached == WHOLE
    assert_same(known, restored)


@pytest.mark.parametrize("number", [0, 3])
def test_one_ranks_damaged_block(llm: Engine, alone: Engine, daemon: Daemon, number: int) -> None:
    """If one rank cannot load a block, both compute it and all after it; the other loads all its
    own. If memory and store have bad copies, one request finds both and saves the block anew."""
    asked, known = [prompt(10 + number, PROMPT_TOKENS)], {place for place, _ in flushed(daemon)}
    expected = alone.generate(asked, max_tokens=24)[0]
    llm.generate(asked, max_tokens=24)
    assert llm.reset()
    bad = found_bad(daemon)
    damage_one_rank(daemon, known, number)
    for loaded in (WHOLE_BLOCKS + number, RANKS * WHOLE_BLOCKS):
        before = loaded_blocks(llm)
        answer = llm.generate(asked, max_tokens=24)[0]
        assert_same(expected, answer, within=CLOSE)
        assert loaded_blocks(llm) - before == loaded and llm.reset()
        assert found_bad(daemon) == [count + 1 for count in bad]


def damage_one_rank(daemon: Daemon, known: set[Place], number: int) -> None:
    """Corrupts one rank's number-th block that is not in `known`, in memory and in the store."""
    stored = [(place, meta) for place, meta in flushed(daemon) if place not in known and meta["position"] == number]
    assert len({int(meta["namespace"]) for _, meta in stored}) == RANKS
    place, meta = stored[-1]
    (page,) = pages_like(daemon, copy(place, HEADER_BYTES + 64)[HEADER_BYTES:])
    spoil(place._replace(offset=place.offset + HEADER_BYTES), int(meta["logical_length"]))
    spoil(page, int(meta["logical_length"]))


def test_many_at_once(llm: Engine, alone: Engine) -> None:
    """Prompts with a common prefix, more than run at once, answer the same computed and restored."""
    common = prompt(12, 128)
    asked = [common + prompt(20 + i, 40 + 16 * i) for i in range(8)]
    known = alone.generate(asked, max_tokens=16)
    for restored in (False, True):
        answers = llm.generate(asked, max_tokens=16)
        assert not restored or all(answer.cached >= len(common) for answer in answers)
        for first, second in zip(known, answers, strict=True):
            assert_same(first, second, within=CLOSE)
        assert llm.reset()


def test_a_daemon_that_dies_in_a_load(llm: Engine, alone: Engine, daemon: Daemon) -> None:
    """A daemon killed between the two ranks' loads costs recomputation, not the request."""
    asked = [prompt(14, PROMPT_TOKENS)]
    known = alone.generate(asked, max_tokens=24)[0]
    llm.generate(asked, max_tokens=24)
    llm.settle()
    daemon.configure(VERIFIED + "[mover]\nprefetch_on_lookup = false\n")  # the loads themselves ask for the blocks
    daemon.restart()
    await_hits(llm, asked[0])
    to_the_store(daemon)
    assert llm.reset()
    before = counted(llm.metrics(), "hit_tokens_disk")
    try:
        with daemon.faults() as faults:
            faults.arm("cache.acquire.before_hold", "kill@2")
        answer = llm.generate(asked, max_tokens=24)[0]
        assert daemon.await_end() < 0
        assert_same(known, answer, within=CLOSE)
        assert counted(llm.metrics(), "hit_tokens_disk") - before == WHOLE, "no load had begun: this test shows nothing"
    finally:
        daemon.configure(VERIFIED)
        daemon.restart()
    await_hits(llm, asked[0])
