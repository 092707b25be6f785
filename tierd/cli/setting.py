"""`tierctl set`: changes settings of the running daemon, or lists those that can change."""

from __future__ import annotations

from collections.abc import Callable

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli import completion
from tierd.cli.ask import Ask, verb
from tierd.cli.help import example
from tierd.cli.render import Column, show_table

CHANGE_TIMEOUT_S = 600.0
"""Another eviction policy takes over the blocks of a tier beside the daemon's work."""
SETTING_COLUMNS = (Column("setting"), Column("value"), Column("default", spare=1), Column("allowed"))
CHANGE_COLUMNS = (Column("setting"), Column("before"), Column("after"))


@click.command(epilog=example("tierctl set", "tierctl set host.0.high_watermark=0.9 server.log_level=debug"))
@click.argument("settings", nargs=-1, metavar="[NAME=VALUE]...", shell_complete=completion.settings)
@click.option("--check", "is_check", is_flag=True, help="Only check whether the daemon would accept the values.")
@verb
def set(ask: Ask, *, settings: tuple[str, ...], is_check: bool) -> None:  # noqa: A001  # the name of the verb
    """Changes settings of the running daemon, or lists those that can change.

    The daemon checks all of them as at its start, and changes all or none. A change holds until the
    daemon restarts or reads its file again (SIGHUP); write it into the file to keep it. The
    daemon's log tells who changed what. Exit code 1: a tier could not shrink as far as asked.
    """
    wanted = [_setting(text) for text in settings]
    if is_check and not wanted:
        raise click.UsageError("--check: no setting is named; give NAME=VALUE")
    with ask.connect() as daemon:
        answer = daemon.ask(pb.SetRequest(settings=wanted, check=is_check), timeout_s=CHANGE_TIMEOUT_S)
    ask.show(answer, _draw_changes(is_check=is_check) if wanted else _draw_settings)
    if answer.notes:
        raise click.exceptions.Exit(1)


def _setting(text: str) -> pb.SettingValue:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{text!r} is not NAME=VALUE; write for example host.0.high_watermark=0.9")
    return pb.SettingValue(name=name.strip(), value=value.strip())


def _draw_settings(console: Console, answer: pb.SetReply) -> None:
    rows = [(row.name, row.value, row.default_value, row.allowed) for row in answer.settings]
    show_table(console, SETTING_COLUMNS, rows, empty="no setting can change while the daemon runs")


def _draw_changes(*, is_check: bool) -> Callable[[Console, pb.SetReply], None]:
    def draw(console: Console, answer: pb.SetReply) -> None:
        rows = [(change.name, change.before, change.after) for change in answer.changes]
        show_table(console, CHANGE_COLUMNS, rows, empty="nothing differs from before")
        kept = "Until a restart or SIGHUP; write it into the configuration file to keep it."
        for line in (*answer.notes, "Checked; nothing changed." if is_check else kept):
            console.print(Text(line), soft_wrap=True)

    return draw
