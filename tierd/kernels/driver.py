"""NVIDIA's driver through its own bindings: results become values, or errors of tierd.

Nothing is imported and no driver is loaded before `bindings` is called. Its callers need a GPU, a
driver and the extra `gpu`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tierd.errors import InvalidArgument, Overloaded, TierdError, TierFailed, Unsupported

OLDEST_VERSION = 13000
"""Of the driver (CUDA 13.0): nvcc 13 makes the fatbins."""
FAULTS: dict[str, tuple[type[TierdError], str]] = {
    "CUDA_ERROR_INVALID_VALUE": (InvalidArgument, "the driver does not accept a size, an address or a flag"),
    "CUDA_ERROR_INVALID_HANDLE": (InvalidArgument, "a stream, an event or a kernel is gone, or of another context"),
    "CUDA_ERROR_INVALID_CONTEXT": (InvalidArgument, "make the device's primary context current in this thread"),
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": (InvalidArgument, "the block needs more registers than the GPU has"),
    "CUDA_ERROR_OUT_OF_MEMORY": (Overloaded, "free device memory, or take less of it"),
    "CUDA_ERROR_NO_DEVICE": (Unsupported, "the driver sees no GPU; CUDA_VISIBLE_DEVICES may hide it"),
    "CUDA_ERROR_INVALID_DEVICE": (Unsupported, "there is no GPU of this number; CUDA_VISIBLE_DEVICES may hide it"),
    "CUDA_ERROR_NO_BINARY_FOR_GPU": (
        Unsupported,
        "this GPU is older than sm_80, or its code was left out of the build",
    ),
    "CUDA_ERROR_INVALID_IMAGE": (Unsupported, "the file is damaged, or no fatbin; install tierd again"),
    "CUDA_ERROR_NOT_SUPPORTED": (Unsupported, "this GPU or its driver cannot do it"),
    "CUDA_ERROR_NOT_INITIALIZED": (
        Unsupported,
        "a forked child cannot use the driver of its parent; start it by spawn",
    ),
}
"""Remedies. Any other error counts as one of the device, after which this process cannot use it."""
REMEDY = "nothing of this process runs on the GPU any more; end it and look at dmesg"


def bindings() -> Any:
    """cuda.bindings.driver, initialized. Raises Unsupported if either is missing or too old."""
    try:
        cuda = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise Unsupported(f"kernels: the GPU extra is not installed ({error}); pip install 'tierd[gpu]'") from error
    try:
        call(cuda.cuInit, 0, what="the driver")
        version = call(cuda.cuDriverGetVersion, what="the driver")
    except RuntimeError as error:  # the bindings found no library
        raise Unsupported(
            f"kernels: no NVIDIA driver on this machine ({error}); install it, or set TIERD_KERNELS=emulated"
        ) from error
    if version < OLDEST_VERSION:
        raise Unsupported(
            f"kernels: the NVIDIA driver is of CUDA {version // 1000}.{version % 1000 // 10}, "
            f"wanted {OLDEST_VERSION // 1000}.{OLDEST_VERSION % 1000 // 10} or newer; update it"
        )
    return cuda


def call(function: Callable[..., tuple[Any, ...]], *given: Any, what: str) -> Any:
    """Calls the driver; returns 0, 1 or more values. what: for errors. Raises as `fault`."""
    result, *answers = function(*given)
    if result:
        raise fault(result, f"{what}: {function.__name__}")
    return answers[0] if len(answers) == 1 else tuple(answers)


def fault(result: Any, what: str) -> TierdError:
    """An error that names the thing, the driver's code and the remedy."""
    kind, remedy = FAULTS.get(result.name, (TierFailed, REMEDY))
    return kind(f"{what} gave {result.name} ({int(result)}): {remedy}")
