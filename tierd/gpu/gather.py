"""Small runs, copied by a kernel directly between the device and mapped host memory.

`runs` and `cutover` decide which runs are small, `device.Lane` when they have arrived. The kernel's
parameters stay until its launcher says that it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np

from tierd.errors import TierdError, TierFailed
from tierd.gpu.device import Device
from tierd.gpu.kernel_columns import KernelColumns
from tierd.gpu.runs import RUNS_MAX, Runs
from tierd.kernels.pages import copy_runs

ROW = np.dtype([("to", "<u8"), ("from", "<u8"), ("length", "<u4")])
CALLS = 4
"""In flight at one time; more wait for one of them to end."""


class Gather:
    """The kernel on one GPU. Threads may share it."""

    def __init__(self, device: Device) -> None:
        """`device.kernels` must have it. Raises Overloaded."""
        self._device = device
        self._free: SimpleQueue[KernelColumns] = SimpleQueue()
        with ExitStack() as failed:
            for _ in range(CALLS):
                arguments = KernelColumns(device, ROW, RUNS_MAX)
                failed.callback(arguments.close)
                self._free.put(arguments)
            self._ends = failed.pop_all()

    @contextmanager
    def prepared(self, runs: Runs) -> Iterator[Callable[[Any], None]]:
        """A launch that copies at most RUNS_MAX runs, which must have arrived when this block ends."""
        arguments, count = self._free.get(), len(runs.lengths)
        try:
            for name, column in zip(ROW.names or (), runs, strict=True):
                arguments.columns[name][:count] = column
            yield lambda stream: self._launch(arguments, count, stream)
        finally:
            self._free.put(arguments)

    def close(self) -> None:
        """Call it after all copies have ended."""
        self._ends.close()

    def _launch(self, arguments: KernelColumns, count: int, stream: Any) -> None:
        """Raises TierFailed for any error of the driver, since the caller is not at fault."""
        to, of, lengths = (arguments.buffer(name, count) for name in ROW.names or ())
        try:
            copy_runs(self._device.kernels.into(stream), to, of, lengths=lengths)
        except TierdError as error:
            raise TierFailed(f"{self._device.name}: small pages cannot be gathered ({error})") from error
