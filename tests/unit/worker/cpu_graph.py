"""A CUDA graph's rules on a CPU: torch's operations and kernels' launches are recorded and replayed.

As on a GPU, a replay runs no Python of the captured work. It repeats the operations with the arrays
of the capture, whose contents it ruins before. Work that reads a value back, which would wait for
the device, ends the capture with a RuntimeError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tierd.kernels.library import Library

RUIN = -1_000_003


class Recorder(TorchDispatchMode):
    """One capture."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.steps: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and records it."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = kwargs or {}
        out = func(*args, **given)
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **given))
        elif not any(returned.alias_info for returned in func._schema.returns):
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            self.made += made
            self.steps.append(lambda: _copy(made, func(*args, **given)))
        return out

    def replay(self) -> None:
        """Ruins all that the capture made, and makes it again."""
        for array in self.made:
            array.fill_(float("nan") if array.is_floating_point() else RUIN)
        for step in self.steps:
            step()


class Recorded:
    """A library whose launches a capture records. captures: those that were made so far."""

    def __init__(self, library: Library) -> None:
        self.device, self.block_shared_bytes = library.device, library.block_shared_bytes
        self.captures: list[Recorder] = []
        self.replays = 0
        self._library, self._recorder = library, None

    def launch(self, kernel: str, grid: Sequence[int], params: ctypes.Structure, *, shared_bytes: int = 0) -> None:
        """As in Library."""
        copy = type(params).from_buffer_copy(params)
        self._library.launch(kernel, grid, copy, shared_bytes=shared_bytes)
        if self._recorder is not None:
            self._recorder.steps.append(lambda: self._library.launch(kernel, grid, copy, shared_bytes=shared_bytes))

    def resident_blocks(self, kernel: str, *, shared_bytes: int = 0) -> int:
        """As in Library."""
        return self._library.resident_blocks(kernel, shared_bytes=shared_bytes)

    def captured(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """In place of Backend.captured."""
        recorder = self._recorder = Recorder()
        try:
            with recorder:
                result = work()
        finally:
            self._recorder = None
        self.captures.append(recorder)

        def replay() -> Any:
            self.replays += 1
            recorder.replay()
            return result

        return replay


def _copy(targets: Sequence[torch.Tensor], out: Any) -> None:
    sources = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
