"""The objects for Kubernetes: valid, and in agreement with the image and the settings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.source import ROOT
from tierd.config import load_config
from tierd.units import parse_bytes

FOLDER = ROOT / "deploy" / "kubernetes"
OBJECTS = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
COMPONENTS = {"huge-pages": "/mnt/tierd", "nvme": "/mnt/nvme0/tierd"}
"""Component -> the path that it mounts."""


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
    """Resources and files of the kustomization exist."""
    base = read(FOLDER / "kustomization.yaml")
    assert all((FOLDER / name).is_file() for name in [*base["resources"], *base["configMapGenerator"][0]["files"]])


@pytest.mark.parametrize("chosen", [(), ("huge-pages",), ("nvme",), ("huge-pages", "nvme")], ids=str)
def test_kubectl_joins_them(chosen: tuple[str, ...], tmp_path: Path) -> None:
    """`kubectl kustomize` accepts each choice of components. The joined objects are valid, and the daemon
    mounts the settings and each component's path."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    folder = Path(shutil.copytree(FOLDER, tmp_path / "kubernetes"))
    text = (folder / "kustomization.yaml").read_text()
    assert "components: []" in text
    (folder / "kustomization.yaml").write_text(text.replace("components: []", f"components: {json.dumps(chosen)}"))
    made = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    objects = {each["kind"]: each for each in yaml.safe_load_all(made.stdout)}
    assert objects.keys() == {"Namespace", "ConfigMap", "DaemonSet"}
    for each in objects.values():
        validate.validate(each, validate.latest_version(), strict=True)
    joined = objects["DaemonSet"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in joined["containers"][0]["volumeMounts"]}
    assert mounts.keys() <= {volume["name"] for volume in joined["volumes"]}
    assert {COMPONENTS[name] for name in chosen} == set(COMPONENTS.values()) & set(mounts.values())
    settings = [volume["configMap"]["name"] for volume in joined["volumes"] if "configMap" in volume]
    assert settings == [objects["ConfigMap"]["metadata"]["name"]]


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
