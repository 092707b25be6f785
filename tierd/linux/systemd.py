"""Tells systemd how the daemon is: READY, WATCHDOG, STOPPING, over the datagram socket that NOTIFY_SOCKET names.

Purpose: `Type=notify` and `WatchdogSec=` of deploy/tierd.service. Non-purpose: any other service manager; without NOTIFY_SOCKET
every call does nothing. Invariant: never raises and never waits, since a daemon must not fall over its supervisor.
"""

from __future__ import annotations

import os
import socket


def ready() -> bool:
    """Serving: what is ordered after the unit may start. True if somebody was told."""
    return _send("READY=1\nSTATUS=serving")


def loading() -> bool:
    """Serving what is in memory; what is ordered after the unit still waits. True if somebody was told."""
    return _send("STATUS=serving from memory, the stores are loading")


def alive() -> bool:
    """The event loop turns; to be said every `watchdog_interval_s`. True if somebody was told."""
    return _send("WATCHDOG=1")


def stopping() -> bool:
    """Shutdown has begun. True if somebody was told."""
    return _send("STOPPING=1\nSTATUS=draining")


def watchdog_interval_s() -> float | None:
    """Seconds between two `alive`: half of what systemd allows this process. None: nobody watches it."""
    meant = os.environ.get("WATCHDOG_PID", "")
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    if not limit_us.isdecimal() or meant not in ("", str(os.getpid())):
        return None
    return int(limit_us) / 2e6 or None


def _send(state: str) -> bool:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as to:
            to.connect("\0" + address[1:] if address.startswith("@") else address)
            to.send(state.encode())
    except OSError:
        return False
    return True
