"""NVIDIA's cuFile, configured not to fall back to reads through host memory.

`CuFile` registers files and device memory, and reads. `probe` tests whether a read was direct;
`direct` uses the reads. A read bypasses host memory unless an option of the machine forces it,
which the counts show. A read has ended when `read` returns.

kvikio is not used. It can disable the fallback, but counts its own calls, not cuFile's paths. It
opens files by path, while the daemon passes descriptors, and it needs cupy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tierd.errors import Unsupported

ALL_COUNTS = 3
"""The level of counts that distinguishes paths."""
COUNTS = ("n_posix_reads", "n_nvfs_reads", "n_p2p_reads")


class CuFile:
    """cuFile of this process, one at a time. Threads may share it. Its errors raise Unsupported."""

    def __init__(self) -> None:
        """Raises Unsupported if cuFile is missing, or can only read through host memory."""
        try:
            self._library: Any = importlib.import_module("cuda.bindings.cufile")
        except ImportError as error:
            raise Unsupported(str(error)) from error
        library = self._library
        self._ask(library.set_parameter_bool, library.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE, False)
        self._ask(library.driver_open)
        try:
            self._ask(library.set_stats_level, ALL_COUNTS)
            self._ask(library.stats_start)
        except Unsupported:
            self.close()
            raise

    def register_file(self, descriptor: int) -> int:
        """A handle of the file. The descriptor (O_DIRECT) stays the caller's and must outlive it."""
        descr = self._library.Descr()
        descr.type, descr.handle.fd = self._library.FileHandleType.OPAQUE_FD, descriptor
        return int(self._ask(self._library.handle_register, descr.ptr))

    def deregister_file(self, handle: int) -> None:
        """No read of it may be in flight."""
        self._ask(self._library.handle_deregister, handle)

    def register_memory(self, address: int, length_bytes: int) -> None:
        """Register a whole allocation of device memory."""
        self._ask(self._library.buf_register, address, length_bytes, 0)

    def deregister_memory(self, address: int) -> None:
        """Call it before the memory is unmapped, with no read into it in flight."""
        self._ask(self._library.buf_deregister, address)

    def read(self, handle: int, length_bytes: int, *, at: int, memory: int, offset: int) -> str:
        """Read from `at` in the file into registered memory at `memory` + `offset`. Returns the
        fault, or "". All numbers are multiples of 4 KiB."""
        try:
            count = self._library.read(handle, memory, length_bytes, at, offset)
        except (self._library.cuFileError, ValueError) as error:
            # An error of the system, whose number the bindings take for one of cuFile's.
            return f"cuFile: the system refused the read ({error})"
        if count == length_bytes:
            return ""
        return f"cuFile read {count} of {length_bytes} bytes" if count >= 0 else f"cuFile: {self._words(-count)}"

    def counts(self) -> dict[str, int]:
        """Number of reads so far, by path."""
        counts = self._library.StatsLevel3()
        self._ask(self._library.get_stats_l3, counts.ptr)
        return {name: sum(getattr(counts.per_gpu_stats[i], name) for i in range(counts.num_gpus)) for name in COUNTS}

    def close(self) -> None:
        """All files and memory must be deregistered."""
        self._ask(self._library.driver_close)

    def _ask(self, function: Callable[..., Any], *given: Any) -> Any:
        try:
            return function(*given)
        except self._library.cuFileError as error:
            raise Unsupported(str(error)) from error
        except RuntimeError as error:  # of the bindings: no library, or one without this function
            reason = str(error).strip()
            raise Unsupported(
                f"{reason}; install libcufile (of the CUDA toolkit, or pip install nvidia-cufile)"
            ) from error

    def _words(self, code: int) -> str:
        """The meaning of an error code of a read."""
        try:
            return f"{self._library.OpError(code).name} ({code})"
        except ValueError:
            return f"error {code}"
