"""The image of deploy/Containerfile, built, run with compose.yaml's settings and used from the host."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.documented import ROOT
from tierd.client import Client, NamespaceSpec
from tierd.testing.daemon import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
BASE = "docker.io/library/python:3.12-slim"
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates,passwd"
"""Debian's packages for what BASE has."""
CERTIFICATES = "/etc/ssl/certs"
UID = 10001
BUILD_S, CALL_S, READY_S = 1800.0, 60.0, 60.0


class Podman:
    """podman with its own storage, which ends with it."""

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="tierd-image-"))
        self.arena = Path(tempfile.mkdtemp(prefix="tierd-image-", dir="/dev/shm"))
        storage = ["--root", str(self.place / "store"), "--runroot", str(self.place / "run")]
        self._words = ["podman", *storage, "--storage-driver", "overlay"]
        if shutil.which("runc"):  # crun refuses cgroups of both versions
            self._words += ["--runtime", "runc"]

    def __call__(self, *words: str, is_checked: bool = True, limit_s: float = CALL_S) -> str:
        """The output of a command."""
        done = subprocess.run(
            [*self._words, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s
        )
        assert not is_checked or done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stderr if words[0] == "logs" else done.stdout  # the daemon logs to stderr

    def has_base(self) -> bool:
        """Gets the base image from a registry, or makes one with Python from Debian's packages."""
        self("pull", "--quiet", BASE, is_checked=False)
        if not self("images", "--quiet", BASE) and shutil.which("mmdebstrap"):
            root = self.place / "base.tar"
            words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
            if subprocess.run(words, check=False, timeout=BUILD_S).returncode == 0:
                self("import", "--quiet", str(root), BASE)
        return bool(self("images", "--quiet", BASE))

    def close(self) -> None:
        """Ends every container and removes all files."""
        self("rm", "--force", "--all", is_checked=False)
        self("system", "reset", "--force", is_checked=False)
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.rmtree(self.arena)


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """A podman that has the image `tierd`."""
    if os.geteuid() != 0 or not shutil.which("podman"):
        pytest.skip("no podman here, or not root (Debian: podman runc mmdebstrap)")
    made = Podman()
    try:
        if not made.has_base():
            pytest.skip(f"no registry has {BASE} for this machine, and mmdebstrap did not make a substitute")
        (settings := made.place / "pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}/ca-certificates.crt\n")
        mounts = [f"--volume={settings}:/etc/pip.conf:ro", f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"]
        words = ["--pull=never", "--isolation=chroot", "--format=docker", *mounts, "--tag=tierd"]
        made("build", "--file", "deploy/Containerfile", *words, ".", limit_s=BUILD_S)
        yield made
    finally:
        made.close()


def options(podman: Podman) -> list[str]:
    """The settings of compose.yaml's service as options. Its volumes are folders of the test."""
    service: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["tierd"]
    instead = {"/run/tierd": podman.place / "sockets", "/var/lib/tierd": podman.place / "state"}
    instead |= {"/etc/tierd/tierd.toml": podman.place / "tierd.toml", f"/dev/shm/tierd-{UID}": podman.arena}
    targets = [volume.removesuffix(":ro").rpartition(":")[2] for volume in service["volumes"]]
    volumes = [f"--volume={instead.pop(target)}:{target}" for target in targets]
    assert not instead and service["read_only"], "compose.yaml mounts other places; mount them here too"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = [f"--ulimit=nofile={min(most, service['ulimits']['nofile'])}", "--ulimit=core=0", "--ulimit=nproc=4096"]
    drops = [f"--cap-drop={name}" for name in service["cap_drop"]]
    drops += [f"--security-opt={name.partition(':')[0]}" for name in service["security_opt"]]
    tmpfs = [f"--tmpfs={place}" for place in service["tmpfs"]]
    return ["--read-only", f"--pid={service['pid']}", "--network=host", *volumes, *tmpfs, *drops, *limits]


def started(podman: Podman) -> dict[str, Any]:
    """Starts the daemon's container, and gives its status once it is ready."""
    podman("run", "--detach", "--name=tierd", *options(podman), "tierd")
    end = time.monotonic() + READY_S
    while not (said := podman("exec", "tierd", "tierctl", "status", "--json", is_checked=False)):
        assert time.monotonic() < end, podman("logs", "tierd")
        time.sleep(0.2)
    return dict(json.loads(said))


def test_a_container_serves_the_host_and_other_containers(podman: Podman) -> None:
    """The built image runs under the restrictions of compose.yaml. A client on the host puts and gets,
    a second container sees the tiers, and a new container serves the blocks of the first."""
    (podman.place / "tierd.toml").write_text(SMALL)
    for name in ("sockets", "state"):
        (podman.place / name).mkdir()
    for place in (podman.place / "sockets", podman.place / "state", podman.arena):
        os.chown(place, UID, UID)
    podman.place.chmod(0o711)
    assert started(podman)["state"]
    spec = NamespaceSpec(model="contained", tokens_per_block=16, block_bytes=4096)
    blocks = [bytes([number]) * 4096 for number in range(4)]
    for is_first in (True, False):
        with Client(str(podman.place / "sockets")) as client:
            space = client.open_namespace(spec)
            if is_first:
                client.put(space, range(64), blocks)
            got = client.get(space, range(64))
            assert [bytes(view) for view in got.views] == blocks
            del got
        podman("healthcheck", "run", "tierd")
        words = [f"--volume={podman.place / 'sockets'}:/run/tierd", "--env=TIERD_TARGET=/run/tierd", "--rm"]
        limits = [option for option in options(podman) if option.startswith(("--ulimit", "--pid", "--network"))]
        assert "host.0" in podman("run", *words, *limits, "--entrypoint=tierctl", "tierd", "tiers")
        podman("stop", "tierd")
        assert podman("inspect", "--format={{.State.ExitCode}}", "tierd").strip() == "0"
        podman("rm", "tierd")
        if is_first:
            started(podman)
