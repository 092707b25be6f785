"""Values that a shell completes after an option: the daemon's tiers, and names of a list.

Click calls these functions with the context, the parameter and the start of the word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.errors import TierdError

ANSWER_S = 1.0
"""After this time the shell gets no names."""

Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def tiers(context: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
    """Names of the daemon's tiers; none if no daemon answers."""
    steps = (step for step in (context, context.parent) if step)
    target = next((step.params["target"] for step in steps if step.params.get("target")), None)
    try:
        with connect(target) as connection:
            found = connection.ask(pb.TiersRequest(), timeout_s=ANSWER_S).tiers
    except TierdError:
        return []
    return [tier.name for tier in found if tier.name.startswith(start)]


def several(names: Iterable[str]) -> Completion:
    """Completes each of several names that are separated by commas."""

    def complete(_context: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
        before, comma, last = start.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return complete
