"""NVIDIA's driver, the width of each GPU's link, and GPUDirect Storage."""

from __future__ import annotations

import ctypes.util
from collections.abc import Iterator
from pathlib import Path

from tierd.config import Config
from tierd.doctor.check import Check, Host
from tierd.errors import TierdError
from tierd.kernels.driver import bindings, call

NVIDIA, DISPLAY = "0x10de", "0x03"
"""In sysfs: the maker's number, and the first byte of the class of display controllers."""


def check_gpus(config: Config, host: Host) -> Iterator[Check]:
    """All checks of this module."""
    ordinals = [device.ordinal for device in config.device if device.kind == "cuda"]
    cards = [path for path in host.matching("/sys/bus/pci/devices", "*") if _is_gpu(path)]
    if not ordinals and not cards:
        yield Check("gpu.driver", "skipped", "no NVIDIA GPU, and none is configured")
        return
    yield check_driver(ordinals)
    yield from (check_link(card) for card in cards)
    if ordinals and config.nvme:
        yield check_direct_storage(host)


def check_driver(ordinals: list[int]) -> Check:
    """The driver and its version, the bindings, and each configured GPU."""
    try:
        cuda = bindings()
        count = int(call(cuda.cuDeviceGetCount, what="the driver"))
        version = int(call(cuda.cuDriverGetVersion, what="the driver"))
    except TierdError as error:
        return Check(
            "gpu.driver",
            "failure" if ordinals else "note",
            " ".join(str(error).rpartition("; ")[0].split()),
            "`tierd serve` cannot start" if ordinals else "a [[device]] of kind cuda could not be used",
            "install NVIDIA's driver of CUDA 13.0 or newer and pip install 'tierd[gpu]', or configure no [[device]]",
        )
    found = f"CUDA {version // 1000}.{version % 1000 // 10}, {count} GPU{'s' * (count != 1)}"
    beyond = [ordinal for ordinal in ordinals if ordinal >= count]
    if beyond:
        return Check(
            "gpu.driver",
            "failure",
            f"{found}; device.ordinal {beyond[0]} is configured",
            "`tierd serve` cannot start",
            "correct device.ordinal, or CUDA_VISIBLE_DEVICES",
        )
    return Check("gpu.driver", "ok", found)


def check_link(card: Path) -> Check:
    """PCIe lanes in use against those that the GPU has."""
    now, most = (_word(card / name) for name in ("current_link_width", "max_link_width"))
    check = f"gpu.{card.name}.link"
    if not now.isdecimal() or not most.isdecimal():
        return Check(check, "skipped", "the kernel does not tell the width of its link")
    found = f"{now} of {most} PCIe lanes, {_word(card / 'current_link_speed') or 'speed unknown'}"
    if int(now) < int(most):
        return Check(
            check,
            "warning",
            found,
            f"copies between host and GPU have {int(now) / int(most):.0%} of their bandwidth",
            "reseat the card, or use another slot; `lspci -vv` shows LnkSta",
        )
    return Check(check, "ok", found)


def check_direct_storage(host: Host) -> Check:
    """Reads from a store straight into the GPU need a kernel module and libcufile."""
    missing = [] if "nvidia_fs" in host.read("/proc/modules") else ["the kernel module nvidia-fs"]
    missing += [] if ctypes.util.find_library("cufile") else ["libcufile"]
    if missing:
        return Check(
            "gpu.direct-storage",
            "note",
            f"missing: {' and '.join(missing)}",
            "blocks go from NVMe to the GPU through host memory",
            "install NVIDIA's packages nvidia-fs-dkms and libcufile, and load nvidia-fs",
        )
    return Check("gpu.direct-storage", "ok", "nvidia-fs and libcufile are there; a start tests the file system")


def _is_gpu(path: Path) -> bool:
    return _word(path / "vendor") == NVIDIA and _word(path / "class").startswith(DISPLAY)


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
