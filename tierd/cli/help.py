"""The layout of `--help`: verbs in groups, whole sentences, an example for each verb.

A sentence that is too long for its line continues in the next line. Nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import click

SENTENCE_MOST = 1000
"""Click cuts longer sentences; none is longer."""


class Listing(click.Group):
    """A group whose help lists its commands with their whole first sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        write_commands(formatter, "Commands", [(name, sentence_of(command)) for name, command in found if command])


Listing.group_class = Listing


def sentence_of(command: click.Command) -> str:
    """The first sentence of a command's help."""
    return command.get_short_help_str(SENTENCE_MOST)


def write_commands(formatter: click.HelpFormatter, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Writes one section of a list of commands."""
    with formatter.section(title):
        formatter.write_dl(list(rows))


def example(*lines: str) -> str:
    """The end of a verb's help: commands to type."""
    return "\b\n" + "\n".join(["Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)])
