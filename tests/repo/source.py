"""The input of the repository's checks: the tracked files, and the package's syntax trees."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tierd"
GENERATED = PACKAGE / "_proto"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A hand-written module of the package: its path below tierd/, its text, its syntax tree."""

    name: str
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The first component: `tiers` for tiers/arena/arena.py, `errors` for errors.py."""
        return self.name.split("/")[0].removesuffix(".py")

    @property
    def is_public(self) -> bool:
        """Whether no component begins with an underscore, except __init__."""
        return not any(piece.startswith("_") and piece != "__init__.py" for piece in self.name.split("/"))


@cache
def modules() -> tuple[Module, ...]:
    """Every hand-written module of the package."""
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if GENERATED not in path.parents)
    texts = ((path, path.read_text(encoding="utf-8")) for path in paths)
    return tuple(Module(str(path.relative_to(PACKAGE)), text, ast.parse(text)) for path, text in texts)


@cache
def tracked_files() -> tuple[str, ...]:
    """Every file that git tracks, by its path from the top; none outside a checkout."""
    answer = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    return tuple(name for name in answer.stdout.split("\0") if name and (ROOT / name).is_file())


def functions(tree: ast.AST, *, prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """Every function in a tree by its dotted name, also those inside classes and functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        name = (
            f"{prefix}{node.name}."
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            else prefix
        )
        yield from functions(node, prefix=name)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that a tree imports, at any depth; `from tierd import x` as `tierd.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
