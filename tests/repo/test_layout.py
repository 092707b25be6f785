"""The house: what lies where, and what may be called how."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from tests.repo.source import ROOT, Module, modules, tracked_files

FOLDERS = {"proto", "cuda", "configs", "tests", "deploy", "tools", "tierd"}
FILES = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "pyproject.toml"}
TEST_FOLDERS = {"unit", "contract", "property", "sim", "system", "gpu", "repo", "golden"}
EMPTY_NAMES = {"Manager", "Helper", "Helpers", "Util", "Utils", "Base", "Impl", "Data", "Misc", "Common"}
FILE_BYTES = 1 << 20

pytestmark = pytest.mark.skipif(not tracked_files(), reason="not a git checkout")


def test_top_level_holds_only_what_belongs_there() -> None:
    """At the top stand the fixed folders, the fixed files and dot-files."""
    tops = {name.split("/")[0] for name in tracked_files() if not name.startswith(".")}
    assert tops <= FOLDERS | FILES


def test_tests_lie_by_kind() -> None:
    """Below tests/ are only the folders of its kinds."""
    kinds = {name.split("/")[1] for name in tracked_files() if name.startswith("tests/") and name.count("/") > 1}
    assert kinds <= TEST_FOLDERS


def test_files_are_texts_of_no_machine() -> None:
    """Every tracked file but golden ones is UTF-8 text below 1 MiB, and none names this checkout's path or a package index."""
    here = str(ROOT.resolve())
    for name in tracked_files():
        raw = (ROOT / name).read_bytes()
        assert len(raw) <= FILE_BYTES, name
        if name.startswith("tests/golden/"):
            continue
        text = raw.decode("utf-8")
        assert here not in text, f"{name} names this checkout's path"
        assert not re.search(r"--(extra-)?index-url", text) or name == "tests/repo/test_layout.py", name


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_names_say_something(module: Module) -> None:
    """No class and no module is called Manager, Helper, Util, Base, Impl or Data."""
    names = [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    words = {word for name in names for word in re.findall(r"[A-Z][a-z]+|[A-Z]+(?![a-z])", name)}
    words |= {piece.removesuffix(".py").title() for piece in module.name.split("/")}
    assert words & EMPTY_NAMES == set()


def test_base_install_is_light() -> None:
    """The packages that everybody installs hold no framework and no GPU library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {re.split(r"[<>=!\[; ]", requirement)[0].lower() for requirement in project["dependencies"]}
    assert base.isdisjoint(
        {"torch", "cupy", "kvikio", "transformers", "pandas", "scipy", "pyarrow", "boto3", "tensorflow"}
    )
    assert len(base) <= 16


def test_versions_agree() -> None:
    """The version in pyproject.toml is the newest heading of the change log."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading
    assert heading[1] == version


@pytest.mark.parametrize("name", ["README.md", "tierd/README.md", "deploy/README.md"])
def test_links_between_files_lead_somewhere(name: str) -> None:
    """Every relative link in the main documents names a file or folder that exists."""
    path = ROOT / name
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []
