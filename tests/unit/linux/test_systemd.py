"""The daemon's notifications to systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.linux import systemd


@pytest.fixture
def notify_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "n"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", listener.getsockname())
        yield listener


@pytest.mark.parametrize(
    ("say", "line"), [(systemd.ready, b"READY=1"), (systemd.alive, b"WATCHDOG=1"), (systemd.stopping, b"STOPPING=1")]
)
def test_states_arrive(notify_socket: socket.socket, say, line: bytes) -> None:
    """Each state is one datagram that begins with the line systemd knows."""
    assert say()
    assert notify_socket.recv(4096).splitlines()[0] == line


def test_abstract_sockets_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that begins with @ is in the abstract namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0tierd-test-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@tierd-test-{os.getpid()}")
        assert systemd.ready()
        assert listener.recv(4096).startswith(b"READY=1")


@pytest.mark.parametrize("address", [None, "", "vsock:2:1", "/gone"])
def test_nobody_listening_is_no_fault(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    """Without a listener nothing is raised, and the function returns false."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not systemd.ready()


def test_full_socket_does_not_wait(notify_socket: socket.socket) -> None:
    """When the supervisor does not read, a notification gives up at once."""
    assert not all(systemd.alive() for _ in range(100_000))


@pytest.mark.parametrize(
    ("limit_us", "meant", "interval_s"),
    [
        ("", "", None),
        ("30000000", "", 15.0),
        ("30000000", "this", 15.0),
        ("30000000", "another", None),
        ("0", "", None),
        ("often", "", None),
    ],
)
def test_watchdog_interval_is_half_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit_us: str, meant: str, interval_s: float | None
) -> None:
    """The interval is half of WATCHDOG_USEC if this process is meant, else None."""
    monkeypatch.setenv("WATCHDOG_USEC", limit_us)
    pids = {"": "", "this": os.getpid(), "another": os.getpid() + 1}
    monkeypatch.setenv("WATCHDOG_PID", str(pids[meant]))
    assert systemd.watchdog_interval_s() == interval_s
