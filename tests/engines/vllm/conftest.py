"""vLLM on the CPU for tests: models of random weights at real scale, and engines in own processes.

Nothing here imports vLLM or torch before a fixture needs them: `make test` collects these files
without either installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.engine import ENVIRONMENT, Engine, engines
from tests.engines.vllm.models import make_in_fork

if importlib.util.find_spec("vllm"):
    os.environ.update(ENVIRONMENT)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_model("llama"): a directory with a model of that kind (models.py), made once a test run."""
    made: dict[str, Path] = {}

    def make(kind: str = "llama") -> Path:
        if kind not in made:
            made[kind] = make_in_fork(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


@pytest.fixture(scope="module")
def engine() -> Iterator[Callable[..., Engine]]:
    """engine(model, connector=..., **of_llm): an engine of engine.py, which runs until the module's end."""
    with engines() as start:
        yield start
