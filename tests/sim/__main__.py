"""`python -m tests.sim --seed N [--seeds M]`: runs simulations; prints broken promises and speed.

It also prints each fault's strikes. Purpose: for people; the repository's checks call `run`.
A failure prints its seed and, if there is one, a shorter script.
"""

from __future__ import annotations

import statistics
from collections import Counter

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.sim.script import FAULTS, MEDIUM_FAULTS, Script, write
from tests.sim.shrink import TRIES, shrink
from tests.sim.world import Result, run

SHOWN = 5
"""Number of broken promises printed for a seed."""


@click.command()
@click.option("--seed", default=0, help="The first seed.", show_default=True)
@click.option("--seeds", default=1, type=click.IntRange(1), help="How many, one after another.", show_default=True)
@click.option(
    "--tries", default=TRIES, help="Runs for telling each failure in fewer events; 0: don't.", show_default=True
)
def main(seed: int, seeds: int, tries: int) -> None:
    """Simulates the daemon and its clients on a virtual clock, with faults. The same seed gives the
    same trace."""
    console, results = Console(), list[Result]()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        for number in progress.track(range(seed, seed + seeds), description="seeds"):
            results.append(run(write(number)))
            if results[-1].violations:
                _tell(console, write(number), results[-1], tries=tries)
    _sum_up(console, results)
    failed = [result.seed for result in results if result.violations]
    if failed:
        console.print(f"[red]{len(failed)} of {seeds} seeds broke a promise:[/] {' '.join(map(str, failed))}")
        raise click.exceptions.Exit(1)
    console.print(f"{seeds} seeds, no promise broken")


def _tell(console: Console, script: Script, result: Result, *, tries: int) -> None:
    console.print(f"[red]seed {script.seed}[/], trace {result.trace}, {len(script.events)} events:")
    for text in result.violations[:SHOWN]:
        console.print(f"  {text}", highlight=False)
    if tries:
        shorter, result = shrink(script, result, tries=tries)
        console.print(f"  in {len(shorter.events)} events:")
        for event in shorter.events:
            console.print(
                f"    {event.at_s:8.4f} s  {event.what}, client {event.who}, seed {event.seed}", highlight=False
            )
        for text in result.violations[:SHOWN]:
            console.print(f"  {text}", highlight=False)


def _sum_up(console: Console, results: list[Result]) -> None:
    struck: Counter[str] = sum((result.struck for result in results), Counter())
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    table = Table("fault", "struck", "seeds", title="faults")
    for name in (*FAULTS, *MEDIUM_FAULTS):
        table.add_row(name, str(struck[name]), str(sum(result.struck[name] > 0 for result in results)))
    console.print(table)
    console.print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    speeds = [result.virtual_s / result.cpu_s for result in results]
    of_wall = statistics.median(result.virtual_s / result.wall_s for result in results)
    console.print(
        f"virtual seconds per second of CPU: median {statistics.median(speeds):.0f}, least {min(speeds):.0f};"
        f" per second of the wall's clock: median {of_wall:.0f};"
        f" trace of seed {results[-1].seed}: {results[-1].trace}"
    )


if __name__ == "__main__":
    main()
