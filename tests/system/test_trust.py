"""Ownership of sockets and directories: clients and daemons refuse paths that another user controls."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.elsewhere import Elsewhere, Talk
from tests.system.sdk import HOST, SMALL
from tests.system.tcp import SECRET
from tests.system.warm import Daemon
from tierd.client import Client, OpenedNamespace
from tierd.errors import ConfigError, NotPermitted, TierdError, Unavailable
from tierd.server.listeners import make_runtime_directory
from tierd.tiers.fsck.purge import list_arenas
from tierd.tiers.io.lock import private_directory, take_lock

STRANGER, VICTIM = 54431, 54432
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes files of other users, which takes root")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp that other users can reach."""
    root = Path(tempfile.mkdtemp(prefix="tierd-trust-"))
    root.chmod(0o1777)
    yield root
    shutil.rmtree(root)


@contextlib.contextmanager
def being(uid: int) -> Iterator[None]:
    """Runs the body as this user."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextlib.contextmanager
def listening(path: Path, *, uid: int) -> Iterator[socket.socket]:
    """A fake daemon of this user. Yields its session socket, on which a test accepts connections."""
    with contextlib.ExitStack() as stack:
        found = []
        for name, kind in (("session.sock", socket.SOCK_SEQPACKET), ("tierd.sock", socket.SOCK_STREAM)):
            found.append(stack.enter_context(socket.socket(socket.AF_UNIX, kind)))
            found[-1].bind(str(path / name))
            (path / name).chmod(0o666)
            with being(uid):
                found[-1].listen()
        found[0].settimeout(0.05)
        yield found[0]


def heard(listener: socket.socket) -> bytes:
    """The first message of a connected client; empty if there is none."""
    with contextlib.suppress(TimeoutError):
        connection, _ = listener.accept()
        with connection:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                return connection.recv(4096)
    return b""


def _of_stranger(shared: Path) -> Path:
    with being(STRANGER):
        (shared / "tierd").mkdir()
    return shared / "tierd"


def _below_stranger(shared: Path) -> Path:
    """A directory of root that a stranger can replace."""
    (_of_stranger(shared) / "run").mkdir()
    return shared / "tierd/run"


def _link(shared: Path) -> Path:
    """A stranger's link to our directory; if it is not sticky, the kernel follows (fs.protected_symlinks)."""
    shared.chmod(0o777)
    (shared / "ours").mkdir()
    with being(STRANGER):
        (shared / "tierd").symlink_to(shared / "ours")
    return shared / "tierd"


def _own_link(shared: Path) -> Path:
    """Our link to a stranger's directory."""
    _of_stranger(shared)
    (shared / "ours").symlink_to("tierd")
    return shared / "ours"


def _dots(shared: Path) -> Path:
    (shared / "ours").mkdir()
    _of_stranger(shared)
    return shared / "ours/../tierd"


def _open(shared: Path) -> Path:
    """A directory of ours that others may write to."""
    (shared / "tierd").mkdir()
    (shared / "tierd").chmod(0o777)
    return shared / "tierd"


def _ours(shared: Path) -> Path:
    """A directory of ours in which only the listener is a stranger's."""
    (shared / "tierd").mkdir()
    return shared / "tierd"


LAID = [_of_stranger, _below_stranger, _link, _own_link, _dots]


@pytest.mark.parametrize("with_credential", [True, False])
@pytest.mark.parametrize("lay", [*LAID, _open, _ours])
def test_fake_daemon_hears_nothing(shared: Path, lay: Callable[[Path], Path], *, with_credential: bool) -> None:
    """A client sends nothing to a socket or directory that a stranger controls: NotPermitted names it."""
    (shared / "secret").write_text(SECRET)
    credential_file = str(shared / "secret") if with_credential else ""
    place = lay(shared)
    with listening(place, uid=STRANGER) as listener:
        with Client(str(place), credential_file=credential_file) as client, pytest.raises(NotPermitted) as told:
            client.open_namespace(SMALL)
        assert "TIERD_TARGET" in str(told.value)
        assert str(STRANGER) in str(told.value) or "0777" in str(told.value)
        with Client(str(place), credential_file=credential_file, best_effort=True) as client:
            assert client.get(OpenedNamespace(SMALL), [1] * 16).tokens == 0
        assert heard(listener) == b""


