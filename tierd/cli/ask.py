"""Common parts of all `tierctl` verbs: `--target`, `--json`, a connection, a console.

A verb is a function of an `Ask` and its own options. One decorator adds `--target` and `--json` to
every verb.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import click
from google.protobuf.message import Message
from rich.console import Console

from tierd.cli.admin import Connection, connect
from tierd.cli.options import shared
from tierd.cli.render import new_console, show_json
from tierd.units import parse_bytes, parse_rate, parse_seconds

Command = TypeVar("Command", bound=Callable[..., Any])
Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class Ask:
    """One run of a verb: the target, and how to show the answer."""

    target: str | None
    as_json: bool
    console: Console
    is_repeated: bool = False
    """With --watch: each answer takes one line of JSON."""

    def connect(self) -> Connection:
        """A new session with the daemon; a context manager. Raises Unavailable if no daemon answers."""
        return connect(self.target)

    def show(self, answer: Answer, draw: Callable[[Console, Answer], None]) -> None:
        """Prints the answer as JSON if requested, else through draw."""
        if self.as_json:
            self.show_json(answer)
        else:
            draw(self.console, answer)

    def show_json(self, value: Message | Mapping[str, Any]) -> None:
        """Prints a message, or plain values, as JSON."""
        show_json(value, indent=None if self.is_repeated else 2)


class _Quantity(click.ParamType[Any]):
    """An option's value with a unit, parsed by a function of tierd.units."""

    def __init__(self, name: str, read: Callable[[object], float]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as a number; a usage error for a missing or wrong unit."""
        try:
            return self._read(_as_number(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Several(click.ParamType[Any]):
    """Values separated by commas, each read by a function that raises ValueError."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        """name: of one value, as the help shows it."""
        self.name = f"{name},..."
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The values without repetitions; a usage error for a wrong one."""
        try:
            return tuple(self._read(part) for part in dict.fromkeys(str(value).split(",")))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _as_number(value: object) -> object:
    if not isinstance(value, str) or not value.replace(".", "", 1).isdecimal():
        return value
    return float(value) if "." in value else int(value)


SIZE = _Quantity("size", parse_bytes)
"""`64 KiB`, or a bare number of bytes."""
RATE = _Quantity("rate", parse_rate)
"""`100 MiB/s`, or a bare number of bytes per second."""
DURATION = _Quantity("duration", parse_seconds)
"""`5 s`, or a bare number of seconds."""
LEAST_WATCH_S = 0.1
OUTPUT = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json"]),
    default="table",
    show_default=True,
    help="table: the columns that fit; wide: all columns; json: the same as --json.",
)


def verb(function: Command) -> Callable[..., Any]:
    """Adds --target and --json, and passes an Ask as the first argument."""

    @shared
    @functools.wraps(function)
    def command(*args: Any, target: str | None, as_json: bool, **options: Any) -> Any:
        return function(new_ask(target, as_json=as_json), *args, **options)

    return command


def listing(function: Command) -> Callable[..., Any]:
    """Like `verb`, with -o."""

    @shared
    @OUTPUT
    @functools.wraps(function)
    def command(*args: Any, target: str | None, as_json: bool, output: str, **options: Any) -> Any:
        return function(new_ask(target, as_json=as_json, output=output), *args, **options)

    return command


def looking(function: Command) -> Callable[..., Any]:
    """Like `listing`, with --watch."""

    @shared
    @OUTPUT
    @click.option("--watch", "every_s", type=DURATION, metavar="SECONDS", help="Repeat at this interval until Ctrl-C.")
    @functools.wraps(function)
    def command(*args: Any, target: str | None, as_json: bool, every_s: float | None, **options: Any) -> Any:
        ask = new_ask(target, as_json=as_json, output=options.pop("output"), is_repeated=every_s is not None)
        look = functools.partial(function, ask, *args, **options)
        return look() if every_s is None else repeat(ask, look, every_s=every_s)

    return command


def new_ask(target: str | None, *, as_json: bool, output: str = "table", is_repeated: bool = False) -> Ask:
    """The Ask of these options, and of those before the verb."""
    return Ask(
        target or said_before("target"),
        bool(as_json or output == "json" or said_before("as_json")),
        new_console(is_wide=output == "wide"),
        is_repeated,
    )


def said_before(name: str) -> Any:
    """The value of an option that stands before the verb, or None."""
    context = click.get_current_context().parent
    while context is not None and not context.params.get(name):
        context = context.parent
    return context and context.params[name]


def repeat(ask: Ask, look: Callable[[], object], *, every_s: float) -> NoReturn:
    """Repeats a look until Ctrl-C. A terminal shows only the latest one; a pipe gets all."""
    if every_s < LEAST_WATCH_S:
        raise click.UsageError(f"--watch: {every_s:g} s is below the minimum of {LEAST_WATCH_S:g} s; give more")
    while True:
        if ask.as_json or not ask.console.is_terminal:
            look()
            if not ask.as_json:
                print(flush=True)
        else:
            with ask.console.capture() as drawn:
                look()
            ask.console.clear()
            ask.console.print(f"{time.strftime('%H:%M:%S')}, every {every_s:g} s; Ctrl-C ends it", style="dim")
            ask.console.file.write(drawn.get())
            ask.console.file.flush()
        time.sleep(every_s)
