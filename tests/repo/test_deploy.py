"""The deployment: the unit's sandbox, and its parts agree with each other and with the code."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.repo.source import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "tierd.service"
GPU = DEPLOY / "tierd.service.d" / "gpu.conf"
PLACES = DEPLOY / "tierd.service.d" / "places.conf"


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


@pytest.mark.parametrize("parts", [[UNIT], [UNIT, GPU], [UNIT, PLACES]], ids=["unit", "with GPUs", "with places"])
def test_sandbox_is_tight(parts: list[Path], tmp_path: Path) -> None:
    """systemd rates the unit's exposure at 2.0 or less, with each drop-in too."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / UNIT.name  # a drop-in counts as lines after the unit's
    unit.write_text("\n".join(part.read_text() for part in parts))
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    level = re.search(r"exposure level for .*: ([\d.]+)", answer.stdout)
    if not level:
        pytest.skip(f"systemd-analyze cannot rate units offline here: {answer.stderr.strip()[:200]}")
    assert float(level[1]) <= 2.0


@pytest.mark.parametrize("drop_in", [None, GPU, PLACES], ids=["unit", "with GPUs", "with places"])
def test_systemd_understands_every_line(drop_in: Path | None, tmp_path: Path) -> None:
    """systemd reads the unit, and each drop-in, without a complaint about a key or a value."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / UNIT.name  # systemd also asks whether the program exists
    unit.write_text(
        re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", UNIT.read_text(), flags=re.MULTILINE)
    )
    if drop_in:
        (tmp_path / f"{UNIT.name}.d").mkdir()
        shutil.copy(drop_in, tmp_path / f"{UNIT.name}.d")
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd before 250 verifies other units too")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_gpu_can_be_reached_with_the_drop_in_alone(service: dict[str, str]) -> None:
    """The unit hides devices; the drop-in opens NVIDIA's, lets memory be pinned, and no more."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(GPU)
    given = dict(parser["Service"])
    assert (service["PrivateDevices"], given.pop("PrivateDevices")) == ("yes", "no")
    assert (given.pop("DevicePolicy"), given.pop("LimitMEMLOCK")) == ("closed", "infinity")
    assert given.pop("ExecStartPre").startswith("-+/usr/bin/nvidia-modprobe ")
    assert given.keys() == {"DeviceAllow", "SystemCallFilter"} and given["SystemCallFilter"] == "@resources"
    allowed = re.findall(r"^DeviceAllow=(\S+) (\S+)$", GPU.read_text(), re.MULTILINE)
    assert len(allowed) >= 4 and all(name.startswith("char-nvidia") and rights == "rw" for name, rights in allowed)


@pytest.mark.parametrize("forbidden", ["PrivateUsers", "PrivateIPC", "PrivateNetwork", "DynamicUser"])
def test_sandbox_leaves_what_the_daemon_needs(service: dict[str, str], forbidden: str) -> None:
    """The unit keeps peer credentials, the arena in /dev/shm and the loopback listeners."""
    assert service.get(forbidden, "no") == "no"


def test_supervision_and_secrecy(service: dict[str, str]) -> None:
    """systemd sees the daemon ready and alive, no core is written, a stop keeps the arena."""
    wanted = {
        "Type": "notify",
        "LimitCORE": "0",
        "RemoveIPC": "no",
        "RuntimeDirectory": "tierd",
        "StateDirectory": "tierd",
    }
    assert {key: service.get(key) for key in wanted} == wanted
    assert service["WatchdogSec"]
    assert "TIERD_RUNTIME_DIR=/run/tierd" in service["Environment"]
    assert "TIERD_STATE_DIR=/var/lib/tierd" in service["Environment"]


def test_the_drop_in_names_every_place_of_the_profiles() -> None:
    """With the documented drop-in the unit may write every place of configs/ outside /dev/shm and
    /var/lib/tierd. It waits for their mounts."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(PLACES)
    writable = " ".join(re.findall(r"^ReadWritePaths=(.+)$", PLACES.read_text(), re.MULTILINE)).split()
    mounts = parser["Unit"]["RequiresMountsFor"].split()
    for profile in (ROOT / "configs").glob("*.toml"):
        settings = tomllib.loads(profile.read_text(encoding="utf-8"))
        tables = [*settings.get("host", ()), *settings.get("device", ()), *settings.get("nvme", ())]
        for place in filter(None, (table.get("arena_dir") or table.get("path") for table in tables)):
            assert f"-{place}" in writable, profile.name
            assert any(place == mount or place.startswith(f"{mount}/") for mount in mounts), profile.name


def test_settings_reach_the_daemon(service: dict[str, str]) -> None:
    """The unit and tmpfiles.d agree on the mode of /etc/tierd. The image reads the file that
    compose mounts; without one it reads an empty file."""
    tmpfiles = (DEPLOY / "tmpfiles.d" / "tierd.conf").read_text()
    assert f"d /etc/tierd {service['ConfigurationDirectoryMode']} root tierd" in tmpfiles
    image = (DEPLOY / "Containerfile").read_text()
    mounts = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["tierd"]["volumes"]
    (path,) = re.findall(r"TIERD_CONFIG=(\S+)", image)
    (source,) = (mount.removesuffix(f":{path}:ro") for mount in mounts if mount.endswith(f":{path}:ro"))
    assert f"/dev/null {path}" in image and "--config" not in image
    (default,) = re.findall(r":-(.+)}", source)
    assert (DEPLOY / default).is_file()


def test_the_units_user_exists(service: dict[str, str]) -> None:
    """sysusers.d makes the unit's user, and tmpfiles.d exempts the arena from aging."""
    assert re.search(rf"^u {service['User']} ", (DEPLOY / "sysusers.d" / "tierd.conf").read_text(), re.MULTILINE)
    assert re.search(r"^x /dev/shm/tierd-\*", (DEPLOY / "tmpfiles.d" / "tierd.conf").read_text(), re.MULTILINE)


def test_container_and_compose_agree() -> None:
    """The arena's mount has the image's uid, pids are the host's, and no core is written."""
    image = (DEPLOY / "Containerfile").read_text()
    uid = re.search(r"--uid (\d+)", image)
    assert uid
    assert f"USER {uid[1]}:" in image
    daemon = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["tierd"]
    assert f"/dev/shm/tierd-{uid[1]}:/dev/shm/tierd-{uid[1]}" in daemon["volumes"]
    assert (daemon["pid"], daemon["cap_drop"], daemon["ulimits"]["core"]) == ("host", ["ALL"], 0)
    assert daemon.get("userns_mode") is None
