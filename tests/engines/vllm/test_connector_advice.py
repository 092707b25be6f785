"""The advisor in vLLM: it learns the engine's steps, and computes what a slow store would delay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.connected import assert_same, connector, counted, to_the_store
from tests.engines.vllm.engine import Engine, engines
from tests.engines.vllm.models import prompt
from tierd.testing import Daemon

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")
