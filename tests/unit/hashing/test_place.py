"""Where the hash process lies down: beside the daemon, and bound to no processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from tierd.hashing.place import lie_down_beside, processor_of

MINE = sorted(os.sched_getaffinity(0))


@contextmanager
def resident(processor: int) -> Iterator[int]:
    """A process that runs on one processor alone."""
    code = f"import os, sys; os.sched_setaffinity(0, {{{processor}}}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


@pytest.mark.skipif(len(MINE) < 2, reason="there is one processor")
@pytest.mark.parametrize("processor", MINE[:2])
def test_it_lies_down_where_the_daemon_was(processor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and may run wherever it might before."""
    been: list[int] = []
    bind = os.sched_setaffinity

    def bind_and_look(process: int, processors: Iterable[int]) -> None:
        """While it is bound: the kernel may move a thread that is not at any moment."""
        bind(process, processors)
        been.append(processor_of(threading.get_native_id()))

    with resident(processor) as daemon:
        assert processor_of(daemon) == processor
        monkeypatch.setattr(os, "sched_setaffinity", bind_and_look)
        lie_down_beside(daemon)
    assert been[0] == processor
    assert sorted(os.sched_getaffinity(0)) == MINE


@pytest.mark.skipif(len(MINE) < 2, reason="there is one processor")
def test_it_goes_nowhere_where_it_may_not_be() -> None:
    """A hash process that is kept off the daemon's processor stays off it; so does one whose daemon has gone."""
    with resident(MINE[0]) as daemon:
        os.sched_setaffinity(0, MINE[1:])
        try:
            lie_down_beside(daemon)
            assert sorted(os.sched_getaffinity(0)) == MINE[1:]
        finally:
            os.sched_setaffinity(0, MINE)
    lie_down_beside(1 << 22)
    assert sorted(os.sched_getaffinity(0)) == MINE
