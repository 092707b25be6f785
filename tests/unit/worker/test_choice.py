"""The worker's choice of attention: by the environment and by its backend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.system.lone_worker import SPEC
from tierd.errors import ConfigError, Unsupported
from tierd.kernels import paged_attention
from tierd.worker.attention import attention_for
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, page_shape
from tierd.worker.spec import LlamaSpec


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no kernels."""
    for name in ("TIERD_KERNELS", "TIERD_KERNELS_LIBRARY"):
        monkeypatch.delenv(name, raising=False)


def model(spec: LlamaSpec = SPEC) -> Llama:
    """A model on a CPU, by numpy."""
    return Llama(random_checkpoint(spec))


class OnGpu(Backend):
    """Claims to compute on a GPU, but keeps its weights in host memory."""

    ordinal = 0
    torch = None

    def __post_init__(self) -> None:
        """Needs no torch."""


def on_gpu(spec: LlamaSpec = SPEC) -> Llama:
    """A model with numpy weights that no test computes with."""
    return Llama(random_checkpoint(spec), OnGpu("torch", "bfloat16", "cuda:0"))


def test_a_cpu_has_the_reference() -> None:
    """A CPU gets the reference without a setting."""
    assert attention_for(model(), page_shape(model())) is paged_attention
    assert page_shape(model()).geometry.dtype == "float32"


def test_a_gpu_has_its_kernels_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU gets its kernels or an error that names the missing part; the reference runs on a CPU only."""
    at_gpu = on_gpu()
    assert page_shape(at_gpu).geometry.dtype == "bfloat16"
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(Unsupported, match=r"pip install 'tierd\[gpu\]'"):
        attention_for(at_gpu, page_shape(at_gpu))
    monkeypatch.setenv("TIERD_KERNELS", "reference")
    with pytest.raises(ConfigError, match="the reference attends on a CPU, pages of this backend lie on 'cuda:0'"):
        attention_for(at_gpu, page_shape(at_gpu, kv_dtype="bfloat16"))


def test_emulated_kernels_run_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated kernels beside a GPU are refused, as is an unknown word; without a library the error
    says how to build one."""
    monkeypatch.setenv("TIERD_KERNELS", "emulated")
    with pytest.raises(ConfigError, match="emulated kernels run on the CPU, the backend computes on 'cuda:0'"):
        page_shape(on_gpu())
    with pytest.raises(Unsupported, match=r"TIERD_KERNELS_LIBRARY: is not set.*tools\.kernels emulator"):
        Engine(model(), LocalPages(page_shape(model())))
    monkeypatch.setenv("TIERD_KERNELS", "fast")
    with pytest.raises(ConfigError, match="TIERD_KERNELS: is 'fast'"):
        Engine(model(), LocalPages(page_shape(model(), kv_dtype="float16")))


WRONG: dict[str, tuple[LlamaSpec, dict[str, Any]]] = {
    "pages of float32, they take float16 or bfloat16": (SPEC, {"kv_dtype": "float32"}),
    "head_dim 32, they take": (replace(SPEC, head_dim=32), {}),
    "34 query heads for 2 kv heads, they take at most 16": (replace(SPEC, q_heads=34), {}),
    "pages of 24 tokens, they take multiples of 16": (SPEC, {"tokens_per_block": 24}),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("where", [model, on_gpu])
def test_what_no_kernel_takes_is_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, fault: str, where: Callable[[LlamaSpec], Llama]
) -> None:
    """Unsupported pages and heads are refused by name with the remedy, on either device."""
    if where is model:
        monkeypatch.setenv("TIERD_KERNELS", "emulated")
    spec, of_pages = WRONG[fault]
    made = where(spec)
    with pytest.raises(ConfigError, match=f"^kernels: {fault}.*TIERD_KERNELS=reference"):
        attention_for(made, page_shape(made, **of_pages))
