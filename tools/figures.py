"""The figures of the tests' last deep run, as a table: `python -m tools.figures`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FIGURES = Path(__file__).resolve().parents[1] / "build" / "figures.jsonl"
OWN_FIELDS = {"what", "depth", "at"}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every line of figures, oldest first."""
    for line in path.read_text().splitlines():
        yield json.loads(line)


def table(rows: list[dict[str, Any]]) -> Table:
    """One row for each report."""
    made = Table("what", "depth", "figures", title="figures of the last runs", title_justify="left")
    for row in rows:
        figures = ", ".join(f"{name} [bold]{value}[/]" for name, value in row.items() if name not in OWN_FIELDS)
        made.add_row(row["what"], row["depth"], figures)
    return made


def main() -> int:
    """Prints the figures. Returns 1 if there are none."""
    if not FIGURES.exists():
        print(f"{FIGURES}: no figures yet; run `make nightly`, or a part of it", file=sys.stderr)
        return 1
    Console().print(table(sorted(read(FIGURES), key=lambda row: row["what"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
