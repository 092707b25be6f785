"""A worker's memory on a GPU, on the fake driver: the order of waits, and an engine without a daemon."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.system.lone_worker import OPTIONS, PROMPT, random_model
from tests.unit.kernels.fake_driver import counts, entered, ok, on_fake_driver, peek
from tierd.errors import ConfigError, InvalidArgument
from tierd.kernels import paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.e4m3 import E4M3
from tierd.kernels.library import Emulated
from tierd.worker.backend import Backend
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.gpu import GpuArray, GpuMemory, asarray, astype, gpu_memory
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, page_shape
from tierd.worker.report import Request
from tools.fake_cuda import build_fatbins
from tools.kernels import build_emulator

ROWS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def bytes_at(array: GpuArray) -> bytes:
    """The bytes there now, without a wait for pending work."""
    return peek(array.address, ROWS.nbytes)


def use_streams(cuda: Any) -> list[Any]:
    """Two streams; the first of the list is torch's current one."""
    current = [ok(cuda.cuStreamCreate(1)), ok(cuda.cuStreamCreate(1))]
    torch = SimpleNamespace(_C=SimpleNamespace(_cuda_getCurrentRawStream=lambda _: int(current[0])))
    sys.modules["torch"] = torch  # type: ignore[assignment]
    return current


@on_fake_driver()
def test_a_mark_is_done_when_the_current_stream_has_got_there() -> None:
    """A mark is done with the work before it in torch's current stream, not with another stream."""
    current = use_streams(entered())
    gpu = gpu_memory(0)
    array = gpu.filled(ROWS)
    mark = gpu.mark()
    current.reverse()
    gpu.finish()
    assert bytes_at(array) != ROWS.tobytes()
    assert not mark.query()
    assert mark.query() and bytes_at(array) == ROWS.tobytes()


@on_fake_driver()
def test_arrays_come_back_as_they_were() -> None:
    """An array comes back equal from the GPU, has strides without gaps, and its memory is reused."""
    gpu = gpu_memory(0)
    array = asarray(ROWS, device=gpu)
    assert asarray(array) is array and astype(array, "float32", copy=False) is array
    assert array.strides == ROWS.strides
    np.testing.assert_array_equal(array.to_device("cpu"), ROWS)
    address = array.address
    del array
    assert gpu.filled(-ROWS).address == address
    assert dict(gpu.moved) == {"in": 2 * ROWS.nbytes, "out": ROWS.nbytes}
    gpu.trim()
    assert "allocations" not in counts()


@on_fake_driver()
def test_what_does_not_fit_is_refused() -> None:
    """Other types, other devices, and memory that is too short or not on the GPU are refused by name."""
    gpu = gpu_memory(0)
    array = gpu.filled(ROWS)
    with pytest.raises(InvalidArgument, match="has type float32, wanted float16"):
        astype(array, "float16", copy=False)
    with pytest.raises(InvalidArgument, match="goes to 'cpu' only"):
        array.to_device("cuda:1")
    with pytest.raises(InvalidArgument, match="512 bytes on the GPU for an array of 1024"):
        gpu.over(gpu.empty((512,), "uint8"), (256,), "float32")
    model = random_model(Backend("numpy", "float32", "cuda:0"))
    with pytest.raises(ConfigError, match="lies on cpu, this worker attends on cuda:0"):
        page_shape(model).view(bytearray(1 << 20))


def outcome(model: Llama, kv_dtype: str, attention: Any = None) -> tuple[list[list[int]], list[float]]:
    """Tokens of two samples and a prompt beside them, and the page masses of another sequence."""
    source = LocalPages(page_shape(model, kv_dtype=kv_dtype))
    with Engine(model, source, attention=attention, options=OPTIONS) as engine:
        requests = [Request(PROMPT, 6, temperature=1.2, samples=2), Request(PROMPT[40:], 3)]
        tokens = [report.tokens for report in engine.generate(requests)]
    weighing = Engine(model, source, attention=attention, options=EngineOptions(measure_attention=True))
    sequence = weighing.begin(Request(PROMPT[:20], 1))
    mass = sequence.mass.tolist()
    weighing.end(sequence)
    return tokens, mass


@on_fake_driver()
def test_an_engine_on_a_gpu_needs_no_daemon() -> None:
    """Prefill, decode, forks that copy a page on the GPU, and page masses equal the reference on a
    CPU. Over e4m3 pages they equal emulated kernels there, as a drawn token can depend on rounding."""
    os.environ["TIERD_FATBINS_FOLDER"] = str(build_fatbins())
    gpu: GpuMemory = gpu_memory(0)
    within = []
    for kv_dtype, attention in (("float16", paged_attention), (E4M3, KernelAttention(Emulated(build_emulator())))):
        tokens, mass = outcome(random_model(Backend("numpy", "float32", "cuda:0")), kv_dtype)
        want_tokens, want_mass = outcome(random_model(), kv_dtype, attention)
        assert tokens == want_tokens and tokens[0] != tokens[1]
        assert mass == pytest.approx(want_mass, rel=2e-3)
        within.append(gpu.moved.pop("within"))
    assert within[0] == 2 * within[1] > 0, "a page of e4m3 has half the bytes"
