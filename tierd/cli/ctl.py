"""`tierctl`: the operators' program for a running daemon.

It holds only the list of commands. A command that is not built is not listed.
"""

from __future__ import annotations

import importlib
import textwrap

import click

from tierd.cli.exits import Program

VERBS = {
    "status": ("look", "How the daemon is: state, load, tiers, notices."),
    "top": ("top", "The daemon, live: tiers, rates, sessions. q or Ctrl-C ends it."),
    "tiers": ("look", "Each tier's capacity, use, traffic, place and trouble."),
    "blocks": ("look", "Lists blocks: filtered, sorted, a page at a time."),
    "inspect": ("look", "One block: what it is, where its pages lie, what follows it."),
    "sessions": ("look", "Who is connected, and what each holds."),
    "namespaces": ("look", "Models, their tenants and epochs."),
    "engines": ("engines", "Which engines are connected, how they are configured, and what keeps them from sharing."),
    "pin": ("act", "Keeps blocks from being evicted, until unpin or a restart."),
    "unpin": ("act", "Takes back what pin did."),
    "evict": ("act", "Drops blocks, from one tier or from all; pinned ones stay."),
    "drain": ("act", "Refuses new work and lets leases finish."),
    "flush": (
        "act",
        "Writes whatever has no copy on NVMe there, synced; ends with exit code 1 if that failed for any block.",
    ),
    "epoch": ("act", "Makes what was stored under old weights unreachable."),
    "wear": ("wear", "What is written to each store, its wear budget, and how long its drive will last."),
    "scrub": ("scrub", "Verifies every block now; a bad one becomes a miss."),
    "fsck": ("fsck", "Checks every file and block, while no daemon runs."),
    "record": ("record", "Writes what clients ask for into a trace, for `simulate` and `replay`."),
    "replay": ("replay", "Drives the daemon with a recorded trace."),
    "simulate": (
        "simulate",
        "Serves recorded traces from tiers of many sizes, without a daemon, as its core and its policies would.",
    ),
}
"""Each command's module, loaded on use, and the first sentence of its help."""


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
        """The list in the help."""
        limit = formatter.width - 6 - max(map(len, VERBS))
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, textwrap.shorten(said, limit, placeholder="...")) for name, (_, said) in VERBS.items()]
            )


@click.group(cls=InOrder, name="tierctl", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tierd", message="tierctl %(version)s")
def cli() -> None:
    """Looks into a running tierd and tells it what to do.

    The daemon is found by --target, else TIERD_TARGET, else where `tierd serve` puts its sockets.

    Exit codes: 0 ok, 1 failed, 2 usage, 3 no daemon.
    """


def main() -> None:
    """The program's entry point."""
    cli(prog_name="tierctl")


if __name__ == "__main__":
    main()
