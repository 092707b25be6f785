"""The verb `fsck`: checks all stored data, offline or through the running daemon.

It shows each problem and the daemon's reaction to it. tierd.server.fsck checks, and changes no
file. There is no repair: at startup the daemon drops damaged data, and later writes fill the gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.ask import Ask, listing
from tierd.cli.exits import ExitCode
from tierd.cli.figures import human_bytes, human_count
from tierd.cli.help import example
from tierd.cli.render import Cell, Column, show_json, show_table
from tierd.cli.scrub import draw_pass, is_clean, run_pass
from tierd.config import load_config
from tierd.errors import NotFound, TierdError, Unavailable

if TYPE_CHECKING:
    from tierd.tiers.fsck.fsck import Part

REMEDY = "The daemon handles each when it starts, as shown above."
PART_COLUMNS = (
    Column("part", style="bold"),
    Column("files", right=True),
    Column("blocks", right=True),
    Column("bytes", right=True),
    Column("findings", right=True),
    Column("place", spare=1),
)


@click.command(epilog=example("tierctl fsck --config /etc/tierd/tierd.toml"))
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    envvar="TIERD_CONFIG",
    show_envvar=True,
    help="The daemon's TOML file; it names the directories. Without a file, the defaults apply.",
)
@click.option(
    "--online", is_flag=True, help="Check through the running daemon: scrub every tier, and audit the daemon's records."
)
@listing
def fsck(ask: Ask, *, config: Path | None, online: bool) -> None:
    """Checks every file and block while no daemon runs.

    It changes no file. With --online it checks through the running daemon.

    Exit codes: 0 no problem; 1 a problem was found; 2 nothing could be checked; 3 with --online, no
    daemon answers.
    """
    try:
        is_good = check_online(ask) if online else check_offline(ask, config)
    except Unavailable:
        raise
    except (TierdError, OSError) as error:
        click.echo(f"tierctl fsck: {' '.join(str(error).split())}", err=True)
        raise click.exceptions.Exit(ExitCode.USAGE) from error
    raise click.exceptions.Exit(ExitCode.OK if is_good else ExitCode.FAILED)


def check_online(ask: Ask) -> bool:
    """Scrubs every tier and audits the daemon's records. True if there is no problem."""
    last = run_pass(ask, pb.ScrubRequest(audit=True))
    if ask.as_json:
        show_json(last)
        return is_clean(last)
    draw_pass(ask.console, last)
    fault = Text(f"the daemon's records: {last.audit_fault}", "red")
    ask.console.print(
        fault if last.audit_fault else Text("the daemon's records are consistent", "green"), soft_wrap=True
    )
    return is_clean(last)


def check_offline(ask: Ask, config: Path | None) -> bool:
    """Checks every file of the configured daemon. True if there is no problem."""
    from tierd.server.fsck import check  # noqa: PLC0415  # the daemon's imports

    settings = load_config(config)
    steps = check(settings)
    if ask.console.is_terminal and not ask.as_json:
        steps = with_bars(ask.console, steps)
    parts: Sequence[Part] = []
    for parts in steps:  # noqa: B007  # the last value is the result
        pass
    if not any(part.files for part in parts):
        raise NotFound(
            f"nothing to check: {settings.server.state_dir} has no files, and neither have the stores of"
            f" {config or 'the default settings'}; give the daemon's file with --config"
        )
    if ask.as_json:
        show_json({"clean": not any(part.findings for part in parts), "parts": [asdict(part) for part in parts]})
    else:
        draw_parts(ask.console, parts)
    return not any(part.findings for part in parts)


def with_bars(console: Console, steps: Iterator[list[Part]]) -> Iterator[list[Part]]:
    """Shows each part's progress, and removes the bars at the end."""
    columns = (
        TextColumn("{task.description:<10}", style="bold"),
        BarColumn(bar_width=30),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[found]}", style="red"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {}
        for parts in steps:
            part = parts[-1]
            if part.name not in bars:
                bars[part.name] = progress.add_task(part.name, total=None, found="")
            found = f"{human_count(len(part.findings))} found" if part.findings else ""
            progress.update(bars[part.name], total=part.total_bytes or 1, completed=part.bytes, found=found)
            yield parts


def draw_parts(console: Console, parts: Sequence[Part]) -> None:
    """Prints the checked parts, their problems, and the verdict in one sentence."""
    show_table(console, PART_COLUMNS, [part_row(part) for part in parts], empty="no files")
    findings = [finding for part in parts for finding in part.findings]
    if findings:
        console.print()
    for part in parts:
        for finding in part.findings:
            where = finding.where.removeprefix(f"{part.place}/")
            line = Text.assemble((f"{part.name:<9} ", "bold"), where, (f": {finding.fault}", "red"))
            console.print(line, soft_wrap=True)
            console.print(Text(f"{'':<9} then: {finding.outcome}", "dim"), soft_wrap=True)
    notes = [note for part in parts for note in part.notes]
    if notes:
        console.print()
    for note in notes:
        console.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)
    console.print()
    blocks = human_count(sum(part.blocks for part in parts))
    if findings:
        problems = f"{human_count(len(findings))} problem{'' if len(findings) == 1 else 's'}"
        console.print(Text(f"Checked {blocks} blocks and their metadata: {problems}. {REMEDY}", "red"), soft_wrap=True)
    else:
        console.print(Text(f"Checked {blocks} blocks and their metadata: no problems.", "green"))


def part_row(part: Part) -> list[Cell]:
    """A part's cells, in the order of PART_COLUMNS."""
    found = Text(human_count(len(part.findings)), style="red" if part.findings else "")
    return [part.name, human_count(part.files), human_count(part.blocks), human_bytes(part.bytes), found, part.place]
