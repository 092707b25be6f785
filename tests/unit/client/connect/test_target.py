"""The addresses at which the client looks for a daemon."""

from __future__ import annotations

import pytest

from tierd.client.connect.target import LocalTarget, RemoteTarget, resolve_target
from tierd.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("/run/tierd", LocalTarget("/run/tierd")),
        ("./here", LocalTarget("./here")),
        (".", LocalTarget(".")),
        ("localhost:9440", RemoteTarget("localhost", 9440)),
        ("[::1]:9440", RemoteTarget("::1", 9440)),
        ("[::1]:9440?codec=lz4", RemoteTarget("::1", 9440, "lz4")),
    ],
)
def test_forms(text, target):
    """A target is a directory or host:port, optionally with a codec."""
    assert resolve_target(text) == target
    assert resolve_target(str(target)) == target


@pytest.mark.parametrize(
    "text",
    [
        "here",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:1x",
        "host:1?kodec=lz4",
        "/" + "x" * 100,
        "::1",
        "::1:1",
        "[::1",
    ],
)
def test_faults(text):
    """Any other text is refused, and so is a directory whose socket path is too long."""
    with pytest.raises(InvalidArgument):
        resolve_target(text)


def test_order(tmp_path):
    """The order is: argument, TIERD_TARGET, TIERD_RUNTIME_DIR, the user's own directory."""
    environ = {"TIERD_TARGET": "/a/b", "TIERD_RUNTIME_DIR": "/c/d", "XDG_RUNTIME_DIR": str(tmp_path)}
    assert resolve_target("/x/y", environ=environ) == LocalTarget("/x/y")
    assert resolve_target(environ=environ) == LocalTarget("/a/b")
    del environ["TIERD_TARGET"]
    assert resolve_target(environ=environ) == LocalTarget("/c/d")
    del environ["TIERD_RUNTIME_DIR"]
    assert resolve_target(environ=environ) == LocalTarget(f"{tmp_path}/tierd")


def test_socket_names():
    """The directory's sockets have the documented names."""
    target = LocalTarget("/run/tierd")
    assert (target.rpc_path, target.session_path) == ("/run/tierd/tierd.sock", "/run/tierd/session.sock")
