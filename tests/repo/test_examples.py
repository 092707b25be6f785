"""A test runs each command of the documents, or the document says why none does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.documented import FENCE, NOT_RUN, ROOT, page_blocks, shell_blocks

FOLDERS = ("deploy/examples", "tierd/integrations")
DOCUMENTS = [
    path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).glob("*/README.md"))
]
PAGES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "deploy" / "docs").rglob("*.md"))]
OTHER_SHELLS = {"bash", "shell", "zsh", "shell-session", "powershell"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_are_run_or_say_that_they_are_not(document: str) -> None:
    """A test of this document runs each block of commands, or the block says why none does."""
    blocks = shell_blocks(document)
    assert not OTHER_SHELLS & {language for language, _ in FENCE.findall((ROOT / document).read_text(encoding="utf-8"))}
    for block in blocks:
        assert block.is_run or block.script.removeprefix(NOT_RUN).partition("\n")[0].strip(), document
    tests = [path for kind in ("engines", "system") for path in (ROOT / "tests" / kind).rglob("test_*.py")]
    names = [path.name for path in tests if f'"{document}"' in path.read_text(encoding="utf-8")]
    assert names or not any(block.is_run for block in blocks), f"no test names {document}"


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_run_or_say_that_they_are_not(page: str) -> None:
    """tests/system/test_documents.py runs each block of commands and of Python in deploy/docs, or
    the block says why no test runs it."""
    if page.startswith("deploy/docs/reference/"):
        return  # signatures and usage, generated
    assert not OTHER_SHELLS & {language for language, _ in FENCE.findall((ROOT / page).read_text(encoding="utf-8"))}
    for block in page_blocks(page):
        reason = "" if block.is_run else block.script.removeprefix(NOT_RUN).partition("\n")[0].strip()
        assert block.is_run or reason, page
        assert all((ROOT / test).is_file() for test in re.findall(r"tests/\S+\.py", reason)), page


@pytest.mark.parametrize(("number", "name"), [(0, "connector"), (1, "tier")])
def test_the_readmes_configuration_is_the_examples(number: int, name: str) -> None:
    """The configuration in vLLM's README equals the example's file, which the commands give vLLM."""
    block = shell_blocks("tierd/integrations/vllm/README.md")[number]
    (shown,) = re.findall(r"--kv-transfer-config '(\{.*\})'", block.script, re.DOTALL)
    example = (ROOT / "deploy/examples/vllm" / f"{name}.json").read_text(encoding="utf-8")
    assert json.loads(shown) == json.loads(example)


def test_blocks_are_found() -> None:
    """Each example has commands, and some that run, so no test here passes on an empty list."""
    examples = [document for document in DOCUMENTS if document.startswith(FOLDERS[0])]
    assert len(examples) == 6
    assert all(any(block.is_run for block in shell_blocks(document)) for document in examples)


@pytest.mark.parametrize("name", ["tests", "tools"])
def test_examples_find_the_projects_folders_beside_a_package_of_the_same_name(name: str, tmp_path: Path) -> None:
    """With PYTHONPATH as documented, the project's `tests` and `tools` win over packages of these
    names that engines' dependencies install."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    folders = sorted({path.parent.name for path in (ROOT / name).glob("*/*.py")})
    script = f"import importlib.util as found; print([n for n in {folders!r} if not found.find_spec('{name}.' + n)])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "") and folders
