"""`tierd man DIR`: manual pages, one for each command of both programs, from the texts of their help.

A wheel's build writes them too (tools/wheel_hook.py). The markup is that of man(7).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

import tierd
from tierd.cli.help import example, sentence_of

MARKS = {"\\": "\\e", "-": "\\-", "`": "\\(ga", "'": "\\(aq", "^": "\\(ha", "~": "\\(ti"}
"""Characters that troff would print as others, or leave out."""


@click.command(epilog=example("tierd man /usr/local/share/man/man1"))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def man(directory: Path) -> None:
    """Writes a manual page for each command into a directory, which is made if it does not exist.

    `man` looks into /usr/local/share/man/man1, and into share/man/man1 of an active environment.
    """
    click.echo(f"{len(write(directory))} pages in {directory}")


def write(directory: Path) -> list[Path]:
    """Writes the pages into a directory, and returns their paths. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (written := pages()).items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in written]


def pages() -> dict[str, str]:
    """Each page's text by its file name: `tierd.1`, `tierd-serve.1`, `tierctl-record-start.1`."""
    from tierd.cli import ctl, daemon  # noqa: PLC0415  # daemon imports this module

    found = [path for program in (daemon.cli, ctl.cli) for path in _paths((program,))]
    return {f"{_name(path)}.1": "\n".join(_page(path)) + "\n" for path in found}


def _paths(path: tuple[click.Command, ...]) -> Iterator[tuple[click.Command, ...]]:
    """The commands from the program down to each command, itself included."""
    yield path
    for command in _inner(path[-1]):
        yield from _paths((*path, command))


def _inner(command: click.Command) -> list[click.Command]:
    if not isinstance(command, click.Group):
        return []
    context = click.Context(command)
    return [found for name in command.list_commands(context) if (found := command.get_command(context, name))]


def _context(path: tuple[click.Command, ...]) -> click.Context:
    """The command's context, which has the help options of the program."""
    parent = _context(path[:-1]) if path[1:] else None
    return path[-1].context_class(path[-1], parent=parent, info_name=path[-1].name, **path[-1].context_settings)


def _name(path: tuple[click.Command, ...]) -> str:
    return "-".join(command.name or "" for command in path)


def _page(path: tuple[click.Command, ...]) -> Iterator[str]:
    command, name, words = path[-1], _name(path), " ".join(step.name or "" for step in path)
    context = _context(path)
    yield f'.TH {_plain(name.upper())} 1 "" "tierd {tierd.__version__}" "tierd"'
    yield ".ad l"
    yield ".nh"
    yield from (".SH NAME", f"{_plain(name)} \\- {_plain(sentence_of(command).rstrip('.'))}")
    yield from (".SH SYNOPSIS", f".B {_plain(words)}", _plain(" ".join(command.collect_usage_pieces(context))))
    yield ".SH DESCRIPTION"
    yield from _text(command.help)
    options = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    if records := [record for option in options if (record := option.get_help_record(context))]:
        yield ".SH OPTIONS"
        for option, meaning in records:
            yield from (".TP", f".B {_plain(option)}", _prose(meaning))
    if inner := _inner(command):
        yield ".SH COMMANDS"
        for step in inner:
            yield from (".TP", f".BR {_plain(_name((*path, step)))} (1)", _prose(sentence_of(step)))
    if command.epilog:
        yield ".SH EXAMPLES"
        yield from _text(command.epilog.replace("Examples:\n", "").replace("Example:\n", ""))
    yield ".SH SEE ALSO"
    others = {"tierd", "tierctl", *(_name(path[:length]) for length in range(1, len(path)))} - {name}
    yield ", ".join(f"\\fB{_plain(other)}\\fR(1)" for other in sorted(others))


def _text(text: str | None) -> Iterator[str]:
    """Paragraphs of a help text. Click's mark `\\b` keeps the lines of one as they are."""
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        if paragraph.startswith("\b"):
            lines = [line.strip() for line in paragraph.splitlines()[1:]]
            yield from (".PP", ".EX", *(_plain(line) for line in lines), ".EE")
        else:
            yield from (".PP", _prose(paragraph))


def _prose(text: str) -> str:
    """One paragraph; what stands in backquotes is bold."""
    parts = re.split(r"`([^`]*)`", " ".join(text.split()))
    return "".join(f"\\fB{_plain(part)}\\fR" if number % 2 else _plain(part) for number, part in enumerate(parts))


def _plain(text: str) -> str:
    """The text as troff prints it. At the start of a line a full stop would be a request."""
    return re.sub(r"^\.", r"\\&.", "".join(MARKS.get(letter, letter) for letter in text))
