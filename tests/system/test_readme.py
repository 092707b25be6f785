"""The README's example does what the README shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierd.testing import Daemon

README = Path(__file__).resolve().parents[2] / "README.md"


def test_example_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's Python example runs unchanged against a real daemon, and again when its blocks exist."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    with Daemon() as daemon:
        monkeypatch.setenv("TIERD_TARGET", daemon.target)
        for _ in range(2):
            exec(compile(example, str(README), "exec"), {})
