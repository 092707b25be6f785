"""The driver that tests of the device tier run on: the fake one of cuda/fake, or the machine's own where TIERD_TEST_DRIVER=cuda.

What is promised on both is asked of both, so a test touches device memory by the driver's copies alone. What only the fake can be asked, since it takes orders and can be
looked into, is marked `fake_only`, with the reason. The process that runs the tests has no driver of its own: what it loads was decided when it began.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.unit.kernels.fake_driver import fake_environment
from tierd.client.session.device import DevicePage, Gpu
from tools.fake_cuda import build_fatbins

CHOSEN = os.environ.get("TIERD_TEST_DRIVER", "fake")
assert CHOSEN in ("fake", "cuda"), f"TIERD_TEST_DRIVER={CHOSEN}: there are fake and cuda"
IS_FAKE = CHOSEN == "fake"
BLIND = {"CUDA_VISIBLE_DEVICES": ""} | ({"LD_LIBRARY_PATH": ""} if IS_FAKE else {})
"""The environment of a process that finds no driver, or no GPU."""
COUNT_GPUS = "from tierd.kernels.driver import bindings, call; print(call(bindings().cuDeviceGetCount, what='tests'))"


def fake_only(reason: str) -> pytest.MarkDecorator:
    """Marks a test that is skipped on a true driver. reason: what only the fake one can be asked."""
    return pytest.mark.skipif(not IS_FAKE, reason=f"of the fake driver alone: {reason}")


def use_driver(patch: pytest.MonkeyPatch, **fake: str) -> None:
    """Processes that are started from now on find it. fake: what the fake one is told beside."""
    for name, value in (fake_environment() | fake).items() if IS_FAKE else ():
        patch.setenv(name, value)


def use_fatbins(patch: pytest.MonkeyPatch) -> None:
    """They find kernels for it too; those of a true one are where `python -m tools.fatbins` puts them. Raises MissingTool."""
    if IS_FAKE:
        patch.setenv("TIERD_FATBINS_FOLDER", str(build_fatbins()))


def use_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    """As `use_driver`, with so many GPUs at least. Skips the test where there are fewer."""
    use_driver(patch, TIERD_FAKE_CUDA_DEVICES=str(count))
    there = count if IS_FAKE else int(subprocess.check_output([sys.executable, "-c", COUNT_GPUS], timeout=60))
    if there < count:
        pytest.skip(f"{count} GPUs are needed; here are {there}")


def read_at(page: DevicePage) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes at the address that kernels are given, as the driver copies them."""
    address, _ = page.__cuda_array_interface__["data"]
    out = np.zeros(page.nbytes, np.uint8)
    with page.device.entered():
        page.device.ask("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)
    return out


def write_at(gpu: Gpu, address: int, data: bytes) -> None:
    """Writes there as a kernel would, whatever the client thinks of it, and waits. Raises what the driver says."""
    with gpu.entered():
        gpu.ask("cuMemcpyHtoD", address, data, len(data))
        gpu.ask("cuStreamSynchronize", 0)


def rights_at(gpu: Gpu, address: int) -> str:
    """What the driver lets this process do there: NONE, READ or READWRITE."""
    with gpu.entered():
        flags = gpu.ask("cuMemGetAccess", gpu.access(is_writable=False).location, address)
    return str(gpu.cuda.CUmemAccess_flags(flags).name).removeprefix("CU_MEM_ACCESS_FLAGS_PROT_")
