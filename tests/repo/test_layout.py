"""The repository's layout: the places of its files, and rules for names."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement

import tierd
from tests.conftest import LONGEST_FIRST
from tests.repo.source import ROOT, Module, modules, tracked_files

FOLDERS = {"proto", "cuda", "configs", "tests", "deploy", "tools", "tierd"}
FILES = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "pyproject.toml"}
TEST_FOLDERS = {"unit", "contract", "property", "sim", "system", "gpu", "repo", "golden", "engines"}
EMPTY_NAMES = {"Manager", "Helper", "Helpers", "Util", "Utils", "Base", "Impl", "Data", "Misc", "Common"}
FILE_BYTES = 1 << 20
BASE_INSTALL_BYTES = 140 * 10**6

pytestmark = pytest.mark.skipif(not tracked_files(), reason="not a git checkout")


def test_top_level_holds_only_what_belongs_there() -> None:
    """The top holds only the fixed folders, the fixed files and dot-files."""
    tops = {name.split("/")[0] for name in tracked_files() if not name.startswith(".")}
    assert tops <= FOLDERS | FILES


def test_tests_lie_by_kind() -> None:
    """Below tests/ are only the folders of its kinds."""
    kinds = {name.split("/")[1] for name in tracked_files() if name.startswith("tests/") and name.count("/") > 1}
    assert kinds <= TEST_FOLDERS


def test_files_that_begin_first_are_there() -> None:
    """Each of the long files that a run begins with is a test file."""
    ends = {"/".join(name.split("/")[-2:]) for name in tracked_files() if name.startswith("tests/")}
    assert set(LONGEST_FIRST) <= ends


def test_files_are_texts_of_no_machine() -> None:
    """Every tracked file is smaller than 1 MiB. All but golden ones are UTF-8, and name neither
    this checkout's path nor a package index."""
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
    """No class and no module is a Manager, Helper, Util, Base, Impl or Data of something."""
    classes = [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    stems = [piece.removesuffix(".py").replace("_", " ").title().replace(" ", "") for piece in module.name.split("/")]
    words = [re.findall(r"[A-Z][a-z]+|[A-Z]+(?![a-z])", name) for name in (*classes, *stems)]
    assert {word for name in words for word in name[-1:]} & EMPTY_NAMES == set()
    assert not any(name[:1] == ["Base"] for name in words)


def test_base_install_is_light() -> None:
    """The packages that everybody installs include no framework and no GPU library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {re.split(r"[<>=!\[; ]", requirement)[0].lower() for requirement in project["dependencies"]}
    assert base.isdisjoint(
        {"torch", "cupy", "kvikio", "transformers", "pandas", "scipy", "pyarrow", "boto3", "tensorflow"}
    )
    assert len(base) <= 16


@pytest.mark.parametrize("engine", sorted(name for name in tracked_files() if "engines/requirements/" in name))
def test_engines_run_with_all_that_tierd_needs(engine: str) -> None:
    """An engine's environment, which is installed without dependencies, has a fitting version of
    each package that tierd requires."""
    lines = [line for line in (ROOT / engine).read_text(encoding="utf-8").splitlines() if "==" in line]
    pinned = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for needed in map(Requirement, project["dependencies"]):
        version = pinned.get(needed.name.lower().replace("_", "-"))
        assert version is not None, f"{engine} lacks {needed.name}"
        assert needed.specifier.contains(version, prereleases=True), f"{engine}: {needed.name} {version}"


def test_base_install_is_small() -> None:
    """The base install, with all its dependencies, takes less than 140 MB on disk."""
    todo, sizes = ["tierd"], dict[str, int]()
    while todo:
        name = todo.pop()
        if name not in sizes:
            needs = [Requirement(text) for text in importlib.metadata.requires(name) or []]
            todo += [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
            files = (file.locate() for file in importlib.metadata.files(name) or [])
            sizes[name] = sum(path.stat().st_size for path in files if path.is_file())
    heaviest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < BASE_INSTALL_BYTES, heaviest


def test_versions_agree() -> None:
    """The version in pyproject.toml equals the package's and the newest heading of the change log."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading
    assert heading[1] == version == tierd.__version__
