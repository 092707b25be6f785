"""Decodes of torch's SDPA and of FlashInfer beside tierd's, if they are installed; torch's tensors.

SDPA has gathered keys and values; FlashInfer has the same pages, and its quickest backend counts.
Prefills of FlashAttention-3 and FlashInfer are called as the worker calls them.
Invariants: all get the same numbers, and use places in turn, so none hits the cache. All are
captured by torch as graphs; tierd's decode launches into torch's stream.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tierd.kernels import Attended, PagedBatch
from tierd.kernels.attention import KernelAttention
from tierd.kernels.loaded import Loaded
from tierd.kernels.paged import DeviceBatch, PagedDecode, decode_blocks
from tierd.kernels.pages import KvPages
from tierd.kernels.prefills import FINDERS, Prefill
from tools.gpu import arrays
from tools.gpu.bench import Bench
from tools.gpu.forecasts import SMALL_SIZES
from tools.gpu.results import Fact, Left, Result, Row
from tools.gpu.shapes import MODELS, PAGE_TOKENS

SIZES = {"1x1k": (1, 1024), "1x8k": (1, 8192), "8x1k": (8, 1024), "64x256": (64, 256), "1x128k": (1, 131072), "128x2k": (128, 2048)}  # fmt: skip
MODEL = MODELS["8b"]
CACHE_BYTES = 256 << 20
"""Of all places that are used in turn: several times a cache."""
TURNS = (2, 64)
WORKSPACE_BYTES = 32 << 20
ROUNDS = 9
PREFILL_TOKENS = 8192
BACKENDS = ("fa2", "fa3")
"""Of FlashInfer; the second is for sm_90 alone."""
OUT_LIMIT = 1e-2
"""Between two outputs that round in other places."""


def results(bench: Bench) -> Iterator[Result]:
    """A row for each rival and size."""
    torch = _found("torch")
    if torch is None or not torch.cuda.is_available():
        why = "torch is not installed" if torch is None else "torch sees no GPU"
        yield from (Left(f"{rival}{size}", why) for rival in ("sdpa", "flashinfer") for size in ("", *_names()))
        yield from (Left(name, why) for name in ("arrays_torch", "arrays_load", "arrays_cupy"))
        yield from (Left(f"prefill_{rival}", why) for rival in FINDERS)
        return
    yield from arrays.results(bench, torch)
    library = Loaded(bench.fatbins)
    yield Fact("sdpa", f"torch {torch.__version__}")
    for name, size in SIZES.items():
        yield _row(bench, f"sdpa_{name}", lambda size=size: _against_sdpa(Turns(torch, library, *size)))
    for name, find in FINDERS.items():
        other = find(torch, library.device)
        row = f"prefill_{name}"
        yield (
            _row(bench, row, lambda other=other: _prefill(torch, library, other))
            if other
            else Left(row, "it is not installed, or not for this GPU")
        )
    flashinfer = _found("flashinfer")
    if flashinfer is None:
        yield from (Left(f"flashinfer{size}", "it is not installed") for size in ("", *_names()))
        return
    yield Fact("flashinfer", str(getattr(flashinfer, "__version__", "there")))
    for name, size in SIZES.items():
        yield _row(
            bench, f"flashinfer_{name}", lambda size=size: _against_flashinfer(Turns(torch, library, *size), flashinfer)
        )


def _names() -> list[str]:
    return [f"_{size}" for size in (*SMALL_SIZES, "1x128k", "128x2k")]


def _found(name: str) -> Any:
    """The module, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds, and the distance of the two outputs. by: the rival's backend."""

    ours: float
    theirs: float
    distance: float
    by: str = ""


def _row(bench: Bench, name: str, measured: Callable[[], Times]) -> Result:
    if not bench.has_time(4):
        return Left(name, "no time was left")
    try:
        times = measured()
    except Exception as error:  # noqa: BLE001 -- a rival's failure is no finding about us
        return Left(name, f"{type(error).__name__}: {str(error)[:200]}")
    if not times.distance <= OUT_LIMIT:
        return Left(name, f"the two differ by {times.distance:.1e}")
    return Row(name, times.ours, "us", times.theirs, times.ours / times.theirs, times.by)


