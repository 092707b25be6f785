"""Who runs first where more processes want a processor than there are: the thread of the event loop.

Every client that waits, waits for this one thread, and the kernel runs whoever was woken last: the client that has just got its answer. It copies for as long
as it likes while the others' calls lie there, and no other processor has anything to do. Purpose: the loop's thread goes before them, where the daemon may say so (as root,
or with CAP_SYS_NICE). Non-purpose: real-time scheduling, the priority of anything else (threads that write to stores: tiers/lanes.py). Invariants: threads and processes that the loop begins are like everybody's; a niceness or a scheduling
policy that the daemon was started with is its operator's word, and stays.
"""

from __future__ import annotations

import os

NICE = -15
"""The weight of 28 processes of niceness 0. With 16 clients on two processors gets came to 1.0 of what one client alone makes, and to 0.75 at 0."""


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
