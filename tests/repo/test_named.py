"""Commands of `tierd` and `tierctl`, their options and settings that a text names exist."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.repo.source import ROOT, modules
from tierd.cli.ctl import cli as tierctl
from tierd.cli.daemon import cli as tierd
from tierd.settings import SECTIONS

TREES: dict[str, click.Command] = {"tierd": tierd, "tierctl": tierctl}
SETTINGS = {section: {field.name for field in dataclasses.fields(table)} for section, table in SECTIONS.items()}
PROGRAM = r"(?:(?:\S*/)?bin/)?(tierd|tierctl)"
QUOTED = re.compile(rf"`{PROGRAM} ([a-z-][^`]*)`")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(rf"^(?:\$ |sudo |ExecStart=)*{PROGRAM} ([a-z-][^#|&;\n]*)", re.MULTILINE)
UNIT = re.compile(r"^ExecStart=.*", re.MULTILINE)
SETTING = re.compile(rf"(?<![\w./\"'-])({'|'.join(SECTIONS)})(?:\[\w*\])?\.([a-z][a-z_]+)\b(?![(./\w])")
ATTRIBUTES = {"device.id", "device.kernels"}
"""Of Python objects, in docstrings."""


def faults_of(text: str) -> list[str]:
    """Commands, options and settings in a text that do not exist."""
    calls = [*QUOTED.findall(text), *TYPED.findall("\n".join([*FENCED.findall(text), *UNIT.findall(text)]))]
    wrong = [f"{program} {said}" for program, said in calls if not _is_command(TREES[program], said.split())]
    named = [
        (section, name)
        for section, name in SETTING.findall(text)
        if f"{section}.{name}" not in ATTRIBUTES and name != "py"
    ]
    return wrong + [f"{section}.{name}" for section, name in named if name not in SETTINGS[section]]


def _is_command(command: click.Command, words: list[str]) -> bool:
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        inner = command.get_command(click.Context(command), words.pop(0))
        if inner is None:
            return False
        command = inner
    if isinstance(command, click.Group) and not words:
        return False  # a group by itself does nothing
    options = {"--help", "-h", "--version", "--target"} | {
        o for p in command.params for o in (*p.opts, *p.secondary_opts)
    }
    return all(word.split("=")[0].rstrip("].,") in options for word in words if word.startswith("--"))


def messages() -> Iterator[tuple[str, str]]:
    """Every text in the package's code: messages, logs, docstrings. A NUL replaces a value of an
    f-string."""
    for module in modules():
        inner: set[int] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                inner.update(map(id, node.values))
                yield f"tierd/{module.name}:{node.lineno}", "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                yield f"tierd/{module.name}:{node.lineno}", node.value


def documents() -> list[Path]:
    """The files beside the code that people read."""
    kinds = ("*.md", "*.toml", "*.service", "Containerfile", "Dockerfile")
    found = [
        path
        for folder in ("tierd", "configs", "deploy", "tests", "cuda", "tools")
        for kind in kinds
        for path in (ROOT / folder).rglob(kind)
    ]
    return sorted([ROOT / "README.md", *found])


def test_messages_name_what_exists() -> None:
    """A command, an option or a setting that a message or a docstring of the code names exists."""
    assert [f"{where}: {fault}" for where, text in messages() for fault in faults_of(text)] == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_what_exists(path: Path) -> None:
    """A command, an option or a setting that a page, an example or a unit names exists."""
    assert faults_of(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("see `tierctl cure`", ["tierctl cure"]),
        ("run `tierd purge --nobody`", ["tierd purge --nobody"]),
        ("use `tierctl epoch jump`", ["tierctl epoch jump"]),
        ("use `tierctl epoch`", ["tierctl epoch"]),
        ("raise host.verif or nvme[0].capacity", ["host.verif"]),
        ("raise `server.queue_limit`. Then `tierd serve --config FILE`", []),
    ],
)
def test_what_is_looked_for(text: str, faults: list[str]) -> None:
    """The checks above report a missing command, option, subcommand or setting, and none that
    exists."""
    assert faults_of(text) == faults
