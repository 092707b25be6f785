"""A test's own systemd as process 1 of its own namespaces. It never changes this machine's files.

Purpose: run the shell commands of the installation documents exactly as they stand. Non-purpose: a
network; only loopback exists.
Invariants: all writes go to memory and end with the machine. Nothing outlives the test's process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import pytest

BOOT = """
set -e
mount -t tmpfs -o size=2g tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs tmpfs dev/shm
mount -t tmpfs -o mode=0755 tmpfs run
while [ $# -gt 1 ]; do shift; mkdir -p "srv/$(basename "$1")"; mount --bind -o ro "$1" "srv/$(basename "$1")"; done
mount -t tmpfs tmpfs tmp
mount -t tmpfs -o mode=0755 tmpfs mnt
ip link set lo up
mkdir before
pivot_root . before
umount -l /before
exec env -i container=test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=basic.target --show-status=no
"""
NAMESPACES = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net")
UP = ("running", "degraded")
BOOT_S, END_S = 90.0, 20.0


class Machine:
    """A context manager. folders: mounted read-only as /srv/NAME. Skips if systemd cannot boot here."""

    def __init__(self, place: Path, *folders: Path) -> None:
        self._place, self._folders = place, folders
        self._init = ""

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            pytest.skip("a systemd of its own takes root")
        if missing := [n for n in ("unshare", "nsenter", "systemd-run", "ip", "runuser") if not shutil.which(n)]:
            pytest.skip(f"not installed here: {', '.join(missing)}")
        words = ["unshare", *NAMESPACES, "--fork", "--propagation=private", "--kill-child", "bash", "-c", BOOT, "boot"]
        self._place.joinpath("machine").mkdir()
        places = [str(self._place / "machine"), *map(str, self._folders)]
        with (self._place / "boot.log").open("wb") as log:
            self._process = subprocess.Popen([*words, *places], stdout=log, stderr=log)
        until = time.monotonic() + BOOT_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > until:
                said = (self._place / "boot.log").read_text(errors="replace")[-2000:]
                self.__exit__()
                pytest.skip(f"no systemd can be booted here: {said or 'it did not come up in time'}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # the kernel kills every process of the namespace with its process 1
        self._process.wait(END_S)

    def typed(self, script: str, *, instead: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> str:
        """Runs a script as root in /srv/repo, which must succeed; its output. instead: replacements for words."""
        for word, other in (instead or {}).items():
            script = script.replace(word, other)
        done = self._run(["bash", "-e", "-o", "pipefail", "-c", f"cd /srv/repo\n{script}"], timeout_s=timeout_s)
        if done.returncode:
            log = self._run(["journalctl", "--no-pager", "--lines=60"], timeout_s=30.0).stdout
            raise AssertionError(f"{done.returncode}: {script}\n{done.stdout[-4000:]}{done.stderr[-4000:]}\n{log}")
        return done.stdout + done.stderr

    def _run(self, words: list[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        inside = [
            "nsenter",
            "-t",
            self._init,
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            "-C",
            "--",
            "env",
            "-i",
            path,
            "HOME=/root",
        ]
        return subprocess.run([*inside, *words], capture_output=True, text=True, check=False, timeout=timeout_s)

    def _is_up(self) -> bool:
        try:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            if not children or Path(f"/proc/{children[0]}/comm").read_text() != "systemd\n":
                return False
        except OSError:
            return False
        self._init = children[0]
        return self._run(["systemctl", "is-system-running"], timeout_s=30.0).stdout.strip() in UP
