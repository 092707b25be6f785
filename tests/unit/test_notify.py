"""What systemd hears."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd import notify


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "n"))
        listener.setblocking(False)
        yield listener


@pytest.mark.parametrize(
    ("say", "line"), [(notify.ready, b"READY=1"), (notify.alive, b"WATCHDOG=1"), (notify.stopping, b"STOPPING=1")]
)
def test_states_arrive(systemd: socket.socket, say, line: bytes) -> None:
    """Each state is one datagram that begins with the line systemd knows."""
    assert say({"NOTIFY_SOCKET": systemd.getsockname()})
    assert systemd.recv(4096).splitlines()[0] == line


def test_abstract_sockets_are_reached() -> None:
    """A name that begins with @ lives in the abstract namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0tierd-test-{os.getpid()}")
        assert notify.ready({"NOTIFY_SOCKET": f"@tierd-test-{os.getpid()}"})
        assert listener.recv(4096).startswith(b"READY=1")


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/gone"}]
)
def test_nobody_listening_is_no_fault(environ: dict[str, str]) -> None:
    """Without a listener nothing is raised and nobody was told."""
    assert not notify.ready(environ)


def test_full_socket_does_not_wait(systemd: socket.socket) -> None:
    """When the supervisor does not read, telling it gives up at once."""
    environ = {"NOTIFY_SOCKET": systemd.getsockname()}
    assert not all(notify.alive(environ) for _ in range(100_000))


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "often"}, None),
    ],
)
def test_watchdog_interval_is_half_the_limit(environ: dict[str, str], interval_s: float | None) -> None:
    """The interval is half of WATCHDOG_USEC when this process is meant, else there is none."""
    assert notify.watchdog_interval_s(environ, pid=7) == interval_s
