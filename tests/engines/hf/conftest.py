"""transformers on the CPU for tests. Nothing here imports it or torch before a fixture needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.vllm.tiered import VERIFIED
from tierd.testing import Daemon

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon(VERIFIED) as daemon:
        yield daemon


@pytest.fixture
def daemon(running: Daemon) -> Daemon:
    """The module's daemon; the fixture restarts it if a test has ended it."""
    if running.has_ended:
        running.start()
    return running


@pytest.fixture(scope="session")
def model() -> Callable[..., Any]:
    """model("llama", dtype="bfloat16"): a model, made once a test run."""
    from tests.engines.hf import models

    made: dict[str, Any] = {}

    def give(kind: str = "llama", **given: Any) -> Any:
        key = repr((kind, given))
        if key not in made:
            made[key] = getattr(models, kind)(**given)
        return made[key]

    return give


@pytest.fixture
def store(daemon: Daemon) -> Iterator[Callable[..., Any]]:
    """store(model, **options): a TierdStore of the test's daemon."""
    from tierd.integrations.transformers import TierdStore

    opened: list[Any] = []

    def give(model: Any, **options: Any) -> Any:
        opened.append(TierdStore(model, **{"target": daemon.target, "timeout_s": 60, "lookup_timeout_s": 60} | options))
        return opened[-1]

    yield give
    for one in opened:
        one.close()
