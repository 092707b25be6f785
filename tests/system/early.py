"""Functions that run in a forked child before any handler of tierd, so tierd is imported later."""

from __future__ import annotations

import os
from collections.abc import Callable

first_in_child: list[Callable[[], object]] = []
"""Called in every child of this process. Only the tests that fill it make it non-empty."""


def _run() -> None:
    for call in first_in_child:
        call()


os.register_at_fork(after_in_child=_run)
