"""Peers as a picture: each one's share of a memory copy beside tierd's, one panel for each kind of
work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierd.pictures import require_matplotlib
from tools.bench.data_plane import SHAPES
from tools.bench.peers.known import KNOWN
from tools.bench.rows import Row

VERBS = ("put", "get", "get_again")
WORKS = [f"{verb}_{shape}" for shape in SHAPES for verb in VERBS]
PEER, OURS, HEIGHT = "#56b4e9", "#000000", 0.34


def draw(runs: Mapping[str, Sequence[Row]], path: Path, *, title: str) -> None:
    """runs: the rows of each peer's run by its name, with tierd's. Raises Unsupported without
    matplotlib, OSError."""
    figure = require_matplotlib()(figsize=(15.0, 2.2 + 0.9 * len(runs)), layout="constrained")
    for axes, work in zip(
        figure.subplots(len(SHAPES), len(VERBS), squeeze=False, sharey=True).flat, WORKS, strict=True
    ):
        for y, (name, rows) in enumerate(runs.items()):
            found = {row.name: row for row in rows}
            _draw_bar(axes, y - HEIGHT / 2, found[f"{name}_{work}"], PEER)
            _draw_bar(axes, y + HEIGHT / 2, found[f"tierd_{work}"], OURS)
        axes.set_yticks(range(len(runs)), list(runs))
        axes.set_ylim(len(runs) - 0.4, -0.6)
        axes.set_xlim(0, 1.75)
        axes.axvline(1.0, color="#bbbbbb", linewidth=1.0, zorder=0)
        axes.set_title(work.replace("_", " ").replace("x", "x "), loc="left", weight="bold", fontsize=10)
        axes.set_xlabel("share of memcpy (more is better)", fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(f"peers and tierd, side by side; lines span the quartiles\n{title}", x=0.01, ha="left", fontsize=10)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _draw_bar(axes: Any, y: float, row: Row, colour: str) -> None:
    axes.barh(y, row.ratio, height=HEIGHT * 0.9, color=colour, alpha=0.55, zorder=1)
    axes.plot([row.low, row.high], [y, y], color=colour, linewidth=2.0, zorder=2)
    axes.annotate(
        f"{row.ratio:.2f}",
        (max(row.high, row.ratio), y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(color=PEER, alpha=0.55, label="the peer"),
        Patch(color=OURS, alpha=0.55, label="tierd, in the same run"),
    ]


def runs_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their run, in their order: a peer's first, then tierd's."""
    runs: dict[str, list[Row]] = {}
    name = ""
    for row in rows:
        name = name if row.name.startswith("tierd_") else next(each for each in KNOWN if row.name.startswith(each))
        runs.setdefault(name, []).append(row)
    return runs
