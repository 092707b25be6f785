"""vLLM with TierdConnector and LoRA adapters: an adapter's KV serves only that adapter, in any
process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

from tests.engines.vllm.connected import BLOCK_TOKENS, CLOSE, assert_same, await_hits, connector, counted, to_the_store
from tests.engines.vllm.engine import Answer, Engine
from tests.engines.vllm.models import RANK, write_adapter
from tests.engines.vllm.tiered import VERIFIED, far_from, prompt
from tierd.testing import Daemon

pytestmark = [pytest.mark.timeout(900)]
PROMPT_TOKENS = 200
WHOLE = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
WITH_ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
Adapter = list[Any] | None
"""Name, number and directory; None: the base model."""
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(VERIFIED) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The directories of the adapters, by name."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: str(write_adapter(root / name, seed=seed)) for seed, name in enumerate(("one", "two", "third"))}


@pytest.fixture(scope="module")
def kinds(places: dict[str, str]) -> list[Adapter]:
    """The base model and two adapters of it."""
    return [None, ["one", 1, places["one"]], ["two", 2, places["two"]]]


@pytest.fixture(scope="module")
def alone(engine: Start, make_model: Callable[..., Path]) -> Engine:
    """An engine without tierd."""
    return engine(make_model(), **WITH_ADAPTERS)


@pytest.fixture(scope="module")
def llm(daemon: Daemon, engine: Start, make_model: Callable[..., Path]) -> Engine:
    llm = engine(make_model(), connector=connector(daemon), **WITH_ADAPTERS)
    await_hits(llm, prompt(100, 70))
    return llm


def say(llm: Engine, asked: list[int], kind: Adapter, *, max_tokens: int = 24) -> Answer:
    return llm.generate([asked], max_tokens=max_tokens, loras=[kind])[0]


def known_of(alone: Engine, asked: list[int], kinds: list[Adapter]) -> list[Answer]:
    """The answer of each without tierd; no two of them are the same."""
    known = [say(alone, asked, kind) for kind in kinds]
    for i, first in enumerate(known):
        for second in known[:i]:
            assert first.tokens != second.tokens and far_from(first.logprobs, second.logprobs) > CLOSE
    return known


def test_each_has_its_own(llm: Engine, alone: Engine, daemon: Daemon, kinds: list[Adapter]) -> None:
    """The base model and two adapters each restore their own KV of one prompt, from memory and from NVMe."""
    asked = prompt(1, PROMPT_TOKENS)
    known = known_of(alone, asked, kinds)
    for kind, answer in zip(kinds, known, strict=True):
        computed = say(llm, asked, kind)
        assert computed.cached == 0
        assert_same(answer, computed)
    for move in (lambda: None, lambda: to_the_store(daemon)):
        assert llm.reset()
        move()
        before = counted(llm.metrics(), "loads")
        for kind, answer in zip(kinds[::-1], known[::-1], strict=True):
            restored = say(llm, asked, kind)
            assert restored.cached == WHOLE
            assert_same(answer, restored)
        assert counted(llm.metrics(), "loads") - before == len(kinds)


def test_in_one_batch(llm: Engine, alone: Engine, kinds: list[Adapter]) -> None:
    """In one batch, computed and restored, base model and adapters answer as each alone. The test
    mends vLLM's CPU operators, which without tierd too change the base model's answer."""
    asked = prompt(2, PROMPT_TOKENS)
    known = known_of(alone, asked, kinds)
    assert alone.reset()
    base, *others = alone.generate([asked] * len(kinds), max_tokens=24, loras=kinds)
    for first, second in zip(known[1:], others, strict=True):
        assert_same(first, second, within=CLOSE)
    assert base.tokens != known[0].tokens, "vLLM's CPU operators pass over -1 now: cpu_lora.py can go"
    assert alone.reset() and alone.ask("evaluate", code=MEND) and llm.ask("evaluate", code=MEND)
    for engine, cached in ((alone, 0), (llm, 0), (llm, WHOLE)):
        answers = engine.generate([asked] * len(kinds), max_tokens=24, loras=kinds)
        assert [answer.cached for answer in answers] == [cached] * len(kinds)
        for first, second in zip(known, answers, strict=True):
            assert_same(first, second, within=CLOSE)
        assert engine.reset()


MEND = "__import__('tests.engines.vllm.cpu_lora', fromlist=['mend']).mend()"


def test_by_another_process(
    llm: Engine, alone: Engine, daemon: Daemon, kinds: list[Adapter], engine: Start, make_model: Callable[..., Path]
) -> None:
    """A second vLLM with other adapter numbers hits each adapter's KV; the other adapter under
    one's name misses."""
    asked = prompt(3, PROMPT_TOKENS)
    known = known_of(alone, asked, kinds)
    for kind in kinds:
        say(llm, asked, kind)
    llm.settle()
    second = engine(make_model(), connector=connector(daemon), fresh=True, **WITH_ADAPTERS)
    await_hits(second, prompt(101, 70))
    for kind, answer in zip(kinds, known, strict=True):
        restored = say(second, asked, kind and [kind[0], 3 - kind[1], kind[2]])
        assert restored.cached == WHOLE
        assert_same(answer, restored, within=CLOSE)
    assert kinds[1] and kinds[2]
    renamed = say(second, asked, ["one", 3, kinds[2][2]])
    assert renamed.cached == 0
    assert_same(known[2], renamed, within=CLOSE)


def test_an_adapter_that_was_trained_anew(
    llm: Engine, daemon: Daemon, places: dict[str, str], engine: Start, make_model: Callable[..., Path]
) -> None:
    """A vLLM that starts with changed files of an adapter, under the same name, misses the old files' KV."""
    asked, kind = prompt(4, PROMPT_TOKENS), ["third", 1, places["third"]]
    old = say(llm, asked, kind)
    assert llm.reset() and say(llm, asked, kind).cached == WHOLE
    write_adapter(Path(places["third"]), seed=9)
    expected = say(engine(make_model(), fresh=True, **WITH_ADAPTERS), asked, kind)
    assert far_from(old.logprobs, expected.logprobs) > CLOSE
    second = engine(make_model(), connector=connector(daemon), fresh=True, **WITH_ADAPTERS)
    await_hits(second, prompt(102, 70))
    anew = say(second, asked, kind)
    assert anew.cached == 0
    assert_same(expected, anew)
