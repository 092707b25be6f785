"""A built set of kernels, and how to launch one.

`open_library` chooses; `Emulated` is the kernels' source compiled for the CPU (cuda/emulator).
`loaded` knows the GPU. A kernel gets its parameters as one struct whose size both sides agree on. A
launch on the CPU has ended when the call returns.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tierd.errors import ConfigError, InvalidArgument, Unsupported
from tierd.kernels.loaded import Loaded, fatbins_folder

KERNELS = "TIERD_KERNELS"
"""Environment: `emulated` for kernels on a CPU, `reference` for none there. Empty: the GPU's on a
GPU, none elsewhere."""
EMULATED, REFERENCE = "emulated", "reference"
KERNELS_LIBRARY = "TIERD_KERNELS_LIBRARY"
"""Environment: the path that `python -m tools.kernels emulator` printed."""
H100_SHARED_BYTES = 232_448
"""Of a block, 227 KiB: the emulator's default."""


class Library(Protocol):
    """device: where its kernels run and their buffers must lie. block_shared_bytes: the most shared
    memory of a thread block."""

    device: str
    block_shared_bytes: int

    def launch(self, kernel: str, grid: Sequence[int], params: ctypes.Structure, *, shared_bytes: int = 0) -> None:
        """Launches a kernel by its symbol on the current stream. grid: blocks in x, y, z. The
        kernel defines its block's threads."""
        ...

    def resident_blocks(self, kernel: str, *, shared_bytes: int = 0) -> int:
        """How many blocks of a kernel share its work best."""
        ...


class Emulated:
    """The library that `python -m tools.kernels emulator` built. Raises Unsupported without one."""

    device = "cpu"

    def __init__(self, path: Path, *, block_shared_bytes: int = H100_SHARED_BYTES) -> None:
        self.block_shared_bytes = block_shared_bytes
        if not path.exists():
            raise Unsupported(
                f"kernels: {path} is not there; `python -m tools.kernels emulator` builds it from a checkout"
            )
        self._library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self._known: dict[str, int] = {}

    def launch(self, kernel: str, grid: Sequence[int], params: ctypes.Structure, *, shared_bytes: int = 0) -> None:
        """As in Library. Raises InvalidArgument."""
        size = self._size_of(kernel)
        if size != ctypes.sizeof(params):
            raise InvalidArgument(
                f"{kernel}: takes {size} bytes of parameters, {type(params).__name__} has {ctypes.sizeof(params)}; rebuild"
            )
        if shared_bytes > self.block_shared_bytes:
            raise InvalidArgument(
                f"{kernel}: needs {shared_bytes} bytes of shared memory, a block has {self.block_shared_bytes}; take a smaller head dim or group"
            )
        if all(grid):
            self._library[kernel](*grid, shared_bytes, ctypes.byref(params))

    def resident_blocks(self, kernel: str, *, shared_bytes: int = 0) -> int:
        """A few, so a row is cut and merged as on a GPU, though blocks run one after another."""
        return 8

    def _size_of(self, kernel: str) -> int:
        if kernel not in self._known:
            try:
                self._known[kernel] = int(self._library[f"{kernel}_bytes"]())
            except AttributeError as error:
                raise InvalidArgument(
                    f"{kernel}: the library has no such kernel; shapes and types that it has are in cuda/README.md"
                ) from error
        return self._known[kernel]


def asked_kernels() -> str:
    """EMULATED, REFERENCE or "" from the environment. Raises ConfigError for anything else."""
    asked = os.environ.get(KERNELS, "")
    if asked not in ("", EMULATED, REFERENCE):
        raise ConfigError(
            f"{KERNELS}: is {asked!r}; set it to {EMULATED} or {REFERENCE}, or not at all for the GPU's kernels on a GPU"
        )
    return asked


def open_library(*, ordinal: int = 0) -> Library:
    """The kernels that the environment asks for: the built ones on a GPU, or emulated ones.
    ordinal: of the GPU. Raises Unsupported, which names the missing part, and ConfigError."""
    asked = asked_kernels()
    if asked == REFERENCE:
        raise ConfigError(f"{KERNELS}: is {asked!r}, which is no library of kernels; unset it for those of the GPU")
    if not asked:
        return Loaded(fatbins_folder(), ordinal=ordinal)
    path = os.environ.get(KERNELS_LIBRARY)
    if not path:
        raise Unsupported(
            f"{KERNELS_LIBRARY}: is not set; {KERNELS}={EMULATED} needs a result of `python -m tools.kernels emulator`"
        )
    return Emulated(Path(path))
