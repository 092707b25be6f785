"""A daemon, a worker and a model of Llama-3-8B's shape with random weights, end to end.

Rows have the time to the first token of a prompt, by the place of its prefix. Others have tokens a
second, beside those of the same model on plain pages. `served.py` measures them. They need more
than the other parts: the daemon's packages, and torch on the GPU except for tiny sizes. Without
these they are left out, with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from tools.gpu.bench import Bench
from tools.gpu.results import Left, Result

SOURCES = ("none", "device", "host", "nvme")
NAMES = (
    *(f"e2e_ttft_{source}" for source in SOURCES),
    *("e2e_tokens", "e2e_decode", "e2e_decode_plain", "e2e_decode_passes"),
)
NEEDED = ("grpc", "click", "pydantic", "psutil", "structlog", "prometheus_client", "rich")
"""Of the daemon and its operators' calls."""
NEEDED_BYTES = 60 << 30
"""Free on the GPU: weights, and pages of the batch."""


def results(bench: Bench) -> Iterator[Result]:
    """All rows, or why there are none."""
    why = _find_reason(bench)
    if why:
        yield from (Left(name, why) for name in NAMES)
    else:
        yield from importlib.import_module("tools.gpu.served").results(bench)


def _find_reason(bench: Bench) -> str:
    """Why nothing of this can run; empty if it can."""
    for name in (*NEEDED, *bench.pick(("torch",), ())):
        try:
            importlib.import_module(name)
        except ImportError:
            return f"{name} is not installed"
    if bench.is_small:
        return ""
    if not importlib.import_module("torch").cuda.is_available():
        return "torch sees no GPU"
    free, _ = bench.gpu(with_kernels=False).ask("cuMemGetInfo")
    return f"{free >> 30} GiB of the GPU are free, {NEEDED_BYTES >> 30} are needed" if free < NEEDED_BYTES else ""
