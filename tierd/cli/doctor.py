"""`tierctl doctor`: examines the machine for a daemon, before one runs or beside it.

tierd.doctor has the checks; this module shows them as they are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tierd
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.cli.ask import Ask, verb
from tierd.cli.configuration import CONFIG, settings_of
from tierd.cli.exits import ExitCode
from tierd.cli.help import example
from tierd.errors import ConfigError, TierdError, Unavailable

if TYPE_CHECKING:
    from tierd.doctor.check import Check

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red", "skipped": "dim"}
WIDTH, NAME_WIDTH = max(map(len, STYLES)), 22


@click.command(epilog=example("tierctl doctor", "tierctl doctor --config /etc/tierd/tierd.toml --json"))
@CONFIG
@click.option(
    "--measure/--no-measure", default=True, help="Measure each disk: 64 MiB written and read. [default: measure]"
)
@verb
def doctor(ask: Ask, *, config: Path | None, measure: bool) -> None:
    """Examines this machine: what a daemon needs, what slows it, and the remedies.

    No daemon has to run. Kernel, limits, shared memory, huge pages, NUMA, disks, GPUs, engines. Run
    it as the daemon's user. Nothing is changed; test files are removed.

    Exit codes: 0 no failure; 1 a daemon would not start or serve.
    """
    made: list[Check] = []
    console = Console(quiet=True) if ask.as_json else ask.console
    with console.status("examining") as status:
        for check in checks_of(ask, config, measure=measure, show=status.update):
            made.append(check)
            if not ask.as_json:
                draw(ask.console, check)
    if ask.as_json:
        ask.show_json({"checks": [asdict(check) for check in made]})
    else:
        draw_count(ask.console, Counter(check.status for check in made))
    if any(check.status == "failure" for check in made):
        raise click.exceptions.Exit(ExitCode.FAILED)


def checks_of(ask: Ask, path: Path | None, *, measure: bool, show: Callable[[str], None]) -> Iterator[Check]:
    """The checks of the configuration, the machine, and the daemon if one runs."""
    from tierd.config import Config, resolve  # noqa: PLC0415  # pydantic
    from tierd.doctor.check import Check, Host  # noqa: PLC0415
    from tierd.doctor.examine import examine  # noqa: PLC0415  # the tiers' imports

    name = str(path) if path else "no file"
    try:
        settings = settings_of(path)
        yield Check("config", "ok", name if path else "no file: the defaults")
    except ConfigError as error:
        fault, _, remedy = str(error).rpartition("; ")
        yield Check(
            "config", "failure", fault or remedy, "`tierd serve` cannot start; the defaults are examined", remedy
        )
        settings = resolve(Config())
    yield from examine(settings, Host(), measure=measure, show=show)
    yield from checks_of_daemon(ask, settings.server.runtime_dir)


def checks_of_daemon(ask: Ask, runtime_dir: str) -> Iterator[Check]:
    """A running daemon's state, notices and troubled tiers.

    Without --target it is the one of this configuration.
    """
    from tierd.doctor.check import Check  # noqa: PLC0415

    target = ask.target or runtime_dir
    try:
        with connect(target) as daemon:
            status = daemon.ask(pb.StatusRequest())
            tiers = daemon.ask(pb.TiersRequest()).tiers
    except Unavailable:
        yield Check("daemon", "skipped", f"none answers at {target}")
        return
    except TierdError as error:
        fault, _, remedy = str(error).rpartition("; ")
        yield Check("daemon", "warning", fault or remedy, "it cannot be asked", remedy)
        return
    if status.version != tierd.__version__:
        yield Check(
            "daemon",
            "warning",
            f"version {status.version}, this program {tierd.__version__}",
            "an upgrade is not finished",
            "restart the daemon; its memory and stores stay warm",
        )
    elif status.state == "draining":
        yield Check(
            "daemon",
            "warning",
            f"draining, pid {status.pid}",
            "it refuses new sessions and blocks",
            "`tierctl drain --undo`, or restart it",
        )
    else:
        yield Check("daemon", "ok", f"{status.state}, pid {status.pid}, version {status.version}")
    for notice in status.notices:
        found, _, remedy = notice.rpartition("; ")
        yield Check("daemon.notice", "note", found or remedy, "the daemon uses a slower way", remedy)
    for tier in tiers:
        if tier.trouble:
            yield Check(
                f"daemon.{tier.name}", "warning", tier.trouble, "blocks of this tier are misses", "see `tierctl tiers`"
            )


def draw(console: Console, check: Check) -> None:
    """Prints one check, and its consequence and remedy below."""
    found = Text(check.found)
    for word, style, text in (("so", "dim", check.consequence), ("remedy", "green", check.remedy)):
        found = Text.assemble(found, "\n", (f"{word}: ", style), text) if text else found
    head = Text(check.status.ljust(WIDTH), STYLES[check.status]), Text(check.name.ljust(NAME_WIDTH), "bold")
    if console.is_terminal:
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_row(*head, found)
        console.print(row)
    else:
        inset = "\n" + " " * (WIDTH + NAME_WIDTH + 4)
        print("  ".join(map(str, head)) + "  " + str(found).replace("\n", inset))


def draw_count(console: Console, counts: Counter[str]) -> None:
    """Prints the number of checks by status."""
    words = {
        status: status + "s" * (status in ("note", "warning", "failure") and counts[status] > 1) for status in STYLES
    }
    parts = [Text(f"{counts[status]} {word}", STYLES[status]) for status, word in words.items() if counts[status]]
    console.print()
    console.print(Text(", ").join(parts))
