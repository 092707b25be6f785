"""The options `--target` and `--json`: the program `tierctl`, its groups and its verbs have them.

So both may stand before the verb or after it. ask.py uses their values. This module imports only
click, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def shared(function: Command) -> Command:
    """Adds --target and --json to a verb or a group of verbs."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON, with raw numbers and whole hashes."),
        click.option(
            "--target",
            metavar="DIR",
            help="Runtime directory of the daemon. [default: TIERD_TARGET, else the default of `tierd serve`]",
        ),
    ):
        function = option(function)
    return function
