"""Rows as curves, pages and pictures."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tierd.config import Config
from tierd.core.formats.model import TierKind
from tierd.simulator.choices import parse_choice
from tierd.simulator.page import page_of
from tierd.simulator.plot import draw
from tierd.simulator.rows import Panel, Row, panels_of, row_of
from tierd.simulator.runs import Outcome, Scenario
from tierd.simulator.sequences import Measure, Request, Trace, trace_of
from tierd.simulator.sizes import parse_size, tiers_of

EVIL = "</script><img src=x>"


def trace(name: str) -> Trace:
    return trace_of([Request(0, 512 * 200, tuple(range(200)))], name=name)


def rows_of(
    found: Trace, sizes: list[dict[str, str]], policies: tuple[str, ...] = ("lru", "clairvoyant")
) -> tuple[list[Scenario], list[Row]]:
    """Runs with made-up outcomes, whose hits grow from run to run."""
    runs = [
        Scenario(
            0,
            parse_choice(policy),
            tiers_of(parsed, distinct=found.distinct, longest=found.longest, measure=Measure(), config=Config()),
        )
        for size in sizes
        for parsed in [{TierKind[kind.upper()]: parse_size(text) for kind, text in size.items()}]
        for policy in policies
    ]
    tokens = found.prompt_tokens
    outcomes = [
        Outcome(
            (tokens * (i + 1) // (2 * len(runs)), *(7 for _ in run.tiers.specs[1:])), (0,) * len(run.tiers.specs), 1
        )
        for i, run in enumerate(runs)
    ]
    return runs, [row_of(found, run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]


def shapes(panels: list[Panel]) -> list[tuple[str, str, list[tuple[str, list[str]]]]]:
    return [
        (panel.axis, panel.beside, [(curve.policy, [point.text for point in curve.points]) for curve in panel.curves])
        for panel in panels
    ]


def test_the_tier_of_most_sizes_is_the_axis() -> None:
    """The axis is the tier with most sizes, smallest first. Each size of another tier has its own panel."""
    sizes = [{"host": host, "nvme": nvme} for host in ("2%", "1%") for nvme in ("50%", "10%", "25%")]
    panels = panels_of(*rows_of(trace("a"), sizes, ("lru",)))
    assert shapes(panels) == [
        ("nvme tier, share of the distinct blocks", "host 2%", [("lru", ["10%", "25%", "50%"])]),
        ("nvme tier, share of the distinct blocks", "host 1%", [("lru", ["10%", "25%", "50%"])]),
    ]


def test_bytes_and_blocks_have_panels_of_their_own() -> None:
    """Sizes in bytes have a panel apart from shares and blocks, which share one."""
    panels = panels_of(*rows_of(trace("a"), [{"host": text} for text in ("64MiB", "5%", "16MiB", "4blocks")], ("lru",)))
    assert [(panel.in_bytes, panel.curves[0].points[0].x) for panel in panels] == [(True, 16 << 20), (False, 0.02)]
    assert [point.text for point in panels[1].curves[0].points] == ["4blocks", "5%"]


class Page(HTMLParser):
    """A page as a browser parses it: tags, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


def test_a_page_has_its_data_and_needs_nothing_else() -> None:
    """A page contains every row as data, and no tag, style or script refers outside."""
    runs, rows = rows_of(trace(EVIL), [{"host": "1%"}, {"host": "10%"}])
    text = page_of(panels_of(runs, rows), rows)
    page = Page(text)
    held: dict[str, Any] = json.loads(page.scripts[0])
    assert held["rows"] == rows
    assert [curve["policy"] for curve in held["panels"][0]["curves"]] == ["lru", "clairvoyant"]
    assert [point["x"] for point in held["panels"][0]["curves"][0]["points"]] == [0.01, 0.1]
    assert len(page.scripts) == 2 and EVIL not in text
    assert not [attrs for _, attrs in page.tags if {"src", "href", "srcset", "action", "data"} & set(attrs)]
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bfetch\b|XMLHttp|import\(", text)


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_pictures_are_of_their_kind(tmp_path: Path, ending: str, magic: bytes) -> None:
    """matplotlib writes the format of the file's ending, with every policy in it."""
    pytest.importorskip("matplotlib")
    runs, rows = rows_of(trace("a"), [{"host": "1%"}, {"host": "10%"}])
    path = tmp_path / f"curves.{ending}"
    draw(panels_of(runs, rows) * 3, path)
    written = path.read_bytes()
    assert written.startswith(magic)
    assert ending == "png" or all(name in written for name in (b"lru", b"clairvoyant"))


def test_one_size_is_a_curve_of_one_point(tmp_path: Path) -> None:
    """A single run can be drawn."""
    pytest.importorskip("matplotlib")
    runs, rows = rows_of(trace("a"), [{"host": "1GiB"}], ("default",))
    draw(panels_of(runs, rows), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000
