"""The CUDA driver of the device tier's tests: cuda/fake, or the machine's (TIERD_TEST_DRIVER=cuda).

Both drivers must keep the same promises, so a test accesses device memory only through the driver's
copies. A test marked `fake_only` needs commands or inspection that only the fake driver offers; the
mark gives the reason. The test process itself has no driver: the environment at its start decided
which libraries it loads.
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
"""The environment of a process that must not see a driver or a GPU."""
COUNT_GPUS = "from tierd.kernels.driver import bindings, call; print(call(bindings().cuDeviceGetCount, what='tests'))"


def fake_only(reason: str) -> pytest.MarkDecorator:
    """Marks a test that a real driver skips. reason: the ability that only the fake driver has."""
    return pytest.mark.skipif(not IS_FAKE, reason=f"of the fake driver alone: {reason}")


def use_driver(patch: pytest.MonkeyPatch, **fake: str) -> None:
    """Later child processes use the driver. fake: further settings of the fake driver."""
    for name, value in (fake_environment() | fake).items() if IS_FAKE else ():
        patch.setenv(name, value)


def use_fatbins(patch: pytest.MonkeyPatch) -> None:
    """Later child processes use the driver's kernels, built for the fake one. Raises MissingTool."""
    if IS_FAKE:
        patch.setenv("TIERD_FATBINS_FOLDER", str(build_fatbins()))


def use_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    """Like `use_driver`, with at least `count` GPUs. Skips the test if the machine has fewer."""
    use_driver(patch, TIERD_FAKE_CUDA_DEVICES=str(count))
    there = count if IS_FAKE else int(subprocess.check_output([sys.executable, "-c", COUNT_GPUS], timeout=60))
    if there < count:
        pytest.skip(f"{count} GPUs are needed; here are {there}")


def read_at(page: DevicePage) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes at the address that kernels get, as the driver copies them."""
    address, _ = page.__cuda_array_interface__["data"]
    out = np.zeros(page.nbytes, np.uint8)
    with page.device.entered():
        page.device.ask("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)
    return out


def write_at(gpu: Gpu, address: int, data: bytes) -> None:
    """Writes there as a kernel would, without asking the client, and waits. Raises the driver's error."""
    with gpu.entered():
        gpu.ask("cuMemcpyHtoD", address, data, len(data))
        gpu.ask("cuStreamSynchronize", 0)


def rights_at(gpu: Gpu, address: int) -> str:
    """This process's access rights there by the driver: NONE, READ or READWRITE."""
    with gpu.entered():
        flags = gpu.ask("cuMemGetAccess", gpu.access(is_writable=False).location, address)
    return str(gpu.cuda.CUmemAccess_flags(flags).name).removeprefix("CU_MEM_ACCESS_FLAGS_PROT_")
