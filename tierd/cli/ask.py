"""Common parts of all `tierctl` commands: `--target`, `--json`, a connection, a console.

A command is a function of an `Ask` and its own options. One decorator puts `--target` and `--json`
on every command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from google.protobuf.message import Message
from rich.console import Console

from tierd.cli.admin import Connection, connect
from tierd.cli.render import new_console, show_json
from tierd.units import parse_bytes, parse_rate, parse_seconds

Command = TypeVar("Command", bound=Callable[..., Any])
Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class Ask:
    """One run of a command: the target, and how to show the answer."""

    target: str | None
    as_json: bool
    console: Console

    def connect(self) -> Connection:
        """A session of its own with the daemon; a context manager. Raises Unavailable if no daemon answers."""
        return connect(self.target)

    def show(self, answer: Answer, draw: Callable[[Console, Answer], None]) -> None:
        """Shows the answer as JSON if requested, else through draw."""
        if self.as_json:
            show_json(answer)
        else:
            draw(self.console, answer)


def verb(function: Command) -> Callable[..., Any]:
    """Adds --target and --json, and passes the function an Ask as its first argument."""

    @click.option(
        "--target",
        metavar="DIR",
        help="Runtime directory of the daemon. [default: TIERD_TARGET, else where it would be]",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print JSON: raw numbers, whole hashes.")
    @functools.wraps(function)
    def command(*args: Any, target: str | None, as_json: bool, **options: Any) -> Any:
        return function(Ask(target, as_json, new_console()), *args, **options)

    return command


class _Quantity(click.ParamType[Any]):
    """An option's value with a unit, read by one of tierd.units' readers."""

    def __init__(self, name: str, read: Callable[[object], float]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as a number; a usage error for a missing or wrong unit."""
        try:
            return self._read(_as_number(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _as_number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


SIZE = _Quantity("size", parse_bytes)
"""`64 KiB`, or a bare number of bytes."""
RATE = _Quantity("rate", parse_rate)
"""`100 MiB/s`, or a bare number of bytes per second."""
DURATION = _Quantity("duration", parse_seconds)
"""`5 s`, or a bare number of seconds."""
