"""Checks that a kernel's MAX_THREADS_PER_BLOCK is the launch bound in its source. The loader
assumes so: blocks have that many threads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tierd.kernels.paged import decode_blocks
from tools.gpu.bench import Bench
from tools.gpu.results import Check, Result, row_of
from tools.gpu.shapes import MODELS

THREADS = (
    (r"decode_(clear|page_mass)", 128),
    (r"decode_\w+_256(_wide)?(_mass)?", 64),
    (r"decode_\w+", 128),
    (r"prefill_\w+", 128),
    (r"merge_\w+|summarize_\w+", 128),
    (r"slice_sums", 32),
    (r"bound_\w+", 64),
    (r"score_\w+", 128),
    (r"choose_granules", 1024),
    (r"store_\w+|copy_rows_16|copy_runs|read_all|resolve_granules|fetch_granules", 256),
)
"""As in cuda/src; the first that fits. A kernel that is not listed is only counted."""


def results(bench: Bench) -> Iterator[Result]:
    """Checks every kernel in the fatbins."""
    gpu = bench.gpu()
    found = {name: gpu.kernels._found(name).threads for name in gpu.kernels._kernels}
    known = {name: threads for name, threads in found.items() if expected(name)}
    wrong = [f"{name}: {threads}, not {expected(name)}" for name, threads in known.items() if threads != expected(name)]
    said = f"{len(known)} of {len(found)} kernels" if not wrong else "; ".join(wrong[:5])
    yield Check("launch_bounds", not wrong and bool(known), said)
    blocks = decode_blocks(gpu.kernels, MODELS["8b"].decode(1), q_type="bf16", kv_type="bf16")
    yield row_of("resident_blocks", [blocks / gpu.multiprocessors], "blocks")


def expected(kernel: str) -> int | None:
    """Threads of a block; None for a kernel that is not in the table."""
    return next((threads for pattern, threads in THREADS if re.fullmatch(pattern, kernel)), None)
