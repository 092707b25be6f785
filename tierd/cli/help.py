"""How help looks: commands in groups, whole sentences, an example for each verb.

Purpose: the layout of `--help`. Non-purpose: the words. Invariant: a sentence that is too long for its
line goes on in the next one; nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import click

SENTENCE_MOST = 1000
"""Click cuts a sentence that is longer: none is."""


class Listing(click.Group):
    """A group whose help lists its commands with their whole first sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the help."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        write_commands(formatter, "Commands", [(name, sentence_of(command)) for name, command in found if command])


Listing.group_class = Listing


def sentence_of(command: click.Command) -> str:
    """The first sentence of a command's help."""
    return command.get_short_help_str(SENTENCE_MOST)


def write_commands(formatter: click.HelpFormatter, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """One section of a list of commands."""
    with formatter.section(title):
        formatter.write_dl(list(rows))


def example(*lines: str) -> str:
    """The end of a verb's help: commands that one can type."""
    return "\b\n" + "\n".join(["Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)])
