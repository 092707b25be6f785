"""Reports to systemd: READY, WATCHDOG, STOPPING, over the datagram socket in NOTIFY_SOCKET.

For `Type=notify` and `WatchdogSec=` of deploy/tierd.service. Without NOTIFY_SOCKET every call does
nothing. Calls never raise or wait: a daemon must not fail because of its supervisor.
"""

from __future__ import annotations

import os
import socket


def ready() -> bool:
    """Serving: units ordered after this one may start. True if systemd was told."""
    return _send("READY=1\nSTATUS=serving")


def loading() -> bool:
    """Serving from memory; units ordered after this one still wait. True if systemd was told."""
    return _send("STATUS=serving from memory, the stores are loading")


def alive() -> bool:
    """The event loop runs; call it every `watchdog_interval_s`. True if systemd was told."""
    return _send("WATCHDOG=1")


def stopping() -> bool:
    """Shutdown has begun. True if systemd was told."""
    return _send("STOPPING=1\nSTATUS=draining")


def watchdog_interval_s() -> float | None:
    """Seconds between calls of `alive`: half of systemd's limit. None: there is no watchdog."""
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
