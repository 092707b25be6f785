"""Public names have docstrings; settings and metrics have explanations."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache

import pytest

from tests.repo.source import ROOT, Module, functions, modules
from tierd.decisions.causes import Cause
from tierd.metrics import METRICS
from tierd.settings import SECTIONS

REFERENCE = (ROOT / "configs" / "reference.toml").read_text(encoding="utf-8")
SETTINGS = [(section, field.name) for section, table in SECTIONS.items() for field in dataclasses.fields(table)]
EMPTY_INIT = "__init__.py"


def public_definitions(module: Module) -> list[tuple[str, ast.AST]]:
    """The module's public functions and classes, and the public methods of these classes."""
    found: list[tuple[str, ast.AST]] = []
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.append((node.name, node))
            if isinstance(node, ast.ClassDef):
                found += [
                    (f"{node.name}.{method.name}", method)
                    for method in node.body
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not method.name.startswith("_")
                    and "overload" not in {ast.unparse(mark) for mark in method.decorator_list}
                ]
    return found


@pytest.mark.parametrize("module", [module for module in modules() if module.is_public], ids=lambda module: module.name)
def test_modules_open_with_their_purpose(module: Module) -> None:
    """Every public module opens with a docstring; only an empty __init__ may go without."""
    if module.name.endswith(EMPTY_INIT) and not module.tree.body:
        return
    assert ast.get_docstring(module.tree), f"tierd/{module.name} does not say what it is for"


@pytest.mark.parametrize("module", [module for module in modules() if module.is_public], ids=lambda module: module.name)
def test_public_definitions_are_documented(module: Module) -> None:
    """Every public class, function and method has a docstring, or an interface documents it."""
    missing = [
        name
        for name, node in public_definitions(module)
        if not ast.get_docstring(node) and not _is_documented_elsewhere(name)
    ]
    assert missing == []


def _is_documented_elsewhere(name: str) -> bool:
    """Whether it is a method that a Protocol of the package, or the proto files, declare."""
    _, dot, method = name.partition(".")
    return bool(dot) and (method in _declared_methods() or method in _proto_methods())


@cache
def _declared_methods() -> set[str]:
    return {
        method.name
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(method)
    }


@cache
def _proto_methods() -> set[str]:
    texts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "proto").rglob("*.proto"))
    return set(re.findall(r"^\s*rpc (\w+)", texts, re.MULTILINE))


@pytest.mark.parametrize(("section", "name"), SETTINGS)
def test_settings_are_explained(section: str, name: str) -> None:
    """Every setting has a meaning that ends as a sentence, a unit or a choice, and a line in
    reference.toml."""
    info = SECTIONS[section].__pydantic_fields__[name]
    assert info.description
    assert info.description.endswith((".", ".)"))
    assert "unit" in info.json_schema_extra
    assert re.search(rf"^(# )?{name} = ", REFERENCE, re.MULTILINE)


def test_metrics_are_used() -> None:
    """The code sets every metric of the table."""
    code = "".join(module.text for module in modules() if module.name != "metrics.py")
    table = next(module.text for module in modules() if module.name == "metrics.py")
    attributes = dict(re.findall(r'self\.(\w+) = self\._\w+\("(tierd_\w+)"\)', table))
    assert sorted(attributes.values()) == sorted(METRICS)
    unused = [name for attribute, name in attributes.items() if not re.search(rf"metrics\.{attribute}\b", code)]
    assert "metrics.notice(" in code
    assert [name for name in unused if name != "tierd_notices"] == []


def test_tests_promise_one_sentence() -> None:
    """Every test states its promise in its docstring."""
    silent = [
        f"{path.relative_to(ROOT)}:{name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name, node in functions(ast.parse(path.read_text(encoding="utf-8")))
        if name.split(".")[-1].startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


def test_every_cause_has_an_example() -> None:
    """The page about causes has a row for each of them, in the order of the code, and no other."""
    page = (ROOT / "deploy" / "docs" / "explanation" / "why-it-missed.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE)
    assert rows == list(Cause)
