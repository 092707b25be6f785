"""`tierctl`: the operators' program for a running daemon.

It has the list of verbs. It imports a verb's module only when that verb is needed.
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
        "status": ("look", "Shows the daemon's state: load, hit ratio, tiers, notices."),
        "top": ("top", "Shows the daemon live: hit ratio, tiers, sessions, prefix tree, rates."),
        "explain": ("explain", "Tells why requests hit or missed."),
        "watch": ("watch", "Prints events as they happen: blocks stored, blocks removed, epochs ended."),
        "tiers": ("look", "Shows each tier's capacity, use, traffic, location and trouble."),
        "blocks": ("blocks", "Lists blocks, filtered and sorted, one page at a time."),
        "inspect": ("blocks", "Shows one block: its facts, its pages, and the blocks that follow it."),
        "tree": ("tree", "Shows the prefix tree: the prefixes that sequences share, with tokens, hits and tiers."),
        "sessions": ("look", "Lists the connected clients, with the leases and bytes of each."),
        "namespaces": ("look", "Lists the namespaces: model, tenant, epoch, blocks."),
        "engines": ("engines", "Lists the connected engines, and why some share no blocks."),
        "ceiling": (
            "ceiling",
            "Shows the hit ratio that more memory would have given, over 15 minutes, an hour, a day.",
        ),
        "wear": ("wear", "Shows the writes to each store, its wear budget, and its drive's life."),
    },
    "Act": {
        "pin": ("act", "Protects blocks from eviction until unpin or a restart."),
        "unpin": ("act", "Makes pinned blocks evictable again."),
        "evict": ("act", "Evicts blocks from one tier or from all; pinned blocks stay."),
        "flush": ("act", "Writes all blocks not yet on NVMe to disk and syncs them; evicts none."),
        "drain": ("act", "Drains the daemon: it takes no new work until --undo or a restart; leases may finish."),
        "set": ("setting", "Changes settings of the running daemon, or lists those that can change."),
        "epoch": ("act", "Makes blocks of old weights unreachable."),
    },
    "Verify": {
        "doctor": ("doctor", "Examines this machine: what a daemon needs, what slows it, and the remedies."),
        "scrub": ("scrub", "Verifies every block now; a bad one becomes a miss."),
        "fsck": ("fsck", "Checks every file and block while no daemon runs."),
    },
    "Traces": {
        "record": ("record", "Records the clients' requests in a trace, for `simulate` and `replay`."),
        "replay": ("replay", "Drives the daemon with a recorded trace."),
        "simulate": ("simulate", "Simulates tiers of many sizes on recorded traces, without a daemon."),
    },
    "Measure": {
        "plan": ("plan", "Plans memory and disk for a model: bytes of its KV, tier sizes, hits, first token, costs."),
        "bench": ("bench", "Measures what the running daemon is worth to an engine."),
    },
    "Codecs": {
        "codecs": ("codecs", "Lists the codecs: size, error, speed."),
        "calibrate": ("calibrate", "Makes a calibration file of a model, which some codecs need."),
        "quality": ("quality", "Measures what codecs cost: a model goes on over decoded blocks."),
    },
}
"""Each verb's module and the first sentence of its help, by purpose."""
VERBS = {name: row for group in GROUPS.values() for name, row in group.items()}


class InOrder(Program):
    """Lists the verbs in their given order, without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, most used first."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of this name."""
        if cmd_name not in VERBS:
            return None
        found: click.Command = getattr(importlib.import_module(f"tierd.cli.{VERBS[cmd_name][0]}"), cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the lists of the help, one for each group."""
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
    """Inspects and controls a running tierd daemon.

    --target and --json may stand before the verb or after it.

    Exit codes: 0 ok; 1 failed; 2 a command line or configuration is wrong; 3 no daemon answers;
    130 ended by Ctrl-C.
    """


def main() -> None:
    """The program's entry point."""
    cli(prog_name="tierctl")


if __name__ == "__main__":
    main()
