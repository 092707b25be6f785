"""A failed start prints one line without a traceback: the path or setting, and the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.system.warm import Daemon
from tierd.errors import Unavailable

SMALL = 'nvme = []\n[[host]]\ncapacity = "4 MiB"\nsegment = "1 MiB"\n'


def log_of(tmp_path: Path, config: str = SMALL, **env: str) -> str:
    """The log of a daemon that fails to start."""
    daemon = Daemon(config, root=tmp_path, env=env)
    with pytest.raises(Unavailable, match=r"exit status \d"), daemon:
        pass
    return daemon.log


@pytest.mark.parametrize("name", ["TIERD_RUNTIME_DIR", "TIERD_STATE_DIR"])
@pytest.mark.parametrize("place", ["/sys/tierd", "/proc/self/tierd/deep", "file/below"])
def test_directories_that_cannot_be_made(tmp_path: Path, name: str, place: str) -> None:
    """A runtime or state directory below a file or on a read-only file system is named in the refusal."""
    (tmp_path / "file").write_text("")
    wanted = str(tmp_path / place)
    log = log_of(tmp_path, **{name: wanted})
    assert "Traceback" not in log
    assert f"tierd: {os.path.dirname(wanted) if 'file' in place or 'deep' in place else wanted}" in log, log


@pytest.mark.skipif(find_spec("kvikio") is not None, reason="kvikio is installed here")
def test_a_package_that_is_chosen_and_missing(tmp_path: Path) -> None:
    """A device tier that is to read by kvikio names the package and the remedy if it is missing."""
    log = log_of(tmp_path, SMALL + '[[device]]\nkind = "cuda"\ndirect_reads = "kvikio"\n')
    assert "Traceback" not in log
    assert 'device.0: direct_reads = "kvikio", which is not installed; pip install kvikio-cu13, or set "auto"' in log


@pytest.mark.parametrize("link", ["tierd.lock", "instance"])
def test_links_in_the_place_of_files(tmp_path: Path, link: str) -> None:
    """The daemon follows no symlink in place of its own file; if this stops its start, it names the link."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / link).symlink_to(tmp_path / "elsewhere")
    daemon = Daemon(SMALL, root=tmp_path)
    try:
        with daemon:
            pass
    except Unavailable:
        assert f"tierd: {state / link}: Too many levels of symbolic links" in daemon.log
    assert "Traceback" not in daemon.log
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "text",
    [
        'server = { runtime_dir = "/x\\u0000" }',
        'host = [{ arena_dir = "/x\\u0000" }]',
        'nvme = [{ path = "/x\\u0000y" }]',
    ],
)
def test_paths_with_nul(tmp_path: Path, text: str) -> None:
    """A path with NUL is refused with a message."""
    log = log_of(tmp_path, f"{text}\n" if "host" in text else f'{text}\n[[host]]\ncapacity = "4 MiB"\n')
    assert "Traceback" not in log
    assert "is no absolute path" in log


@pytest.mark.parametrize(
    "arguments",
    [
        ["epoch", "bump", "--namespace", "4294967296"],
        ["epoch", "bump", "--namespace", "-1"],
        ["epoch", "bump", "--model", "\udcff"],
        ["blocks", "--namespace", "4294967296"],
        ["blocks", "--offset", "18446744073709551616"],
        ["status", "--target", "/x" * 100],
        ["status", "--target", "127.0.0.1:0"],
    ],
    ids=" ".join,
)
def test_operators_arguments(arguments: list[str]) -> None:
    """An operator's argument that no message can carry is refused without a traceback."""
    with Daemon(SMALL) as daemon:
        env = os.environ | {"TIERD_TARGET": daemon.target}
        command = [sys.executable, "-m", "tierd.cli.ctl", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert b"Traceback" not in done.stderr
