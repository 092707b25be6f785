"""The site of the documentation, by Sphinx: `make docs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierd import __version__

project = "tierd"
author = "the tierd authors"
copyright = "the tierd authors, Apache-2.0"  # noqa: A001  # Sphinx's name
release = version = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
html_theme = "furo"
html_title = "tierd"
html_show_sourcelink = False
suppress_warnings = ["myst.xref_missing"]
"""Links to files outside of the pages: tests/repo/test_docs_pages.py checks that they exist."""

PARTS = {"Tutorials": "tutorials", "How to": "how-to", "Reference": "reference", "Explanation": "explanation"}


def setup(app: Any) -> None:
    """Adds the side bar's tree to the index, which shows none on a code host."""
    app.connect("source-read", _add_tree)


def _add_tree(app: Any, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += "".join(_tree(Path(app.srcdir), caption, folder) for caption, folder in PARTS.items())


def _tree(pages: Path, caption: str, folder: str) -> str:
    names = "\n".join(f"{folder}/{path.stem}" for path in sorted((pages / folder).glob("*.md")))
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"
