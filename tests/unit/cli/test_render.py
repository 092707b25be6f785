"""Numbers for people and tables for terminals."""

from __future__ import annotations

import pytest
from fake_admin import samples
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli import blocks, look
from tierd.cli.advice import Engine
from tierd.cli.engines import draw_engines, engine_row
from tierd.cli.figures import human_bytes, human_count, human_rate, human_seconds, human_share
from tierd.cli.hits import Hits
from tierd.cli.models import Models
from tierd.cli.render import Column, bar, draw_table, fitting, plain_lines
from tierd.cli.tree import draw_tree


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (65536, "64.0 KiB"), (10**9, "954 MiB"), (1 << 40, "1.00 TiB")],
)
def test_bytes_have_three_digits(value: int, text: str) -> None:
    """Sizes are shown in binary units with three significant digits."""
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (3e-5, "30.0 us"),
        (0.0042, "4.20 ms"),
        (12.3, "12.3 s"),
        (192, "3 min 12 s"),
        (7500, "2 h 05 min"),
        (3e5, "3 d 11 h"),
        (-1, "-"),
    ],
)
def test_durations_read_as_people_say_them(value: float, text: str) -> None:
    """Durations range from microseconds to days."""
    assert human_seconds(value) == text


def test_nothing_is_a_dash() -> None:
    """Shares of zero and rates of zero are dashes; large counts are shortened."""
    assert (human_share(1, 0), human_rate(0), human_count(12_345), human_count(2.5e7)) == ("-", "-", "12,345", "25.0 M")


@given(st.integers(0, 1 << 60))
def test_sizes_never_grow_wide(value: int) -> None:
    """No size needs more than ten characters, so column widths stay stable."""
    assert len(human_bytes(value)) <= 10


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=9), st.integers(1, 200))
def test_columns_go_by_need(shapes: list[tuple[int, int]], width: int) -> None:
    """Needed columns stay, the most spare ones drop first, and the rest fit the width if any is spare."""
    columns = [Column("x", spare=spare) for _, spare in shapes]
    shown = fitting(columns, [n for n, _ in shapes], width=width)
    dropped = [columns[i].spare for i in range(len(columns)) if i not in shown]
    kept = [columns[i].spare for i in shown]
    assert 0 not in dropped
    assert not dropped or max(kept, default=0) <= min(dropped)
    assert not any(kept) or sum(shapes[i][0] + 2 for i in shown) - 2 <= width


def test_plain_tables_are_aligned_and_whole() -> None:
    """In a pipe, columns are aligned and no cell is cut."""
    columns = (Column("name"), Column("bytes", right=True), Column("note", spare=9))
    lines = plain_lines(columns, [["a", "1", "x" * 200], ["bcdefg", "12345678", ""]])
    assert lines == ["name       bytes  note", f"a              1  {'x' * 200}", "bcdefg  12345678"]


@pytest.mark.parametrize("width", [80, 120])
def test_pictures_keep_within_the_terminal(width: int) -> None:
    """At 80 and at 120 columns no line overflows or is cut with an ellipsis."""
    answers = samples()
    console = Console(force_terminal=True, width=width, color_system=None, highlight=False, record=True)
    draw_tree(console, answers["Tree"], Models([]))  # type: ignore[arg-type]
    blocks.draw_blocks(console, answers["Blocks"], Models([]), offset=0)  # type: ignore[arg-type]
    look.draw_tiers(console, answers["Tiers"], classes=True)  # type: ignore[arg-type]
    text = console.export_text()
    assert "…" not in text
    assert width > 80 or "no room for: " in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_ranks_of_an_engine_are_told_apart(width: int) -> None:
    """Processes of one engine that differ only in rank get different lines at this terminal width."""
    words = {
        "engine": "vllm",
        "version": "0.32.0",
        "role": "worker",
        "model": "/models/llama-3-8b",
        "dtype": "bfloat16",
    }
    rows = [
        engine_row(Engine(1, 4200, "vllm worker", "u", words | {"ranks": f"{rank}/2"}), pb.SessionInfo(state="open"))
        for rank in range(2)
    ]
    console = Console(force_terminal=True, width=width, color_system=None, highlight=False, record=True)
    draw_engines(console, rows, [])
    lines = [line for line in console.export_text().splitlines() if line.startswith("vllm")]
    assert len(set(lines)) == len(rows)


def test_hits_since_the_last_look() -> None:
    """The hit ratio covers the interval between two polls; after a restart it covers all counts."""
    old, new = Hits({"host.0": 10}, 90), Hits({"host.0": 40, "nvme.0": 20}, 130)
    assert (new.since(old).hit, new.since(old).asked) == (50, 90)
    assert old.since(new) == old


@pytest.mark.parametrize("part", [0, 3, 8])
def test_bars_without_colour(part: int) -> None:
    """A bar is as long as its share; without colours no bar is drawn."""
    assert bar(part, 8).plain.count("━") == part
    assert len(bar(part, 8).plain) == 8
    columns = (Column("tier"), Column("", is_bar=True))
    assert plain_lines(columns, [["host.0", bar(part, 8)]]) == ["tier", "host.0"]
    shown = {}
    for system in ("standard", None):
        console = Console(force_terminal=True, width=80, color_system=system, no_color=False, record=True)  # type: ignore[arg-type]
        draw_table(console, columns, [["host.0", bar(part, 8)]])
        shown[system] = console.export_text()
    assert ("━" in shown["standard"] or "╌" in shown["standard"], "╌" in shown[None]) == (True, False)


@pytest.mark.parametrize("used", [0, 80, 95, 100])
def test_a_full_tier_is_no_trouble(used: int) -> None:
    """A full tier shows nothing in red; a tier out of service does."""
    info = pb.TierInfo(name="host.0", capacity_bytes=100, used_bytes=used, serving=True)
    row = [cell for cell in look.tier_row(info) if isinstance(cell, Text)]
    assert not [cell for cell in row if "red" in str(cell.style) or any("red" in str(s.style) for s in cell.spans)]
    info.serving = False
    assert [str(cell.style) for cell in look.tier_row(info) if str(cell) == "off"] == ["red"]
