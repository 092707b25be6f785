"""vLLM with TierdConnector: a restored prompt answers as a computed one, from any tier, after any
failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import vllm

from tests.engines.vllm.connected import BLOCK_TOKENS, CLOSE, assert_same, await_hits, connector, counted, to_the_store
from tests.engines.vllm.engine import Engine
from tests.engines.vllm.tiered import TRUSTING, VERIFIED, flushed, pages_like, prompt, spoil
from tests.system.blocks import await_true
from tests.system.damaged import Place, copy
from tierd._proto import admin_pb2 as pb
from tierd.cli import ctl
from tierd.cli.admin import connect
from tierd.decisions.causes import Cause
from tierd.integrations.versions import release_of
from tierd.testing import Daemon
from tierd.tiers.store.slots import HEADER_BYTES

pytestmark = [pytest.mark.timeout(900)]
PROMPT_TOKENS = 200
WHOLE = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
"""Tokens of a prompt that may be restored."""
HAS_SOURCES = release_of(vllm.__version__) >= (0, 32)
"""Whether vLLM counts cached tokens by their source."""
DAMAGED = 3
"""The number of the block that the test damages."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that verifies blocks at each hit."""
    with Daemon(VERIFIED, faults=True) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def llm(daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]) -> Engine:
    """The engine of most tests; each test uses its own prompts."""
    llm = engine(make_model(), connector=connector(daemon))
    await_hits(llm, prompt(100, 70))
    return llm


def test_from_memory(llm: Engine) -> None:
    """A prompt restored from memory answers bit-equal to a computed one, and vLLM counts it by its source."""
    asked = [prompt(1, PROMPT_TOKENS)]
    computed = llm.generate(asked, max_tokens=24)[0]
    before = llm.metrics()
    assert computed.cached == 0 and llm.reset()
    restored = llm.generate(asked, max_tokens=24)[0]
    assert restored.cached == WHOLE
    assert_same(computed, restored)
    after = llm.metrics()
    assert counted(after, "hit_tokens_host") - counted(before, "hit_tokens_host") == WHOLE
    assert from_source(after, "host") - from_source(before, "host") == WHOLE * HAS_SOURCES
    assert counted(after, "loaded_bytes") > counted(before, "loaded_bytes")


def test_from_the_store(llm: Engine, daemon: Daemon) -> None:
    """A prompt restored from NVMe answers the same, and vLLM counts its tokens as from disk."""
    asked = [prompt(2, PROMPT_TOKENS)]
    computed = llm.generate(asked, max_tokens=24)[0]
    assert llm.reset()
    to_the_store(daemon)
    before = llm.metrics()
    restored = llm.generate(asked, max_tokens=24)[0]
    after = llm.metrics()
    assert restored.cached == WHOLE
    assert counted(after, "hit_tokens_disk") - counted(before, "hit_tokens_disk") == WHOLE
    assert from_source(after, "disk") - from_source(before, "disk") == WHOLE * HAS_SOURCES
    assert_same(computed, restored)


def test_operators_find_a_request(llm: Engine, daemon: Daemon) -> None:
    """The lookup and the load of a request are in the daemon's record, both under vLLM's id of it."""
    asked = [prompt(3, PROMPT_TOKENS)]
    llm.generate(asked, max_tokens=4)
    assert llm.reset()
    assert llm.generate(asked, max_tokens=4)[0].cached == WHOLE
    with connect(daemon.target) as operator:

        def decisions() -> set[tuple[str, str]]:
            latest = operator.ask(pb.ExplainRequest(last=1)).requests[0]
            assert latest.request
            its = operator.ask(pb.ExplainRequest(request=latest.request)).requests
            return {(row.kind, row.cause.cause) for row in its}

        # Both need no call, so the engine's processes report them a little later.
        await_true(lambda: decisions() == {("lookup", Cause.HIT_NEAR), ("get", Cause.HIT_NEAR)}, "both decisions")