@dataclass
class Turns:
    """Requests of one length in several places of a pool of torch: [pages, 2, kv_heads,
    PAGE_TOKENS, head_dim]."""

    torch: Any
    library: Loaded
    requests: int
    length: int
    q: Any = field(init=False)
    pool: Any = field(init=False)
    tables: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        torch, each = self.torch, self.requests * self.length // PAGE_TOKENS
        torch.manual_seed(1)
        kv_bytes = each * PAGE_TOKENS * MODEL.kv_heads * MODEL.head_dim * 4
        count = max(TURNS[0], min(TURNS[1], CACHE_BYTES // kv_bytes))
        shape = (count * each, 2, MODEL.kv_heads, PAGE_TOKENS, MODEL.head_dim)
        self.pool = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.q = torch.randn((self.requests, MODEL.q_heads, MODEL.head_dim), dtype=torch.bfloat16, device="cuda")
        ids = torch.randperm(len(self.pool), device="cuda").int()
        self.tables = [part.reshape(self.requests, -1).contiguous() for part in ids.chunk(count)]

    def ours(self, out: Any) -> list[Callable[[], Any]]:
        """Launches."""
        torch, shape = self.torch, MODEL.decode(self.requests)
        blocks = decode_blocks(self.library, shape, q_type="bf16", kv_type="bf16")
        decode = PagedDecode(
            self.library,
            shape,
            blocks=blocks,
            allocate=lambda size, dtype: torch.empty(size, dtype=getattr(torch, dtype), device="cuda"),
        )
        k, v = (self.pool[:, side].transpose(1, 2) for side in (0, 1))
        lens = torch.full((self.requests,), self.length, dtype=torch.int32, device="cuda")
        to = Attended(out, torch.empty(out.shape[:2], dtype=torch.float32, device="cuda"))
        return [
            lambda table=table: decode(self.q, KvPages(k, v), DeviceBatch(lens, table), to) for table in self.tables
        ]

    def compared(self, theirs: Sequence[Callable[[], Any]]) -> Times:
        """Each by its median. theirs: launches that return `q`'s shape, perhaps with axes of one."""
        out = self.torch.empty_like(self.q)
        ours = self.ours(out)
        ours[0]()
        other = theirs[0]().reshape(out.shape).float()
        distance = float((out.float() - other).norm() / other.norm())
        return Times(self._us(ours), self._us(theirs), distance)

    def _us(self, works: Sequence[Callable[[], Any]]) -> float:
        torch, graph = self.torch, self.torch.cuda.CUDAGraph()
        for work in works:
            work()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for work in works:
                work()
        times = []
        for _ in range(ROUNDS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / len(works))
        return statistics.median(times[1:])


def _against_sdpa(turns: Turns) -> Times:
    """Gathering is not counted."""
    torch = turns.torch
    q = turns.q[:, :, None]
    gathered = []
    for table in turns.tables:
        pages = turns.pool[table.long()]  # [requests, pages, 2, kv_heads, PAGE_TOKENS, head_dim]
        whole = pages.permute(2, 0, 3, 1, 4, 5).reshape(2, turns.requests, MODEL.kv_heads, turns.length, MODEL.head_dim)
        gathered.append((whole[0].contiguous(), whole[1].contiguous()))
    attend = torch.nn.functional.scaled_dot_product_attention
    return turns.compared([lambda k=k, v=v: attend(q, k, v, enable_gqa=True) for k, v in gathered])


def _against_flashinfer(turns: Turns, flashinfer: Any) -> Times:
    """By the quickest backend with a right output. If none runs, raises the error of the last."""
    found, failure = list[Times](), Exception("no backend was tried")
    for backend in BACKENDS:
        try:
            found.append(replace(turns.compared(_by_flashinfer(turns, flashinfer, backend)), by=backend))
        except Exception as error:  # noqa: BLE001 -- one may be missing
            failure = error
    if not found:
        raise failure
    return min(found, key=lambda times: (not times.distance <= OUT_LIMIT, times.theirs))


def _prefill(torch: Any, library: Loaded, other: Prefill) -> Times:
    """Of one prompt in pages in random order, as the worker calls both."""
    pages = PREFILL_TOKENS // PAGE_TOKENS
    torch.manual_seed(2)
    shape = (pages, 1, 2, PAGE_TOKENS, MODEL.kv_heads, MODEL.head_dim)
    pool = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    q = torch.randn((PREFILL_TOKENS, MODEL.q_heads, MODEL.head_dim), dtype=torch.bfloat16, device="cuda")
    batch = PagedBatch([0, PREFILL_TOKENS], [PREFILL_TOKENS], [torch.randperm(pages).tolist()])
    nowhere = np.full(PREFILL_TOKENS, -1)
    attentions = [KernelAttention(library, prefill) for prefill in (None, other)]
    both = [attention.over(list(pool), batch, slots=nowhere) for attention in attentions]
    ours, theirs = (one.attend(0, q).out.float() for one in both)
    if attentions[1].prefill is None:
        raise RuntimeError(f"{other.name} failed")
    distance = float((ours - theirs).norm() / theirs.norm())
    return Times(*(_plain_us(torch, lambda one=one: one.attend(0, q)) for one in both), distance, other.name)


def _plain_us(torch: Any, work: Callable[[], Any]) -> float:
    """The median of launches that are not captured."""
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)


def _by_flashinfer(turns: Turns, flashinfer: Any, backend: str) -> list[Callable[[], Any]]:
    """The CPU makes its plans beforehand."""
    torch, pages = turns.torch, turns.length // PAGE_TOKENS
    indptr = torch.arange(turns.requests + 1, dtype=torch.int32) * pages
    last = torch.full((turns.requests,), PAGE_TOKENS, dtype=torch.int32)
    works = []
    for table in turns.tables:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True, backend=backend
        )
        heads = (MODEL.q_heads, MODEL.kv_heads, MODEL.head_dim, PAGE_TOKENS)
        wrapper.plan(indptr, table.reshape(-1), last, *heads, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        works.append(lambda wrapper=wrapper: wrapper.run(turns.q, turns.pool))
    return works
