"""`make bench`: the suites of this folder, a table, build/bench.json and a picture of it.

    python -m tools.bench [NAME ...] [--output build/bench.json] [--tiny]

Rows are {name, value, unit, limit, ratio, bar, goal, ...}. `limit` is the physical or promised
bound, measured or set in the same run. A suite that fails is named at the end; the others' rows
count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from tierd.errors import Unsupported
from tools.bench import (
    advice,
    awaited,
    calls,
    chains,
    clients,
    codecs,
    daemon_start,
    data_plane,
    decisions,
    demotion,
    far,
    idle,
    index_scale,
    nvme,
    one_block,
    page,
    plot,
    policies,
    prefetch,
    recording,
    remote,
    scrape,
    size,
    ttft,
)
from tools.bench.measure import FULL, TINY, Effort
from tools.bench.rows import Row
from tools.bench.table import WIDE, counts_of, table_of

SUITES: dict[str, Callable[[Effort], list[Row]]] = {
    "data_plane": data_plane.rows,
    "one_block": one_block.rows,
    "calls": calls.rows,
    "awaited": awaited.rows,
    "nvme": nvme.rows,
    "remote": remote.rows,
    "demotion": demotion.rows,
    "size": size.rows,
    "chains": chains.rows,
    "clients": clients.rows,
    "page": page.rows,
    "idle": idle.rows,
    "daemon_start": daemon_start.rows,
    "recording": recording.rows,
    "scrape": scrape.rows,
    "decisions": decisions.rows,
    "policies": policies.rows,
    "advice": advice.rows,
    "ttft": ttft.rows,
    "prefetch": prefetch.rows,
    "far": far.rows,
    "codecs": codecs.rows,
    "index_scale": lambda effort: index_scale.rows(effort.pick(INDEX_BLOCKS, 1 << 14)),
}
INDEX_BLOCKS = 1_000_000
"""Of the index; ten million take some minutes: `python -m tools.bench.index_scale`."""
RESULT = Path("build/bench.json")


def machine() -> dict[str, object]:
    """The machine that the rows were measured on."""
    told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")]
    return {
        "machine": platform.machine(),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "built": " ".join(platform.python_build()[1].split()),  # distinguishes several Pythons of one version
        "load": round(os.getloadavg()[0], 2),
        "at": round(time.time()),
    }


def measure(names: Sequence[str], effort: Effort, console: Console) -> tuple[list[Row], list[str]]:
    """The rows of these suites, and the names of the suites that failed."""
    rows, failed = list[Row](), list[str]()
    for name in names:
        begun = time.perf_counter()
        try:
            with console.status(f"{name} ..."):
                rows += SUITES[name](effort)
        except Exception:  # noqa: BLE001 -- told here, and again in the end
            console.print(f"[red]{name} failed[/]\n{traceback.format_exc()}", highlight=False)
            failed.append(name)
        console.print(f"{name}: {time.perf_counter() - begun:.0f} s", style="dim", highlight=False)
    return rows, failed


def write(rows: Sequence[Row], path: Path, *, picture: Callable[[Path], None], **more: object) -> list[Path]:
    """Writes the rows and `more` as JSON, and a picture beside it if matplotlib is installed.
    Returns the paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = [asdict(row) | {"verdict": row.verdict.value} for row in rows]
    path.write_text(json.dumps({"machine": machine(), **more, "rows": told}, indent=1) + "\n", encoding="utf-8")
    try:
        picture(path.with_suffix(".png"))
    except Unsupported:
        return [path]
    return [path, path.with_suffix(".png")]


def title() -> str:
    """The machine in a line."""
    told = machine()
    return (
        f"{told['cores']} x {told['processor']}, {told['memory_gib']:g} GiB, Linux {told['kernel']}, Python {told['python']} of"
        f" {told['built']}, load {told['load']}"
    )


def main() -> None:
    """Runs the named suites, or all."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description="tierd against the machine's own limits")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--tiny", action="store_true", help="only to see that the suites work")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(SUITES):
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    rows, failed = measure(asked.names or list(SUITES), TINY if asked.tiny else FULL, console)
    if rows:
        console.print(table_of(rows, title=title(), is_wide=console.width >= WIDE))
        console.print(counts_of(rows), highlight=False)
        paths = write(rows, asked.output, picture=lambda path: plot.draw(rows, path, title=title()))
        console.print(f"written to {' and '.join(map(str, paths))}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
