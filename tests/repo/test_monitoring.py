"""Alerts and the dashboard name metrics and labels that the daemon has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.repo.source import ROOT
from tierd.metrics import METRICS

MONITORING = ROOT / "deploy" / "monitoring"
NAME = re.compile(r"\btierd_[a-z_]+")
SELECTOR = re.compile(r"(tierd_[a-z_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
ADDED = {"instance", "job", "le"}
"""Labels that Prometheus adds."""


def rules() -> list[dict[str, object]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, object]]:
    return list(json.loads((MONITORING / "dashboard.json").read_text())["panels"])


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression, by the alert or panel that has it."""
    for rule in rules():
        yield str(rule["alert"]), str(rule["expr"])
    for panel in panels():
        for target in panel["targets"]:  # type: ignore[attr-defined]
            yield str(panel["title"]), str(target["expr"])
    for fence in re.findall(r"^\| `(.*?)`", (ROOT / "deploy/docs/how-to/monitor.md").read_text(), re.MULTILINE):
        if "tierd_" in fence:
            yield "monitor.md", fence


def row_name(sample: str) -> str:
    """The metric of a sample: histograms have three."""
    for end in ("_bucket", "_sum", "_count"):
        if sample.endswith(end) and METRICS.get(sample.removesuffix(end)):
            return sample.removesuffix(end)
    return sample


def faults_of(expression: str) -> list[str]:
    """Names and labels of an expression that the daemon does not have."""
    labels = {
        label
        for name in NAME.findall(expression)
        if row_name(name) in METRICS
        for label in METRICS[row_name(name)].labels
    }
    wrong = [name for name in NAME.findall(expression) if row_name(name) not in METRICS]
    for name, inside in SELECTOR.findall(expression):
        known = {*METRICS[row_name(name)].labels, *ADDED} if row_name(name) in METRICS else set()
        wrong += [label for label in re.findall(r"(\w+)\s*[=!]~?\s*\"", inside) if label not in known]
    grouped = [label.strip() for some in GROUPED.findall(expression) for label in some.split(",")]
    return wrong + [label for label in grouped if label not in labels | ADDED]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_name_what_the_daemon_has(where: str, expression: str) -> None:
    """Metrics are rows of metrics.py, with their labels."""
    assert faults_of(expression) == []


@pytest.mark.parametrize(
    ("expression", "faults"),
    [
        ("rate(tierd_hits_total[5m])", ["tierd_hits_total"]),
        ('tierd_tier_bytes{kind="used"}', ["kind"]),
        ("sum by (reason) (tierd_tier_serving)", ["reason"]),
        ("rate(tierd_call_seconds_bucket[5m])", []),
    ],
)
def test_what_is_looked_for(expression: str, faults: list[str]) -> None:
    """A wrong name, a wrong label and a wrong grouping are each found."""
    assert faults_of(expression) == faults


def test_every_alert_says_what_to_do() -> None:
    """An alert has a severity, a summary and a description; names are unique."""
    names = [str(rule["alert"]) for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}  # type: ignore[call-overload]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")  # type: ignore[index]


def test_promtool_accepts_the_files() -> None:
    """Prometheus's own checker accepts the rules and the configuration."""
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian: prometheus)")
    command = ["promtool", "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout
