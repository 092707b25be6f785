"""`tierctl simulate`: traces through simulated tiers, under the daemon's own core and policies.

This is the command line: sizes, policies, a table. tierd.simulator simulates, without a daemon. A
row's hits are shares of all prompt tokens of its trace.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from tierd.cli.ask import SIZE, Ask, Several, listing
from tierd.cli.figures import human_seconds
from tierd.cli.help import example
from tierd.cli.progress import shown_progress
from tierd.cli.render import Cell, Column, show_json, show_table
from tierd.cli.stored_form import StoredForm, encoded
from tierd.cli.trace import read_trace
from tierd.config import Config, load_config, read_config
from tierd.core.formats.model import TierKind
from tierd.errors import InvalidArgument
from tierd.pictures import checked_plot
from tierd.simulator.choices import Choice, names, parse_choice
from tierd.simulator.page import page_of
from tierd.simulator.plot import draw
from tierd.simulator.rows import Row, panels_of, row_of, short_name
from tierd.simulator.runs import Scenario, simulate_all
from tierd.simulator.sequences import TOKENS_PER_BLOCK, Measure, Trace, trace_of
from tierd.simulator.sizes import KINDS, Size, Tiers, parse_size, tiers_of
from tierd.simulator.wear import Writes, parse_admission, parse_budget

RUN_LIMIT = 10_000
"""The most runs accepted."""
COLUMNS = (
    Column("trace", style="bold", spare=4),
    Column("policy"),
    Column("device", right=True),
    Column("host", right=True),
    Column("nvme", right=True),
    Column("hits", right=True),
    Column("on device", right=True, spare=2),
    Column("in host", right=True, spare=2),
    Column("on nvme", right=True, spare=2),
    Column("nvme writes", right=True, spare=1),
    Column("took", right=True, spare=3),
)


ADMISSIONS, BUDGETS = Several("policy", parse_admission), Several("size", parse_budget)
SIZES, CHOICES = Several("size", parse_size), Several("policy", parse_choice)


@click.command(epilog=example("tierctl simulate trace.jsonl.gz --host 64GiB,128GiB --nvme 1TiB"))
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "choices",
    type=CHOICES,
    default="default",
    show_default=True,
    help=f"Eviction policies: {', '.join(names())}; or one for each kind of tier, such as host:lru+nvme:default.",
)
@click.option("--device", type=SIZES, help="Sizes of the device tier; see above.")
@click.option("--host", type=SIZES, help="Sizes of the host tier.")
@click.option("--nvme", type=SIZES, help="Sizes of the NVMe tier.")
@click.option("--admission", type=ADMISSIONS, help="Admission to NVMe: default, all, learned, second-touch, tinylfu.")
@click.option(
    "--wear-budget", type=BUDGETS, help="Limit of writes to NVMe: bytes a day, or 0.5footprints over the trace."
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The daemon's TOML file, for all other settings. [default: the default settings]",
)
@click.option(
    "--block-bytes", type=SIZE, help="Size of a full block, if sizes are bytes. [default: as recorded, else 64 KiB]"
)
@encoded
@click.option("--limit", type=click.IntRange(1), default=None, help="Read only this many requests of each trace.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=lambda _ctx, _param, path: path and checked_plot(path, may_be_page=True),
    help="Draw the curves to FILE.html (self-contained), FILE.png or FILE.svg (both need matplotlib).",
)
@click.option("--jobs", type=click.IntRange(1), default=None, help="Number of processes. [default: one for each core]")
@listing
def simulate(ask: Ask, *, traces: Sequence[Path], choices: Sequence[Choice], jobs: int | None, **options: Any) -> None:
    """Simulates tiers of many sizes on recorded traces, without a daemon.

    The daemon's own core and policies decide. TRACE: JSON lines, gzip or plain. Every policy runs
    in every combination of the tiers' sizes. Without sizes, it runs in the tiers of the
    configuration.

    Sizes in bytes (64GiB) mean tiers like those of a daemon of that capacity, with segments and
    size classes. A `replay --lockstep` against that daemon gives the same result. Sizes in blocks
    (817blocks) or in per cent of the trace's distinct blocks (5%, rounded down) mean room for
    exactly so many blocks. A short block counts as a full one, as in published figures.

    With --codec, blocks have the lengths that engines with this option store: a tier holds more
    tokens. Sizes in bytes only.

    Hits are shares of all prompt tokens. The policy `clairvoyant` knows the future: in one tier no
    policy is better.
    """
    config = config_of(options["config"])
    held = [trace_of(read_trace(path, limit=options["limit"]), name=str(path)) for path in traces]
    sizes = {kind: options[kind.name.lower()] for kind in KINDS if options[kind.name.lower()]}
    asked = StoredForm(options["codec"], options["geometry"], options["bits"], options["block_bytes"])
    tiers = [tiers_of_each(trace, sizes, config=config, measure=measure_of(asked, trace)) for trace in held]
    writes = [
        Writes(*pair) for pair in itertools.product(*(options[n] or [None] for n in ("admission", "wear_budget")))
    ]
    runs = runs_of(tiers, choices, writes)
    with shown_progress("requests", sum(len(held[run.trace]) for run in runs)) as show:
        outcomes = simulate_all(held, runs, jobs=jobs or len(os.sched_getaffinity(0)), show=show)
    rows = [row_of(held[run.trace], run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]
    if options["plot"]:
        write_plot(options["plot"], runs, rows)
    report(ask, rows)


def config_of(path: Path | None) -> Config:
    """The simulated daemon's settings, unresolved. Raises ConfigError."""
    if path is None:
        return Config()
    load_config(path)  # raises for settings that a daemon refuses
    return read_config(path.read_text(encoding="utf-8"))


