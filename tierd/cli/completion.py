"""Values that a shell completes: the daemon's tiers and settings, and names of a list.

Click calls these functions with the context, the parameter and the start of the word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import click

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.errors import TierdError

ANSWER_S = 1.0
"""After this time the shell gets no names."""

Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def tiers(context: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
    """Names of the daemon's tiers; none if no daemon answers."""
    found = _asked(context, pb.TiersRequest())
    return [tier.name for tier in found.tiers if tier.name.startswith(start)] if found else []


def settings(context: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
    """`NAME=` of the settings that can change; none if no daemon answers."""
    found = _asked(context, pb.SetRequest())
    return [f"{row.name}=" for row in found.settings if row.name.startswith(start)] if found else []


def _asked(context: click.Context, request: Any) -> Any:
    """The reply of the context's daemon. None: it does not answer."""
    steps = (step for step in (context, context.parent) if step)
    target = next((step.params["target"] for step in steps if step.params.get("target")), None)
    with contextlib.suppress(TierdError), connect(target) as connection:
        return connection.ask(request, timeout_s=ANSWER_S)
    return None


def several(names: Iterable[str]) -> Completion:
    """Completes each of several names that are separated by commas."""

    def complete(_context: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
        before, comma, last = start.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return complete
