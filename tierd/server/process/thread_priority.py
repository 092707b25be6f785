"""The thread of the event loop runs first if more processes want a processor than there are.

Every waiting client waits for this one thread. The kernel prefers the task that was woken last: the client that has
just got its answer, which copies while the others' calls lie there. So the loop's thread goes first, if the daemon has
CAP_SYS_NICE. Threads and processes that it begins are like everybody's. A niceness or a scheduling policy that the
daemon was started with stays.
"""

from __future__ import annotations

import os

NICE = -15
"""The weight of 28 processes of niceness 0. Without it 16 clients on two processors made 0.86 of the views and 0.88 of
the puts (two daemons in turns)."""


def go_first() -> bool:
    """This thread, from now on. Whether it may: best before it begins anything, since what it has begun stays as it is."""
    if os.getpriority(os.PRIO_PROCESS, 0) or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)  # of this thread alone, as Linux has it
    except OSError:
        return False
    return True
