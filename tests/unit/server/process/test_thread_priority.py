"""The thread of the daemon that has priority over all others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tierd.server.process.thread_priority import NICE

NOBODY = 65534
PLAIN = "os.setpriority(os.PRIO_PROCESS, 0, 0); "
"""A daemon's usual start, independent of the tests' own niceness."""
SCRIPT = """
import json, os, threading
from tierd.server.process import thread_priority

def niceness():
    return os.getpriority(os.PRIO_PROCESS, 0)

{before}
said, seen = thread_priority.go_first(), []
thread = threading.Thread(target=lambda: seen.append(niceness()))
thread.start()
thread.join()
child = os.fork()
if not child:
    os._exit(niceness() + 100)
print(json.dumps([said, niceness(), *seen, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 100]))
"""


def told(before: str) -> list[int]:
    """Of a child process: the return value, and the niceness of its thread, a later thread and a fork."""
    script = SCRIPT.format(before=before)
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    return list(map(int, json.loads(ran.stdout)))


def may_go_first() -> bool:
    """Whether this machine allows a lower niceness."""
    lower = "import os; os.setpriority(os.PRIO_PROCESS, 0, -1)"
    return subprocess.run([sys.executable, "-c", lower], check=False, capture_output=True, timeout=60).returncode == 0


needs_right = pytest.mark.skipif(not may_go_first(), reason="needs root or CAP_SYS_NICE")


@needs_right
def test_one_thread_goes_first() -> None:
    """The calling thread gets priority; threads and processes that it starts have normal niceness."""
    assert told(PLAIN) == [True, NICE, 0, 0]


def test_who_was_started_with_a_niceness_keeps_it() -> None:
    """A daemon that was started with a niceness keeps it."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + 3
    assert told("os.nice(3)") == [False, niceness, niceness, niceness]


@needs_right
def test_who_was_started_with_a_policy_keeps_it() -> None:
    """A daemon that was started with a batch policy keeps it."""
    assert told(f"{PLAIN}os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))") == [False, 0, 0, 0]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_who_may_not_runs_like_everybody() -> None:
    """Without the right nothing is raised and nothing changes."""
    assert told(f"{PLAIN}os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})") == [False, 0, 0, 0]
