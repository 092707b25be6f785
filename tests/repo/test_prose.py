"""Sentences of the project are short, and name the actor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repo.prose import findings
from tests.repo.source import GENERATED, ROOT, tracked_files

GENERATED_PAGES = ("cuda/RESULTS.md", "deploy/docs/reference/")

WRITTEN = [
    name
    for name in tracked_files()
    if name.endswith((".md", ".py")) and not name.startswith(GENERATED_PAGES) and GENERATED not in (ROOT / name).parents
]

pytestmark = pytest.mark.skipif(not tracked_files(), reason="not a git checkout")


@pytest.mark.parametrize("name", WRITTEN)
def test_prose_is_plain(name: str) -> None:
    """Sentences have at most 25 words, lines 100 columns, and none begins with what, who or where."""
    found = findings(ROOT / name)
    assert found == [], "\n".join(f"{name}:{line}: {fault}: {text}" for line, fault, text in found)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("A page is reused.", 0),
        ("What was freed is kept.", 1),
        ("What was freed?", 0),
        ("a " * 26 + ".", 1),
        ("Run `what` here.", 0),
        ("word " * 24, 1),
        ("```\n" + "long " * 40 + "\n```", 0),
        ("| what | where |", 0),
    ],
)
def test_each_fault_is_found(tmp_path: Path, text: str, faults: int) -> None:
    """The checks report a fault of each kind in Markdown, and none in code and tables."""
    page = tmp_path / "page.md"
    page.write_text(text + "\n", encoding="utf-8")
    assert len(findings(page)) == faults


def test_comments_and_docstrings_are_read(tmp_path: Path) -> None:
    """Docstrings and comments are prose; a string that is a value is not."""
    module = tmp_path / "module.py"
    module.write_text('"""What is it."""\n\nx = "What is it."  # Who knows.\n', encoding="utf-8")
    assert [found.line for found in findings(module)] == [1, 3]