def test_a_prompt_is_found_by_its_tokens(llm: Engine, daemon: Daemon, tmp_path: Path) -> None:
    """`tierctl explain FILE` computes vLLM's hashes of a prompt, and finds its blocks."""
    tokens = prompt(4, PROMPT_TOKENS)
    llm.generate([tokens], max_tokens=4)
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(tokens), encoding="utf-8")
    done = CliRunner().invoke(ctl.cli, ["explain", str(path), "--json", "--target", daemon.target])
    assert done.exit_code == 0, done.output
    blocks = json.loads(done.stdout)["blocks"]
    assert [one["cause"] for one in blocks] == [Cause.HIT_NEAR] * (PROMPT_TOKENS // BLOCK_TOKENS)


def from_source(metrics: dict[str, float], source: str) -> float:
    """vLLM's own count of cached tokens from this source."""
    name = "vllm:prompt_tokens_cached_by_source_total"
    return sum(value for key, value in metrics.items() if key.startswith(name) and f'"source": "{source}"' in key)


def test_after_the_daemon_died(llm: Engine, daemon: Daemon) -> None:
    """While the daemon is dead requests are computed; after a restart it serves the same engine again."""
    asked = [prompt(3, PROMPT_TOKENS)]
    computed = llm.generate(asked, max_tokens=24)[0]
    assert llm.reset()
    daemon.kill()
    without = llm.generate(asked, max_tokens=24)[0]
    assert without.cached == 0
    assert_same(computed, without)
    daemon.start()
    await_hits(llm, asked[0])
    restored = llm.generate(asked, max_tokens=24)[0]
    assert restored.cached == WHOLE
    assert_same(computed, restored)


def test_by_another_process(
    llm: Engine, daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """A second vLLM hits the blocks of the first one, generated tokens included."""
    first = prompt(4, PROMPT_TOKENS)
    computed = llm.generate([first], max_tokens=60)[0]
    longer = first + computed.tokens + prompt(5, 20)
    known = llm.generate([longer], max_tokens=24)[0]
    llm.settle()
    second = engine(make_model(), connector=connector(daemon), fresh=True)
    await_hits(second, prompt(101, 70))
    restored = second.generate([longer], max_tokens=24)[0]
    assert restored.cached >= (PROMPT_TOKENS + 59) // BLOCK_TOKENS * BLOCK_TOKENS
    assert_same(known, restored, within=CLOSE)


@pytest.mark.parametrize("verify", ["always", "first_hit"])
def test_a_damaged_block(llm: Engine, daemon: Daemon, verify: str) -> None:
    """Bytes corrupted in memory and in the store shorten the hit, whichever hits the daemon verifies:
    a load checks all that it copies. A load that finds them asks the daemon twice. If its step's
    deadline passes before the first answer, it loses the whole hit."""
    asked = [prompt(6 + (verify == "always"), PROMPT_TOKENS)]
    await_hits(llm, prompt(100, 70))  # the daemon may have just restarted
    known = {place for place, _ in flushed(daemon)}
    computed = llm.generate(asked, max_tokens=24)[0]
    llm.settle()
    stored = [(place, meta) for place, meta in flushed(daemon) if place not in known]
    try:
        daemon.configure(VERIFIED if verify == "always" else TRUSTING)
        daemon.restart()
        await_hits(llm, asked[0])
        _damage(daemon, *next((place, meta) for place, meta in stored if meta["position"] == DAMAGED))
        before = counted(llm.metrics(), "loaded_blocks")
        restored = llm.generate(asked, max_tokens=24)[0]
        loaded = counted(llm.metrics(), "loaded_blocks") - before
        assert loaded == DAMAGED or (verify == "first_hit" and loaded == 0)
        assert_same(computed, restored, within=CLOSE)
    finally:
        daemon.configure(VERIFIED)
        daemon.restart()


def _damage(daemon: Daemon, place: Place, meta: Any) -> None:
    """Corrupts a block in memory and in the store."""
    length = int(meta["logical_length"])
    (page,) = pages_like(daemon, copy(place, HEADER_BYTES + 64)[HEADER_BYTES:])
    spoil(place._replace(offset=place.offset + HEADER_BYTES), length)
    spoil(page, length)


def test_a_daemon_that_dies_in_a_load(llm: Engine, daemon: Daemon) -> None:
    """A daemon killed between its answer to the lookup and the load costs recomputation, not the request."""
    asked = [prompt(8, PROMPT_TOKENS)]
    computed = llm.generate(asked, max_tokens=24)[0]
    llm.settle()
    daemon.configure(VERIFIED + "[mover]\nprefetch_on_lookup = false\n")  # the load itself asks for the blocks
    daemon.restart()
    await_hits(llm, asked[0])
    to_the_store(daemon)
    before = counted(llm.metrics(), "hit_tokens_disk")
    try:
        with daemon.faults() as faults:
            faults.arm("cache.acquire.before_hold", "kill")
        restored = llm.generate(asked, max_tokens=24)[0]
        assert daemon.await_end() < 0
        assert_same(computed, restored, within=CLOSE)
        assert counted(llm.metrics(), "hit_tokens_disk") - before == WHOLE, "no load had begun: this test shows nothing"
        after = llm.generate([prompt(9, PROMPT_TOKENS)], max_tokens=2)[0]
        assert after.finish == "length"
    finally:
        daemon.configure(VERIFIED)
        daemon.restart()
    await_hits(llm, asked[0])


def test_many_at_once(llm: Engine) -> None:
    """Prompts with a common prefix, more than run at once, answer the same computed and restored."""
    common = prompt(12, 128)
    asked = [common + prompt(20 + i, 40 + 16 * i) for i in range(8)]
    computed = llm.generate(asked, max_tokens=16)
    assert llm.reset()
    restored = llm.generate(asked, max_tokens=16)
    assert all(answer.cached >= len(common) for answer in restored)
    for first, second in zip(computed, restored, strict=True):
        assert_same(first, second, within=CLOSE)


def test_salts_divide(llm: Engine) -> None:
    """`cache_salt` is part of vLLM's own hashes: another salt misses, the same salt hits."""
    asked = [prompt(10, PROMPT_TOKENS)]
    llm.generate(asked, max_tokens=2, salts=["one"])
    assert llm.reset()
    assert llm.generate(asked, max_tokens=2, salts=["other"])[0].cached == 0
    assert llm.reset()
    assert llm.generate(asked, max_tokens=2, salts=["one"])[0].cached == WHOLE
    assert llm.reset()
    assert llm.generate(asked, max_tokens=2)[0].cached == 0


def test_a_reset_of_the_connector_forgets(llm: Engine) -> None:
    """After reset_prefix_cache(reset_connector=True), as for new weights, old blocks miss and new
    ones hit."""
    asked = [prompt(11, PROMPT_TOKENS)]
    llm.generate(asked, max_tokens=2)
    assert llm.reset(connector=True)
    assert llm.generate(asked, max_tokens=2)[0].cached == 0
    assert llm.reset()
    assert llm.generate(asked, max_tokens=2)[0].cached == WHOLE
