"""The commands of deploy/examples/transformers and the integration README's example run unchanged."""

from __future__ import annotations

import re
from functools import partial

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-engines has environments for it")
pytest.importorskip("torch", reason="torch is not installed: make test-engines has environments for it")

from tests.engines.documented import ROOT, Shell, is_said, run_blocks
from tests.engines.hf.models import llama, prompt
from tests.system.blocks import await_true
from tierd.testing import Daemon

pytestmark = [pytest.mark.timeout(900)]


def test_the_commands(daemon: Daemon) -> None:
    """Two processes in turn print the output in the document; the second restores the first one's prefix."""
    with Shell(daemon) as shell:
        for block in run_blocks("deploy/examples/transformers/README.md"):
            shell.until(block, partial(is_said, block))


def test_the_readmes_example(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The integration README's example runs as written, with a model and tokens; a later run hits."""
    text = (ROOT / "tierd/integrations/transformers/README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.setenv("TIERD_TARGET", daemon.target)
    names = {"model": llama(), "input_ids": prompt(90)}
    restored = []

    def is_restored() -> bool:
        exec(compile(example, "README.md", "exec"), names)
        restored.append(names["cache"].restored)
        return restored[-1] > 0

    await_true(is_restored, "the prefix is restored")
    assert restored[0] == 0