def tiers_of_each(
    trace: Trace, sizes: dict[TierKind, Sequence[Size]], *, config: Config, measure: Measure
) -> list[Tiers]:
    """The tiers of every combination of sizes. Raises InvalidArgument, ConfigError."""
    combinations = itertools.product(*sizes.values())
    return [
        tiers_of(
            dict(zip(sizes, chosen, strict=True)),
            distinct=trace.distinct,
            longest=trace.longest,
            measure=measure,
            config=config,
        )
        for chosen in itertools.islice(combinations, RUN_LIMIT + 1)
    ]


def measure_of(asked: StoredForm, trace: Trace) -> Measure:
    """Sizes of a trace's blocks. Raises InvalidArgument."""
    tokens = int(trace.full_tokens[0]) if len(trace) else TOKENS_PER_BLOCK
    return Measure(asked.block_bytes_of(tokens), encoding=asked.encoding(tokens))


def runs_of(tiers: Sequence[Sequence[Tiers]], choices: Sequence[Choice], writes: Sequence[Writes]) -> list[Scenario]:
    """Every trace in its tiers under every policy. Raises InvalidArgument for more than RUN_LIMIT runs."""
    if sum(map(len, tiers)) * len(choices) * len(writes) > RUN_LIMIT:
        raise InvalidArgument(f"simulate: more than {RUN_LIMIT} runs; leave out some sizes or policies")
    return [
        Scenario(number, choice, made, how)
        for number, mine in enumerate(tiers)
        for made in mine
        for choice in choices
        for how in (writes if any(spec.kind is TierKind.NVME for spec in made.specs) else writes[:1])
    ]


def write_plot(path: Path, runs: Sequence[Scenario], rows: Sequence[Row]) -> None:
    """Draws the curves. Raises InvalidArgument if the file cannot be written."""
    panels = panels_of(runs, rows)
    try:
        if path.suffix == ".html":
            path.write_text(page_of(panels, rows), encoding="utf-8")
        else:
            draw(panels, path)
    except OSError as error:
        raise InvalidArgument(f"--plot: {path} cannot be written ({error.strerror}); give another file") from error


def report(ask: Ask, rows: Sequence[Row]) -> None:
    """Prints the rows as JSON or as a table. The best policy of each trace and size is green."""
    if ask.as_json:
        show_json({"rows": rows})
        return
    shown = [i for i, column in enumerate(COLUMNS) if is_shown(column.name, rows)]
    cells = [cells_of(row, best=best_of(row, rows)) for row in rows]
    show_table(ask.console, [COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in cells], empty="no runs")


def is_shown(column: str, rows: Sequence[Row]) -> bool:
    """Whether a column has content for these rows."""
    kind = {"on device": "device", "in host": "host", "on nvme": "nvme", "nvme writes": "nvme"}.get(column, column)
    if kind in ("device", "host", "nvme"):
        return any(row[kind] for row in rows) and (column in {kind, "nvme writes"} or several_tiers(rows))
    return column != "trace" or len({row["trace"] for row in rows}) > 1


def several_tiers(rows: Sequence[Row]) -> bool:
    """Whether a row has more than one tier."""
    return any(sum(bool(row[kind]) for kind in ("device", "host", "nvme")) > 1 for row in rows)


def best_of(row: Row, rows: Sequence[Row]) -> float:
    """The most hits of all policies but the clairvoyant, for this row's trace and sizes."""
    place = ("trace", "device", "host", "nvme")
    beside = [r for r in rows if all(r[name] == row[name] for name in place) and "clairvoyant" not in r["policy"]]
    return max((r["prefix_token_hit"] for r in beside), default=0.0)


def cells_of(row: Row, *, best: float) -> list[Cell]:
    """One row, in the order of COLUMNS."""
    is_bound = "clairvoyant" in row["policy"]
    style = "magenta" if is_bound else "bold green" if row["prefix_token_hit"] == best else ""
    return [
        short_name(row["trace"]),
        Text(", ".join(filter(None, (row["policy"], row.get("admission"), row.get("wear_budget")))), style),
        *(row[kind] or "-" for kind in ("device", "host", "nvme")),
        Text(share_of(row["prefix_token_hit"]), style),
        *(share_of(row[f"{kind}_hit"]) if row[kind] else "-" for kind in ("device", "host", "nvme")),
        f"{row['nvme_writes_footprints']:.2f} x" if row["nvme"] else "-",
        Text(human_seconds(row["seconds"]), "dim"),
    ]


def share_of(hit: float) -> str:
    """`12.34 %`, as in published figures."""
    return f"{100 * hit:.2f} %"
