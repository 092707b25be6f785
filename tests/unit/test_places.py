"""The locations of a daemon's directories."""

from __future__ import annotations

import pytest

from tierd import places


def test_the_daemons_own_variable_wins() -> None:
    """TIERD_RUNTIME_DIR and TIERD_STATE_DIR come before everything else."""
    environ = {"TIERD_RUNTIME_DIR": "/a", "TIERD_STATE_DIR": "/b", "XDG_RUNTIME_DIR": "/x", "XDG_STATE_HOME": "/y"}
    assert (places.runtime_dir(environ, uid=7), places.state_dir(environ, uid=7)) == ("/a", "/b")


def test_the_sessions_directories_come_next() -> None:
    """XDG directories are used, with tierd as a subdirectory."""
    environ = {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_STATE_HOME": "/home/u/.state"}
    assert places.runtime_dir(environ, uid=7) == "/run/user/7/tierd"
    assert places.state_dir(environ, uid=7) == "/home/u/.state/tierd"


def test_root_uses_the_systems_directories() -> None:
    """Without variables, root uses /run and /var/lib."""
    assert (places.runtime_dir({}, uid=0), places.state_dir({}, uid=0)) == ("/run/tierd", "/var/lib/tierd")


def test_a_plain_user_falls_back_to_what_he_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """If /run/tierd and /var/lib/tierd are not writable, the daemon uses /tmp and the home directory."""
    monkeypatch.setattr(places.os, "access", lambda path, mode: False)
    environ = {"HOME": "/home/u"}
    assert places.runtime_dir(environ, uid=7) == "/tmp/tierd-7"
    assert places.state_dir(environ, uid=7) == "/home/u/.local/state/tierd"
