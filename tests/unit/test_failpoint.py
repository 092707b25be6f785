"""Fault points: each has one name, does nothing until armed, and then does exactly the armed fault."""

from __future__ import annotations

import ast
import errno
import signal
import subprocess
import sys
import time
import timeit
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.depth import report
from tests.repo.source import modules
from tierd import failpoint
from tierd.errors import InvalidArgument
from tierd.server.process import fault_socket

POINT = "nvme.data.before_sync"
OFF_NS, CALLS = 100.0, 100_000


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """Every test ends with no armed fault."""
    yield
    failpoint.disarm()


def called() -> Counter[str]:
    """The names in calls of failpoint() in the package, with counts."""
    calls = (node for module in modules() for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    return Counter(
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "failpoint"
    )


def test_every_point_stands_once() -> None:
    """The table and the code name the same points, each called in one place; there are at least 40."""
    assert called() == Counter(failpoint.POINTS.keys())
    assert len(failpoint.POINTS) >= 40


def test_costs_next_to_nothing_while_nothing_is_armed() -> None:
    """The target for an unarmed point is 0.1 us of processor time; the test asserts ten times that."""
    rounds = timeit.repeat(
        "point(name)",
        globals={"point": failpoint.failpoint, "name": POINT},
        timer=time.process_time,
        number=CALLS,
        repeat=5,
    )
    best_ns = min(rounds) / CALLS * 1e9
    report("fault point that is off", ns=round(best_ns, 1))
    assert best_ns < 10 * OFF_NS


def test_silent_while_nothing_is_armed() -> None:
    """An unarmed point does nothing, also while another one is armed."""
    failpoint.failpoint(POINT)
    failpoint.arm("nvme.journal.before_sync", "error:EIO")
    failpoint.failpoint(POINT)
    assert failpoint.hits() == {"nvme.journal.before_sync": 0}


def test_error_from_the_first_hit_on_for_so_many() -> None:
    """error:ENOSPC@2x2 raises at the second and third hit, and at no other."""
    failpoint.arm(POINT, "error:ENOSPC@2x2")
    seen = []
    for _ in range(5):
        try:
            failpoint.failpoint(POINT)
            seen.append(0)
        except OSError as error:
            seen.append(error.errno or 0)
    assert seen == [0, errno.ENOSPC, errno.ENOSPC, 0, 0]
    assert failpoint.hits() == {POINT: 5}


def test_delay_sleeps() -> None:
    """delay lets at least that much time pass, in the thread that passes the point."""
    failpoint.arm(POINT, "delay:0.05x1")
    begun = time.monotonic()
    failpoint.failpoint(POINT)
    assert time.monotonic() - begun >= 0.05


def test_kill_kills() -> None:
    """kill is SIGKILL: nothing after the point runs, no handler and no `finally`."""
    program = f"""
from tierd import failpoint
failpoint.arm({POINT!r}, "kill@2")
try:
    failpoint.failpoint({POINT!r})
    print("one", flush=True)
    failpoint.failpoint({POINT!r})
finally:
    print("two", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "one\n")


@pytest.mark.parametrize("fault", ["", "explode", "error", "error:EWHAT", "delay:soon", "kill@", "kill x2"])
def test_nonsense_is_refused(fault: str) -> None:
    """An unreadable fault raises InvalidArgument and arms nothing."""
    with pytest.raises(InvalidArgument):
        failpoint.arm(POINT, fault)
    assert failpoint.hits() == {}


def test_unknown_point_is_refused() -> None:
    """An unknown point raises InvalidArgument, so a test that arms a renamed point fails."""
    with pytest.raises(InvalidArgument, match=r"nvme\.nothing"):
        failpoint.arm("nvme.nothing", "kill")


def test_socket_speaks() -> None:
    """The fault socket arms, counts, waits and disarms; a malformed request gets an error reply."""
    assert fault_socket.answer(f"arm {POINT} count") is True
    failpoint.failpoint(POINT)
    assert fault_socket.answer("hits") == {POINT: 1}
    assert fault_socket.answer(f"await {POINT} 1 5") is True
    assert fault_socket.answer(f"await {POINT} 2 0.01") is False
    assert fault_socket.answer("disarm") is True
    assert fault_socket.answer("hits") == {}
    assert "error" in fault_socket.answer("arm nothing")  # type: ignore[operator]
    assert "error" in fault_socket.answer(f"arm {POINT} explode")  # type: ignore[operator]
