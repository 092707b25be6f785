"""The command line of both kinds of mutants, those of checks and those of kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol, TypeVar

SURVIVED, NOT_TRIED = 1, 2
"""Exit statuses."""


class Named(Protocol):
    """`what` is a text for people."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str: ...


Some = TypeVar("Some", bound=Named)


def choose(known: Sequence[Some], description: str) -> list[Some]:
    """The mutants that `--only` names, or all. Ends the process for `--list` and for an unknown
    name."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this one alone; may be repeated")
    parser.add_argument("--list", action="store_true", help="name them and do nothing")
    given = parser.parse_args()
    chosen = [one for one in known if not given.only or one.name in given.only]
    if not chosen or set(given.only) - {one.name for one in chosen}:
        parser.error("no such name; --list shows them")
    if given.list:
        print(*(f"{one.name:34} {one.what}" for one in chosen), sep="\n")
        sys.exit(0)
    return chosen
