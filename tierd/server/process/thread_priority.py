"""The event loop's thread runs first when there are more runnable processes than processors.

All waiting clients depend on this thread. The kernel prefers the task woken last: the client that
just got its answer, and copies while other calls wait. So the loop's thread gets a higher priority
if the daemon has CAP_SYS_NICE. Threads and processes that it starts do not inherit it. A niceness
or scheduling policy set before the start is kept.
"""

from __future__ import annotations

import os

NICE = -15
"""The weight of 28 processes of niceness 0. Without it, 16 clients on two processors got 0.86 of
the views and 0.88 of the puts (two daemons in turns)."""


def go_first() -> bool:
    """Sets this thread's priority. True on success. Call it before starting anything, since it
    changes no running thread."""
    if os.getpriority(os.PRIO_PROCESS, 0) or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)  # Linux applies it to this thread alone
    except OSError:
        return False
    return True
