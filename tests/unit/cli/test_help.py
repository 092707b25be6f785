"""Help texts: every verb is in a group, sentences are whole, and each example can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tierd.cli import exits
from tierd.cli.ctl import GROUPS
from tierd.cli.ctl import cli as tierctl
from tierd.cli.daemon import cli as tierd

PROGRAMS: dict[str, click.Group] = {"tierctl": tierctl, "tierd": tierd}


def commands(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The words of every command below a group, including groups."""
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*path, name)
        if isinstance(found := group.get_command(context, name), click.Group):
            yield from commands(found, (*path, name))


GROUPED = ("record", "epoch", "bench", "kernels", "config")
"""Verbs that only hold others."""
EVERY = [words for name, program in PROGRAMS.items() for words in commands(program, (name,))]


def helped(words: tuple[str, ...], columns: int = 80) -> str:
    """The help of a command in a terminal of this width."""
    ran = CliRunner(env={"COLUMNS": str(columns)}).invoke(
        PROGRAMS[words[0]], [*words[1:], "--help"], prog_name=words[0]
    )
    assert ran.exit_code == 0, ran.output
    return ran.stdout


@pytest.mark.parametrize("columns", [60, 80, 140])
@pytest.mark.parametrize("words", [("tierctl",), ("tierd",), *EVERY], ids=" ".join)
def test_no_line_of_help_is_cut(words: tuple[str, ...], columns: int) -> None:
    """The sentences in a list of commands are whole at every terminal width."""
    listed = [line for line in helped(words, columns).splitlines() if not line.startswith("Usage:")]
    assert not [line for line in listed if line.rstrip().endswith(("...", "…"))]


def test_verbs_stand_in_groups() -> None:
    """`tierctl --help` lists its verbs under the group of their purpose."""
    text = helped(("tierctl",))
    places = [text.index(f"\n{title}:\n") for title in GROUPS]
    assert [*GROUPS] == ["Look", "Act", "Verify", "Traces", "Measure", "Codecs"] and places == sorted(places)


@pytest.mark.parametrize(
    "words",
    [words for words in EVERY if words[1:] not in ((group,) for group in GROUPED)],
)
def test_every_verb_has_an_example_that_can_be_typed(words: tuple[str, ...]) -> None:
    """The help of each verb ends with a command of that verb whose options exist."""
    text = re.split(r"\n  Examples?:\n", helped(words))[1].strip()
    for line in text.splitlines():
        typed = shlex.split(line)
        assert tuple(typed[: len(words)]) == words, line
        command: click.Command = PROGRAMS[words[0]]
        for name in words[1:]:
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), name) or pytest.fail(line)
        command.make_context(words[-1], typed[len(words) :], resilient_parsing=True)
        known = {option for param in command.params for option in param.opts}
        assert {word for word in typed if word.startswith("--")} <= known, line
    assert text


def test_the_table_of_exit_codes_is_whole() -> None:
    """The README's one table of exit codes has each code of `ExitCode`, and Ctrl-C's."""
    text = (Path(exits.__file__).parent / "README.md").read_text(encoding="utf-8")
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", text.partition("## Exit codes")[2], re.MULTILINE)]
    assert codes == [*exits.ExitCode, 130]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_shell_can_complete(program: str, shell: str) -> None:
    """Each program writes the completion that the README names, for each shell."""
    name = f"_{program.upper()}_COMPLETE"
    ran = CliRunner(env={name: f"{shell}_source"}).invoke(PROGRAMS[program], prog_name=program)
    assert ran.exit_code == 0 and program in ran.stdout
