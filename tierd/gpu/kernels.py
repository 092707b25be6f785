"""The kernels of tierd in the GPU process: one library, launched into the lane that a thread is filling.

Purpose: `Kernels`. Non-purpose: which kernel, and its parameters (`tierd.kernels`). Invariants: code is brought to the GPU once, whoever launches it; a launch goes into the
stream that its thread has named last, and nothing is launched without one.
"""

from __future__ import annotations

import threading
from typing import Any

from tierd.errors import InvalidArgument, Unsupported
from tierd.kernels.loaded import Loaded, fatbins_folder


class Kernels:
    """Of one GPU. Threads may share it."""

    def __init__(self, ordinal: int) -> None:
        """What is missing is told by `find_fault`. Raises Overloaded, TierFailed."""
        self._current = threading.local()
        self._fault = ""
        self._library: Loaded | None = None
        try:
            self._library = Loaded(fatbins_folder(), ordinal=ordinal, stream=lambda: int(self._current.stream))
        except (Unsupported, InvalidArgument) as error:
            self._fault = str(error)

    def find_fault(self, kernel: str) -> str:
        """Why this kernel cannot be launched; empty if it can, and then its code is on the GPU. Raises Overloaded, TierFailed."""
        try:
            if self._library is not None:
                self._library.resident_blocks(kernel)
        except (Unsupported, InvalidArgument) as error:
            return str(error)
        return self._fault

    def into(self, stream: Any) -> Loaded:
        """The library, for a launch that this thread makes into a stream."""
        assert self._library, self._fault
        self._current.stream = stream
        return self._library

    def close(self) -> None:
        """Nothing may be launched after it."""
        if self._library is not None:
            self._library.close()
