"""Curves as one page of HTML, interactive and self-contained; plot.py makes pictures.

It shows values under the pointer, curves to toggle, and all rows. The page loads nothing.
Everything from a trace is embedded as data, so that no name can become part of its program.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from tierd.simulator.rows import Panel, Row

PLACE = "/*rows*/null"
"""Place of the data in page.html."""


def page_of(panels: Sequence[Panel], rows: Sequence[Row]) -> str:
    """The page's text."""
    template = resources.files("tierd.simulator").joinpath("page.html").read_text(encoding="utf-8")
    assert template.count(PLACE) == 1
    data = json.dumps({"panels": [_plain(panel) for panel in panels], "rows": list(rows)}, separators=(",", ":"))
    return template.replace(PLACE, data.replace("<", "\\u003c"))


def _plain(panel: Panel) -> dict[str, Any]:
    curves = [
        {
            "policy": curve.policy,
            "is_bound": curve.is_bound,
            "points": [{"x": point.x, "text": point.text, **point.row} for point in curve.points],
        }
        for curve in panel.curves
    ]
    return {
        "trace": panel.trace,
        "axis": panel.axis,
        "beside": panel.beside,
        "in_bytes": panel.in_bytes,
        "curves": curves,
    }
