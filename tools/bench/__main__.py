"""`make bench`: every suite of this folder, a table, and build/bench.json.

    python -m tools.bench [NAME ...]

Rows are {name, value, unit, limit, ratio, ...}; `limit` is the physical or promised bound, measured or set in the same run.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.bench import daemon_start, data_plane, index_scale, recording
from tools.bench.rows import Row

SUITES = {
    "daemon_start": daemon_start.rows,
    "data_plane": data_plane.rows,
    "recording": recording.rows,
    "index_scale": index_scale.rows,
}
RESULT = Path("build/bench.json")


def table_of(rows: list[Row]) -> Table:
    """For a terminal."""
    table = Table(title="tierd bench: medians, each against a limit of the same run")
    for column in ("row", "value", "limit", "unit"):
        table.add_column(column, justify="left" if column in ("row", "unit") else "right")
    table.add_column("ratio", justify="right", style="bold")
    table.add_column("spread", justify="right")
    table.add_column("what it is", overflow="fold")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:.3g}",
            f"{row.limit:.3g}",
            row.unit,
            f"{row.ratio:.2f}",
            f"{row.spread:.0%}",
            row.meaning,
        )
    return table


def main(names: list[str]) -> None:
    """Runs the suites named, or all."""
    unknown = set(names) - set(SUITES)
    if unknown:
        raise SystemExit(f"bench: no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    console, rows = Console(), []
    for name in names or SUITES:
        with console.status(f"{name} ..."):
            rows += SUITES[name]()
    console.print(table_of(rows))
    RESULT.parent.mkdir(exist_ok=True)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    RESULT.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    console.print(f"written to {RESULT}")


if __name__ == "__main__":
    main(sys.argv[1:])
