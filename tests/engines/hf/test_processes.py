"""Prefixes outlive a process: in another process, after a restart, from NVMe, with corrupted blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-engines has environments for it")
pytest.importorskip("torch", reason="torch is not installed: make test-engines has environments for it")

import torch

from tests.engines.hf.models import prompt
from tests.engines.hf.said import Answer, assert_same, far_from, say
from tests.engines.vllm.tiered import TRUSTING, VERIFIED, cold_restart, flushed, pages_like, spoil, stored
from tests.system.blocks import await_true
from tests.system.damaged import copy
from tierd.integrations.transformers import PagedTierdCache, TierdCache
from tierd.testing import Daemon
from tierd.tiers.store.slots import HEADER_BYTES

pytestmark = pytest.mark.timeout(900)
WHOLE = 96
OTHER_S = 500.0
KINDS = pytest.mark.parametrize("kind", [TierdCache, PagedTierdCache])


@pytest.fixture
def ready(model: Callable[..., Any], store: Callable[..., Any]) -> Callable[..., Any]:
    """ready(kind): a model whose attention suits that cache, and its store."""

    def give(kind: type) -> tuple[Any, Any]:
        one = model("llama", **({"attention": "tierd_paged"} if kind is PagedTierdCache else {"seed": 0}))
        return one, store(one)

    return give


def kept(kind: Any, one: Any, store: Any, seed: int) -> Answer:
    """The answer when everything is computed; the prompt is stored afterwards."""
    cache = kind(store)
    answer = say(one, prompt(seed), cache=cache)
    assert cache.save(prompt(seed)) == WHOLE
    return answer


def other(daemon: Daemon, kind: type, *seeds: int) -> list[dict[str, Any]]:
    """A second process's answer to each prompt."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.engines.hf.other", daemon.target, kind.__name__]
    root = Path(__file__).resolve().parents[3]
    env = os.environ | {"PYTHONPATH": str(root), "TQDM_DISABLE": "1"}
    command += map(str, seeds)
    run = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=OTHER_S, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    said: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return said


@KINDS
def test_another_process(kind: Any, daemon: Daemon, ready: Callable[..., Any]) -> None:
    """Of two processes with the same weights, each restores the other's prefix and gives the same answer."""
    one, store = ready(kind)
    first = kept(kind, one, store, 21)
    second, third = other(daemon, kind, 21, 22)
    assert second["restored"] == WHOLE
    assert_same(first, Answer(torch.tensor(second["tokens"]), torch.tensor(second["logits"])))
    assert third["restored"] == 0 and third["saved"] == WHOLE
    cache = kind.restore(store, prompt(22))
    assert cache.restored == WHOLE
    assert say(one, prompt(22), cache=cache).tokens.tolist() == third["tokens"]


@KINDS
def test_after_a_restart(kind: Any, daemon: Daemon, ready: Callable[..., Any]) -> None:
    """After a restart without memory, NVMe serves the same prefix; caches restored before stay intact."""
    one, store = ready(kind)
    first = kept(kind, one, store, 23)
    before = kind.restore(store, prompt(23))
    flushed(daemon)
    cold_restart(daemon)
    assert_same(first, say(one, prompt(23), cache=before))
    again = kind.restore(store, prompt(23))
    assert again.restored == WHOLE
    assert_same(first, say(one, prompt(23), cache=again))


@KINDS
@pytest.mark.parametrize("verify", ["always", "first_hit"])
def test_a_corrupted_block(verify: str, kind: Any, daemon: Daemon, ready: Callable[..., Any]) -> None:
    """Bytes corrupted in memory and on disk shorten the prefix if hits are verified, and change the
    answer if trusted."""
    seed = 24 + (verify == "always")
    one, store = ready(kind)
    known = {place for place, _ in flushed(daemon)}
    first = kept(kind, one, store, seed)
    flushed(daemon)
    place, meta = next((p, m) for p, m in stored(daemon) if p not in known and m["position"] == 1)
    head = copy(place, HEADER_BYTES + 64)[HEADER_BYTES:]
    cold_restart(daemon, config=VERIFIED if verify == "always" else TRUSTING)
    near = kind.restore(store, prompt(seed))
    assert near.restored == WHOLE
    assert_same(first, say(one, prompt(seed), cache=near))
    spoil(place._replace(offset=place.offset + HEADER_BYTES), int(meta["logical_length"]))
    (page,) = pages_like(daemon, head)
    spoil(page, int(meta["logical_length"]))
    again = kind.restore(store, prompt(seed))
    answer = say(one, prompt(seed), cache=again)
    if verify == "always":
        assert again.restored == WHOLE // 3
        assert_same(first, answer)
    else:
        assert again.restored == WHOLE and far_from(first, answer) > 0.01


@KINDS
def test_a_daemon_that_goes_and_comes(kind: Any, daemon: Daemon, ready: Callable[..., Any]) -> None:
    """Without a daemon each cache is a plain one with the same answer; later the same store
    restores again."""
    one, store = ready(kind)
    first = kept(kind, one, store, 26)
    flushed(daemon)
    daemon.kill()
    cache = kind.restore(store, prompt(26))
    assert cache.restored == 0
    assert_same(first, say(one, prompt(26), cache=cache))
    assert cache.save(prompt(26)) == 0
    daemon.start()
    await_true(lambda: kind.restore(store, prompt(26)).restored == WHOLE, "prefixes after the daemon came back")
