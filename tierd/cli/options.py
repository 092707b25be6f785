"""The options that every verb of `tierctl` has, for the program, its groups and its verbs alike.

Purpose: `--target` and `--json` are understood before the verb and after it. Non-purpose: obeying them
(ask.py). Invariant: it loads click alone, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def shared(function: Command) -> Command:
    """Adds --target and --json, which every verb and every group of verbs has."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON: raw numbers, whole hashes."),
        click.option(
            "--target",
            metavar="DIR",
            help="Runtime directory of the daemon. [default: TIERD_TARGET, else where it would be]",
        ),
    ):
        function = option(function)
    return function
