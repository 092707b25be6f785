"""Limits of size, and a list of exceptions to a softer limit, which may only shrink."""

from __future__ import annotations

import ast
import statistics

import pytest

from tests.repo.source import ROOT, FunctionNode, Module, functions, modules, tracked_files

FUNCTION_LINES = 70
FILE_LINES = 500
PARAMETERS = 5
POSITIONAL = 5

WIDE: dict[str, int] = {
    "client/aio.py:AsyncClient.put": 6,
    "client/client.py:Client.put": 6,
    "core/requests/commits.py:Commits.finish": 6,
    "core/core.py:Core.finish_commit": 6,
    "server/grpc/guard.py:Guard.__init__": 7,
}
"""Functions with more than PARAMETERS parameters, and how many: none may be added, none may grow."""


def parameters(node: FunctionNode) -> int:
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_walls_hold(module: Module) -> None:
    """No file has more than 500 lines and no function more than 70."""
    assert len(module.text.splitlines()) <= FILE_LINES
    long = [name for name, node in functions(module.tree) if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES]
    assert long == []


@pytest.mark.parametrize("folder", ["tests", "tools"])
def test_no_file_beside_the_package_passes_the_wall(folder: str) -> None:
    """Files of tests and tools have at most 500 lines too."""
    paths = [name for name in tracked_files() if name.startswith(f"{folder}/") and name.endswith(".py")]
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in paths}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_most_functions_are_near_ten_lines() -> None:
    """The median function has at most 10 lines, and three in four have at most 12."""
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for module in modules() for _, node in functions(module.tree)]
    assert statistics.median(lengths) <= 10
    assert sum(length <= 12 for length in lengths) >= 0.75 * len(lengths)


def test_wide_signatures_only_shrink() -> None:
    """A function takes at most 5 parameters; the few that take more are listed and may not grow."""
    wide = {
        f"{module.name}:{name}": parameters(node)
        for module in modules()
        for name, node in functions(module.tree)
        if parameters(node) > PARAMETERS
    }
    assert {name: count for name, count in wide.items() if count > WIDE.get(name, PARAMETERS)} == {}
    assert {name: count for name, count in WIDE.items() if wide.get(name, 0) < count} == {}, "lower or strike these"


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_results_of_many_parts_have_a_name(module: Module) -> None:
    """A function that returns more than two values returns a named type; a private one may return
    three."""
    bare = [
        name
        for name, node in functions(module.tree)
        if isinstance(node.returns, ast.Subscript) and _width(node.returns) > 2 + node.name.startswith("_")
    ]
    assert bare == []


def _width(annotation: ast.Subscript) -> int:
    is_tuple = isinstance(annotation.value, ast.Name) and annotation.value.id == "tuple"
    return len(annotation.slice.elts) if is_tuple and isinstance(annotation.slice, ast.Tuple) else 0
