"""`tierctl`: the operators' program for a running daemon.

It holds only the list of commands. A command that is not built is not listed.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from tierd.cli.exits import Program
from tierd.cli.help import example, write_commands
from tierd.cli.options import shared

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Look": {
        "status": ("look", "Shows how the daemon is: state, load, hit ratio, tiers, notices."),
        "top": ("top", "Shows the daemon live: hit ratio, tiers, rates, sessions."),
        "watch": ("watch", "Shows blocks come and go as it happens, one line for each event."),
        "tiers": ("look", "Shows each tier's capacity, use, traffic, place and trouble."),
        "blocks": ("blocks", "Lists blocks: filtered, sorted, a page at a time."),
        "inspect": ("blocks", "Shows one block: its facts, its pages, and the blocks that follow it."),
        "sessions": ("look", "Lists the clients that are connected, and what each holds."),
        "namespaces": ("look", "Lists models, their tenants and epochs."),
        "engines": ("engines", "Lists the engines that are connected, and what keeps them from sharing."),
        "wear": ("wear", "Shows the writes to each store, its wear budget, and its drive's life."),
    },
    "Act": {
        "pin": ("act", "Keeps blocks from being evicted, until unpin or a restart."),
        "unpin": ("act", "Takes back what pin did."),
        "evict": ("act", "Drops blocks, from one tier or from all; pinned ones stay."),
        "flush": ("act", "Writes blocks that only memory holds to NVMe; drops nothing."),
        "drain": ("act", "Stops the daemon's service for good, until a restart; leases may finish."),
        "epoch": ("act", "Makes what was stored under old weights unreachable."),
    },
    "Verify": {
        "scrub": ("scrub", "Verifies every block now; a bad one becomes a miss."),
        "fsck": ("fsck", "Checks every file and block, while no daemon runs."),
    },
    "Traces": {
        "record": ("record", "Writes what clients ask for into a trace, for `simulate` and `replay`."),
        "replay": ("replay", "Drives the daemon with a recorded trace."),
        "simulate": ("simulate", "Serves recorded traces from tiers of many sizes, without a daemon."),
    },
}
"""Each verb's module, loaded when it is wanted, and the first sentence of its help; by what it is for."""
VERBS = {name: row for group in GROUPS.values() for name, row in group.items()}


class InOrder(Program):
    """Lists its commands in their given order, without loading any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, most used first."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        if cmd_name not in VERBS:
            return None
        found: click.Command = getattr(importlib.import_module(f"tierd.cli.{VERBS[cmd_name][0]}"), cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The lists in the help, one for each group."""
        width = max(map(len, VERBS))
        for title, verbs in GROUPS.items():
            write_commands(formatter, title, [(name.ljust(width), said) for name, (_, said) in verbs.items()])


@click.group(
    cls=InOrder,
    name="tierctl",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example("tierctl status", "tierctl --json blocks --tier host.0"),
)
@click.version_option(package_name="tierd", message="tierctl %(version)s")
@shared
def cli(**_: Any) -> None:
    """Looks into a running tierd and tells it what to do.

    --target and --json may stand before the verb or after it.

    Exit codes: 0 ok; 1 failed; 2 a command line or configuration is wrong; 3 no daemon answers;
    130 ended by Ctrl-C.
    """


def main() -> None:
    """The program's entry point."""
    cli(prog_name="tierctl")


if __name__ == "__main__":
    main()
