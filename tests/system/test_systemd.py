"""deploy/README.md's service in its own systemd: the true sandbox, users and paths, in smaller sizes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.documented import ROOT, shell_blocks
from tests.system.booted import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
INSTALL, PURGE, MEMBER, PLACES, _GPUS, _CONTAINER = (block.script for block in shell_blocks("deploy/README.md"))
SITE = Path(sysconfig.get_path("purelib"))
INSTEAD = {
    "python3 -m venv /opt/tierd": f"python3 -m venv /opt/tierd; echo /srv/{SITE.name} > /opt/tierd/lib/python3.{sys.version_info.minor}/site-packages/a.pth",
    "pip install .": "pip install --quiet --no-deps --no-index /srv/wheel/*.whl",
    "size=330g": "size=300m",
}
"""There is no network: tierd's dependencies are this environment's, and its wheel was built before."""
SMALLER = (
    (r'capacity = ".*"', 'capacity = "128 MiB"'),
    (r'segment = ".*"', 'segment = "8 MiB"'),
    (r'direct = "on"', 'direct = "auto"'),
)
ENGINE = """
import logging, sys
logging.basicConfig()
from tierd.client import Client, NamespaceSpec
with Client(best_effort=True) as client:
    llama = client.open_namespace(NamespaceSpec(model="llama", tokens_per_block=16, block_bytes=1 << 16))
    put = client.put(llama, list(range(64)), [bytes(1 << 16)] * 4, durable=True)
    print("status", int(put.statuses[0]), "held", client.get(llama, list(range(64))).tokens)
"""
PUT, EXISTS, FAILED = "status 1 held 64", "status 3 held 64", "status 7 held 0"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with deploy/ and configs/ in smaller sizes, a wheel of this repository, and a user `vllm`."""
    asked = ["/usr/bin/python3", "-c", "import sys, ensurepip; print(sys.version_info.minor)"]
    if not Path(asked[0]).exists() or subprocess.run(
        asked, capture_output=True, text=True, check=False
    ).stdout.strip() != str(sys.version_info.minor):
        pytest.skip(f"/usr/bin/python3 is no 3.{sys.version_info.minor} with venv, whose packages these tests run with")
    place = tmp_path_factory.mktemp("machine")
    repo, wheel = place / "repo", place / "wheel"
    for name in ("deploy", "configs"):
        shutil.copytree(ROOT / name, repo / name)
    for path in (repo / "configs").iterdir():
        text = path.read_text(encoding="utf-8")
        for long, short in SMALLER:
            text = re.sub(long, short, text)
        path.write_text(text, encoding="utf-8")
    (repo / "engine.py").write_text(ENGINE, encoding="utf-8")
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheel)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=120)
    with Machine(place, repo, wheel, SITE) as machine:
        machine.typed("useradd vllm")
        yield machine


@pytest.fixture(scope="module")
def installed(machine: Machine) -> str:
    """The output of the commands that install the service."""
    return machine.typed(INSTALL, instead=INSTEAD)


def as_service(machine: Machine, *settings: str) -> str:
    """The output and log of an engine that runs as a service of user vllm with these unit settings."""
    words = " ".join(f"--property={setting}" for setting in settings)
    run = "systemd-run --quiet --wait --collect --pipe --property=User=vllm --property=ProtectHome=yes"
    return machine.typed(f"{run} {words} /opt/tierd/bin/python /srv/repo/engine.py 2>&1")


def said_of_engines() -> list[str]:
    """The settings of an engine's unit in the document, except its user."""
    text = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```ini\n\[Service\]\nUser=vllm\n(.*?)```", text, re.DOTALL)
    return shown.split()


def test_the_service_starts_as_documented(machine: Machine, installed: str) -> None:
    """The documented commands succeed; the daemon serves after one start, with no unit fault."""
    assert "serving" in installed and "host.0" in installed and "nvme.0" in installed
    assert machine.typed("systemctl show --property=NRestarts,ActiveState tierd").split() == [
        "NRestarts=0",
        "ActiveState=active",
    ]
    assert machine.typed("systemd-analyze verify /etc/systemd/system/tierd.service 2>&1 | grep tierd || true") == ""
    assert "mode is different" not in machine.typed("journalctl -u tierd --no-pager")


def test_an_engines_user_is_served_once_it_is_a_member(machine: Machine, installed: str) -> None:
    """Before membership an engine's user gets an error that names the group. With the documented
    settings or command it puts and gets, also after a restart."""
    for target in ("", "Environment=TIERD_TARGET=/run/tierd"):
        refused = as_service(machine, *filter(None, [target]))
        assert FAILED in refused and "this user may not connect; join the daemon's group" in refused
    assert PUT in as_service(machine, *said_of_engines())
    machine.typed("systemctl restart tierd")
    assert EXISTS in as_service(machine, *said_of_engines())
    machine.typed(MEMBER)
    assert EXISTS in machine.typed("runuser -u vllm -- env TIERD_TARGET=/run/tierd /opt/tierd/bin/python engine.py")


def test_memory_is_freed_by_the_documents_purge_and_stores_stay(machine: Machine, installed: str) -> None:
    """The purge frees the arena but keeps durable blocks on NVMe; with --nvme nothing hits."""
    as_service(machine, *said_of_engines())
    assert "freed" in machine.typed(PURGE)
    assert machine.typed("find /dev/shm -type f") == ""
    machine.typed("systemctl start tierd")
    assert EXISTS in as_service(machine, *said_of_engines())
    assert "/var/lib/tierd" in machine.typed(re.sub(r"\s*#.*", " --nvme", PURGE))
    machine.typed("systemctl start tierd")
    assert PUT in as_service(machine, *said_of_engines())


def test_a_tmpfs_and_drives_of_its_own(machine: Machine, installed: str) -> None:
    """h100.toml as documented: the arena is on the tmpfs, the store on the drive, and both serve engines."""
    machine.typed("mkdir /mnt/nvme0 && mount -t tmpfs -o size=300m tmpfs /mnt/nvme0")
    machine.typed(PLACES, instead=INSTEAD)
    tiers = machine.typed("tierctl tiers --json")
    assert '"/mnt/tierd/' in tiers and '"/mnt/nvme0/tierd"' in tiers
    assert PUT in as_service(machine, *said_of_engines())
