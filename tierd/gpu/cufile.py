"""NVIDIA's cuFile, configured not to fall back to reads through host memory.

`CuFile` registers files and device memory, and reads. `probe` tests whether a read was direct;
`direct` uses the reads. A read bypasses host memory unless an option of the machine forces it,
which the counts show. A read has ended when `read` returns.

`KvikIO` does the same by kvikio, if the configuration chooses it. kvikio counts its own calls and
not cuFile's paths. So the counts are cuFile's here too. It opens each file once more, by its path
in /proc. Its package needs cupy, and each of its reads waits for the default stream first.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

from tierd.errors import Unsupported

ALL_COUNTS = 3
"""The level of counts that distinguishes paths."""
COUNTS = ("n_posix_reads", "n_nvfs_reads", "n_p2p_reads")
KVIKIO = "kvikio"
"""The package, and its value of the setting `direct_reads`."""


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
        """Calls cuFile. Raises Unsupported."""
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


class KvikIO(CuFile):
    """The same by kvikio's handles."""

    def __init__(self) -> None:
        """Raises Unsupported also if kvikio is missing."""
        super().__init__()
        try:
            self._kvikio: Any = importlib.import_module(KVIKIO)
            importlib.import_module(f"{KVIKIO}.defaults").set("compat_mode", self._kvikio.CompatMode.OFF)
        except (ImportError, RuntimeError) as error:
            self.close()
            raise Unsupported(f'{error}; pip install kvikio-cu13, or set direct_reads = "auto"') from error
        self._files: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    def register_file(self, descriptor: int) -> int:
        """As `CuFile.register_file`."""
        number = next(self._numbers)
        self._files[number] = self._kvik(self._kvikio.CuFile, f"/proc/self/fd/{descriptor}", "r")
        return number

    def deregister_file(self, handle: int) -> None:
        """As `CuFile.deregister_file`."""
        self._kvik(self._files.pop(handle).close)

    def register_memory(self, address: int, length_bytes: int) -> None:
        """As `CuFile.register_memory`."""
        self._kvik(self._kvikio.memory_register, _Memory(address, length_bytes))

    def deregister_memory(self, address: int) -> None:
        """As `CuFile.deregister_memory`."""
        self._kvik(self._kvikio.memory_deregister, _Memory(address, 1))

    def read(self, handle: int, length_bytes: int, *, at: int, memory: int, offset: int) -> str:
        """As `CuFile.read`."""
        try:
            count = self._files[handle].raw_read(_Memory(memory, offset + length_bytes), length_bytes, at, offset)
        except RuntimeError as error:
            return f"kvikio: {error}"
        return "" if count == length_bytes else f"kvikio read {count} of {length_bytes} bytes"

    @staticmethod
    def _kvik(function: Callable[..., Any], *given: Any) -> Any:
        try:
            return function(*given)
        except (RuntimeError, OSError) as error:
            raise Unsupported(f"kvikio: {error}") from error


class _Memory:
    """Device memory as kvikio takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "stream": None,
        }


LIBRARIES: dict[str, type[CuFile]] = {"auto": CuFile, KVIKIO: KvikIO}
"""By the setting `direct_reads`."""