def test_fake_daemon_at_the_default_place() -> None:
    """If another user made /tmp/tierd-<uid> first, a client without a target sends nothing there."""
    place = Path(f"/tmp/tierd-{VICTIM}")
    with being(STRANGER):
        place.mkdir()
    try:
        with listening(place, uid=STRANGER) as listener, Elsewhere(ask_default, "", uid=VICTIM, gid=VICTIM) as other:
            assert other.hear() in ("NotPermitted", "Unavailable")  # the machine may have a /run/tierd
            assert heard(listener) == b""
    finally:
        shutil.rmtree(place)


def ask_default(talk: Talk, _target: str) -> None:
    """Connects as a user whose environment names no target."""
    for name in ("TIERD_TARGET", "TIERD_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        os.environ.pop(name, None)
    try:
        Client().open_namespace(SMALL)
        talk.say("nothing")
    except TierdError as error:
        talk.say(type(error).__name__)
    talk.hear()


@pytest.mark.parametrize("owner", [0, STRANGER])
def test_system_daemon_is_trusted(shared: Path, owner: int) -> None:
    """If root gave a directory in a root-only place to the daemon's user, clients say hello there."""
    (shared / "run").mkdir()
    (shared / "run/tierd").mkdir()
    os.chown(shared / "run/tierd", owner, -1)
    (shared / "link").symlink_to("run/tierd")
    for place in (shared / "run/tierd", shared / "link"):
        with listening(shared / "run/tierd", uid=owner) as listener:
            with Client(str(place), best_effort=True) as client:
                client.get(OpenedNamespace(SMALL), [1] * 16)
            assert b"hello" in heard(listener)
        for name in ("session.sock", "tierd.sock"):
            (shared / "run/tierd" / name).unlink()


def test_foreign_grpc_socket() -> None:
    """A stranger's gRPC socket gets no session token, even beside the daemon's session socket."""
    with Daemon(HOST) as daemon, Client(daemon.target) as client:
        client.open_namespace(SMALL)
        path = Path(daemon.target) / "tierd.sock"
        path.unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            with being(STRANGER):
                listener.listen()
            with pytest.raises(NotPermitted, match=str(STRANGER)):
                next(iter(client.watch()))
            listener.settimeout(0.05)
            assert heard(listener) == b""


# -- the daemon's directories


@pytest.mark.parametrize("lay", LAID)
@pytest.mark.parametrize("make", [make_runtime_directory, private_directory, lambda path: take_lock(path, what="it")])
def test_no_directory_of_others_is_used(shared: Path, lay: Callable[[Path], Path], make: Callable[[Path], Any]) -> None:
    """On a path that a stranger controls, neither a directory nor a lock is made."""
    place = lay(shared)
    with pytest.raises(ConfigError, match=f"uid {STRANGER}"):
        make(place / "deep")
    assert not (place / "deep").exists()


@pytest.mark.parametrize("setting", ["runtime_dir", "state_dir", "arena_dir", "path"])
def test_daemon_uses_no_link_of_others(shared: Path, tmp_path: Path, setting: str) -> None:
    """A daemon does not start over a stranger's link and names it; it makes nothing behind the link."""
    place = _link(shared)
    section = {"arena_dir": "[[host]]", "path": "[[nvme]]"}.get(setting, "[server]")
    given = (
        ("" if setting == "path" else "nvme = []\n")
        + f'{section}\n{setting} = "{place}"\n'
        + ('capacity = "8 MiB"\n' if section != "[server]" else "")
    )
    with pytest.raises(Unavailable, match=f"uid {STRANGER}"):
        Daemon(given + ("" if setting == "arena_dir" else HOST), root=tmp_path).start()
    assert not list((shared / "ours").iterdir())


def test_arena_of_this_user_is_not_a_link_of_others(shared: Path, tmp_path: Path) -> None:
    """A stranger's link at tierd-<uid> in a shared arena_dir ends the start; purge and fsck skip it."""
    target = shared / "ours"
    (target / "instance/host.0").mkdir(parents=True, mode=0o700)
    with being(STRANGER):
        (shared / "tierd-0").symlink_to(target)
    with pytest.raises(Unavailable, match=f"uid {STRANGER}"):
        Daemon(f'nvme = []\n[[host]]\narena_dir = "{shared}"\ncapacity = "8 MiB"\n', root=tmp_path).start()
    assert [path.name for path in target.iterdir()] == ["instance"]
    assert not [arena for arena in list_arenas([str(shared)]) if arena.instance == "instance"]
