"""`tierctl`: what operators ask of a running daemon.

Purpose: the list of verbs. Non-purpose: any of them. Invariant: a verb that is not built is not listed.
"""

from __future__ import annotations

import click

from tierd.cli import act, look
from tierd.cli.engines import engines
from tierd.cli.exits import Program
from tierd.cli.fsck import fsck
from tierd.cli.record import record
from tierd.cli.replay import replay
from tierd.cli.scrub import scrub
from tierd.cli.simulate import simulate
from tierd.cli.top import top
from tierd.cli.wear import wear

VERBS = (
    look.status,
    top,
    look.tiers,
    look.blocks,
    look.inspect,
    look.sessions,
    look.namespaces,
    engines,
    act.pin,
    act.unpin,
    act.evict,
    act.drain,
    act.flush,
    act.epoch,
    wear,
    scrub,
    fsck,
    record,
    replay,
    simulate,
)


class InOrder(Program):
    """Lists its verbs in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, near to far from daily use."""
        return list(self.commands)


@click.group(cls=InOrder, name="tierctl", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tierd", message="tierctl %(version)s")
def cli() -> None:
    """Looks into a running tierd and tells it what to do.

    The daemon is found by --target, else TIERD_TARGET, else where `tierd serve` puts its sockets.

    Exit codes: 0 ok, 1 failed, 2 usage, 3 no daemon.
    """


for command in VERBS:
    cli.add_command(command)


def main() -> None:
    """The program's entry point."""
    cli(prog_name="tierctl")


if __name__ == "__main__":
    main()
