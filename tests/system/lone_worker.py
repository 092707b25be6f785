"""A worker in its own process, whose kernels only the environment chooses.

Run it as `python -m tests.system.lone_worker LIBRARY DTYPE TARGET [KV_DTYPE]`. It serves one
request over the daemon at TARGET, or for `none` without a daemon, and prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from contextlib import ExitStack
from typing import Any

from tierd.client import Client
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageSource, page_shape
from tierd.worker.report import Request
from tierd.worker.spec import LlamaSpec
from tierd.worker.tierd_pages import TierdPages

SPEC = LlamaSpec(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=96,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    max_positions=512,
    tied=True,
)
"""A small model with a head dim that the kernels support."""
PROMPT = tuple((7 * i * i + 3) % 64 for i in range(75))
REQUEST = Request(PROMPT, 12, marks=(70,))
OPTIONS = EngineOptions(chunk_tokens=32)
MULTIPLIES = 2
"""Index of the matrix products among the emulator's counters."""


def random_model(backend: Backend | None = None) -> Llama:
    """A model with the same weights in every process."""
    return Llama(random_checkpoint(SPEC, seed=3, scale=0.2), backend)


def multiplies() -> int:
    """The emulator's matrix products in this process; 0 if the environment names no library."""
    path = os.environ.get("TIERD_KERNELS_LIBRARY")
    if not path:
        return 0
    counters = (ctypes.c_uint64 * 6)()
    ctypes.CDLL(path).simt_counters(counters, 0)
    return int(counters[MULTIPLIES])


def served(backend: Backend, target: str, kv_dtype: str | None = None) -> dict[str, Any]:
    """Serves the request; its report."""
    model = random_model(backend)
    with ExitStack() as stack:
        shape = page_shape(model, kv_dtype=kv_dtype)
        source: PageSource = LocalPages(shape)
        if target != "none":
            source = TierdPages(stack.enter_context(Client(target)), model, name="random", shape=shape)
        report = stack.enter_context(Engine(model, source, options=OPTIONS)).generate([REQUEST])[0]
        stored = source.shape.geometry.dtype
    return {"tokens": report.tokens, "reused": report.reused_tokens, "kv": stored, "multiplies": multiplies()}


if __name__ == "__main__":
    library, dtype, *where = sys.argv[1:]
    print(json.dumps(served(Backend(library, dtype), *where)))
