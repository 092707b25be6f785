"""The owner's lock and private directories."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierd.errors import AlreadyOwned, ConfigError
from tierd.tiers.io.lock import find_owner, private_directory, take_lock

HOLD = """
import sys
from pathlib import Path
from tierd.tiers.io.lock import take_lock
lock = take_lock(Path(sys.argv[1]), what="test")
print("held", flush=True)
sys.stdin.read()
"""


def test_second_owner_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    """A lock that another process holds is refused with that process's id."""
    path = tmp_path / "owner.lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(AlreadyOwned, match=f"process {holder.pid}"):
            take_lock(path, what="instance")
        assert find_owner(path) == holder.pid


def test_lock_goes_with_a_killed_process(tmp_path: Path) -> None:
    """A lock is free at once after SIGKILL of its process."""
    path = tmp_path / "owner.lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        holder.kill()
        holder.wait()
    assert find_owner(path) is None
    take_lock(path, what="instance").release()


def test_lock_is_exclusive_within_a_process_and_free_after_release(tmp_path: Path) -> None:
    """A second lock in the same process is refused until the first is released."""
    lock = take_lock(tmp_path / "a.lock", what="x")
    with pytest.raises(AlreadyOwned):
        take_lock(tmp_path / "a.lock", what="x")
    lock.release()
    lock.release()
    take_lock(tmp_path / "a.lock", what="x").release(remove=True)
    assert not (tmp_path / "a.lock").exists()


def test_lock_is_not_inherited_by_programs(tmp_path: Path) -> None:
    """A child program started by the owner does not keep the lock alive."""
    lock = take_lock(tmp_path / "a.lock", what="x")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, close_fds=False):
        lock.release()
        take_lock(tmp_path / "a.lock", what="x").release()


def test_private_directory_is_made_0700(tmp_path: Path) -> None:
    """A missing directory is made for its owner alone, and a readable one becomes private."""
    assert private_directory(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    assert private_directory(tmp_path / "open").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_directory_that_others_write_is_refused(tmp_path: Path, mode: int) -> None:
    """A directory that others may write to is refused, as is one inside such a directory."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        private_directory(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        private_directory(tmp_path / "a" / "b")


def test_link_and_file_are_refused(tmp_path: Path) -> None:
    """A symbolic link in place of the directory is refused."""
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="link"):
        private_directory(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """A directory that another uid owns is refused with that uid."""
    (tmp_path / "a").mkdir(mode=0o700)
    os.chown(tmp_path / "a", 4711, -1)
    with pytest.raises(ConfigError, match="4711"):
        private_directory(tmp_path / "a")
