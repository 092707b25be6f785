"""The kernels of tierd in the GPU process: one library, launched into a thread's lane.

`tierd.kernels` has the kernels and their parameters. Code is loaded onto the GPU once for all
threads. A launch goes into the stream that its thread named last, and needs one.
"""

from __future__ import annotations

import threading
from typing import Any

from tierd.errors import InvalidArgument, Unsupported
from tierd.kernels.loaded import Loaded, fatbins_folder


class Kernels:
    """Kernels of one GPU. Threads may share it."""

    def __init__(self, ordinal: int) -> None:
        """`find_fault` reports missing parts. Raises Overloaded, TierFailed."""
        self._current = threading.local()
        self._fault = ""
        self._library: Loaded | None = None
        try:
            self._library = Loaded(fatbins_folder(), ordinal=ordinal, stream=lambda: int(self._current.stream))
        except (Unsupported, InvalidArgument) as error:
            self._fault = str(error)

    def find_fault(self, kernel: str) -> str:
        """Why a kernel cannot run; "": its code is on the GPU. Raises Overloaded, TierFailed."""
        try:
            if self._library is not None:
                self._library.resident_blocks(kernel)
        except (Unsupported, InvalidArgument) as error:
            return str(error)
        return self._fault

    def into(self, stream: Any) -> Loaded:
        """The library, for a launch by this thread into a stream."""
        assert self._library, self._fault
        self._current.stream = stream
        return self._library

    def close(self) -> None:
        """No launch may follow."""
        if self._library is not None:
            self._library.close()
