"""SGLang's own unchanged modules on a machine without a GPU, and one daemon for each test module.

PyPI's torchvision is for CUDA. If its C++ part does not load, its import fails at fakes of two
operators that must exist. import_pools declares them; nothing calls them. SGLang reserves 10 GiB of
a machine's memory before it makes a host pool. The tests' pools have a few KiB, with no reserve.
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
    """Imports SGLang's host pools. Declares torchvision's operators without bodies if its own do not load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sglang warns of parts that a CPU lacks
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
    """The module's daemon, which `alive` keeps running."""
    with Daemon() as running:
        yield running


@pytest.fixture(autouse=True)
def alive(daemon: Daemon) -> None:
    """Restarts a daemon that an earlier test has ended."""
    if daemon.has_ended:
        daemon.start()
