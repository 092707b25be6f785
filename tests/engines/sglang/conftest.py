"""SGLang on a machine without a GPU, for tests: its own modules as they are, and one daemon a module.

A torchvision whose C++ part does not load (the one on PyPI is for CUDA) declares fakes of two of its operators, which must exist: they are named here, and
nothing calls them. SGLang leaves 10 GiB of a machine's memory to others before it makes a host pool: those of the tests have some KiB, and leave nothing.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tierd.testing import Daemon

OPERATORS = ("nms", "qnms")
kept: list[object] = []


def import_pools() -> None:
    """SGLang's host pools, on any machine, and torchvision's operators without a body if it cannot load its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sglang's, of what lacks on a CPU
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            kept.append(_named_operators())
        importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
        base: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _named_operators() -> object:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor a) -> Tensor")
    return library


if importlib.util.find_spec("sglang") and importlib.util.find_spec("torchvision"):
    import_pools()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that runs when a test begins."""
    with Daemon() as running:
        yield running


@pytest.fixture(autouse=True)
def alive(daemon: Daemon) -> None:
    """One that a test has ended runs again."""
    if daemon.has_ended:
        daemon.start()
