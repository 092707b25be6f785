"""The objects for Kubernetes: valid, and in agreement with the image and the settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.source import ROOT
from tierd.config import load_config
from tierd.units import parse_bytes

FOLDER = ROOT / "deploy" / "kubernetes"
OBJECTS = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
OVERLAYS = ("huge-pages", "nvme")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    return dict(read(FOLDER / "daemonset.yaml")["spec"]["template"]["spec"])


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.name)
def test_objects_are_valid(path: Path) -> None:
    """Each object fits the schema of its kind, without unknown fields."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(read(path), validate.latest_version(), strict=True)


def test_kustomization_names_files_that_exist() -> None:
    """Resources and files of the base exist, and each overlay builds on it."""
    base = read(FOLDER / "kustomization.yaml")
    files = [*base["resources"], *base["configMapGenerator"][0]["files"]]
    assert all((FOLDER / name).is_file() for name in files)
    assert all(read(FOLDER / overlay / "kustomization.yaml")["resources"] == [".."] for overlay in OVERLAYS)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_mount_what_they_add(overlay: str, pod: dict[str, Any]) -> None:
    """Each patch adds to a list that exists, and its volume has a mount."""
    (patch,) = read(FOLDER / overlay / "kustomization.yaml")["patches"]
    assert patch["target"] == {"kind": "DaemonSet", "name": read(FOLDER / "daemonset.yaml")["metadata"]["name"]}
    volume, mount = yaml.safe_load(patch["patch"])
    assert volume["path"] == "/spec/template/spec/volumes/-" and pod["volumes"]
    assert mount["path"] == "/spec/template/spec/containers/0/volumeMounts/-" and pod["containers"][0]["volumeMounts"]
    assert volume["value"]["name"] == mount["value"]["name"]


def test_the_daemon_finds_its_directories(pod: dict[str, Any]) -> None:
    """Mounts cover the image's directories, the arena of its uid, and the store of the settings."""
    image = (ROOT / "deploy" / "Containerfile").read_text()
    uid = int(re.search(r"USER (\d+)", image)[1])  # type: ignore[index]
    container = pod["containers"][0]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    wanted = set(re.findall(r"TIERD_(?:RUNTIME|STATE)_DIR=(\S+)", image))
    assert wanted | {f"/dev/shm/tierd-{uid}", "/etc/tierd"} <= mounts
    assert container["securityContext"]["runAsUser"] == uid
    assert f"-o {uid} -g {uid}" in pod["initContainers"][0]["command"][-1]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for one in (container, *pod["initContainers"]) for mount in one["volumeMounts"]} == volumes


def test_the_settings_fit_the_pod(pod: dict[str, Any]) -> None:
    """The daemon accepts the file, and the memory limit exceeds the host tier by 2 GiB."""
    environ = {"TIERD_RUNTIME_DIR": "/run/tierd", "TIERD_STATE_DIR": "/var/lib/tierd"}
    config = load_config(FOLDER / "tierd.toml", environ=environ)
    limit = parse_bytes(pod["containers"][0]["resources"]["limits"]["memory"].replace("Gi", " GiB"))
    assert limit >= sum(tier.capacity for tier in config.host) + (2 << 30)
