"""The site of the documentation, by Sphinx: `make docs`."""

from __future__ import annotations

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
