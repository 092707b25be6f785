"""The pages of deploy/docs and all READMEs: links, generated pages, commands, settings, TOML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.repo.source import ROOT, tracked_files
from tests.repo.test_generated import tool
from tests.repo.test_named import SETTINGS, TREES, messages
from tierd.config import read_config

DOCS = ROOT / "deploy" / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted(DOCS.rglob("*.md"))
MARKDOWN = [ROOT / name for name in tracked_files() if name.endswith(".md")]
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)")
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VERB = re.compile(r"\b(tierctl) ([a-z][a-z-]+)\b|(?:^|[`(|;&!]|\buntil|bin/)\s*(tierd) ([a-z][a-z-]+)\b", re.MULTILINE)
"""`tierd` is also a word of sentences, users and paths: it counts only at the start of a command."""
SETTING = re.compile(rf"`({'|'.join(SETTINGS)})(?:\[\d*\])?\.([a-z_]+)`")
TERMS = 40

pytestmark = pytest.mark.skipif(not MARKDOWN, reason="not a git checkout")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that a code host makes from headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


def faults_of(path: Path, text: str) -> Iterator[str]:
    """Broken relative links of a Markdown file."""
    for link in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        is_missing = not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))
        if is_missing:
            yield link


@pytest.mark.parametrize("path", sorted({*MARKDOWN, *PAGES}), ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link names a file or folder that exists, and its anchor a heading there."""
    assert list(faults_of(path, path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("[a](no/such.md)", ["no/such.md"]),
        ("[a](#what-is-this)", ["#what-is-this"]),
        ("[a](index.md#no-heading)", ["index.md#no-heading"]),
        ("[a](index.md#how-to), [b](https://example.org/x), `[c](d)`, [e](../../README.md)", []),
    ],
)
def test_each_broken_link_is_found(text: str, faults: list[str]) -> None:
    """The check reports a missing file and a missing heading, and no link that works."""
    assert list(faults_of(DOCS / "index.md", text)) == faults


def test_every_page_is_on_the_map() -> None:
    """The index links to each page."""
    linked = {
        (DOCS / link).resolve()
        for link in LINK.findall((DOCS / "index.md").read_text(encoding="utf-8"))
        if ":" not in link
    }
    assert [name_of(page) for page in PAGES if page != DOCS / "index.md" and page not in linked] == []


def test_reference_is_generated() -> None:
    """The pages in reference/ are those that tools/gen_docs.py writes today, and no others."""
    kept = {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.iterdir()}
    assert kept == tool("gen_docs").render(), "run: make docs"


@pytest.mark.parametrize("path", sorted({*MARKDOWN, *PAGES}), ids=name_of)
def test_verbs_in_documents_exist(path: Path) -> None:
    """A word after `tierctl` or `tierd` in a page's code, fenced or in backticks, is a verb of it."""
    code = "\n".join(CODE.findall(path.read_text(encoding="utf-8")))
    assert unknown_verbs(code) == []


def test_verbs_in_messages_exist() -> None:
    """A word after `tierctl` in any message of the package, quoted or not, is a verb of it."""
    unknown = [f"{where}: {fault}" for where, text in messages() for fault in unknown_verbs(text)]
    assert [line for line in unknown if "tierctl" in line] == []


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`tierctl cure`", ["tierctl cure"]),
        ("```sh\nuntil tierctl cure; do tierd server; done\ntierd starve &\n```", ["tierctl cure", "tierd starve"]),
        ("`tierctl status`, `tierd serve`, `install -g tierd file`", []),
    ],
)
def test_each_unknown_verb_is_found(text: str, unknown: list[str]) -> None:
    """The check reports verbs that do not exist, in backticks and in fences, and none that do."""
    assert unknown_verbs("\n".join(CODE.findall(text))) == unknown


def unknown_verbs(text: str) -> list[str]:
    found = [(first or third, second or fourth) for first, second, third, fourth in VERB.findall(text)]
    return [f"{program} {word}" for program, word in found if word not in verbs(program)]


@cache
def verbs(program: str) -> frozenset[str]:
    group = TREES[program]
    return frozenset(group.list_commands(None))  # type: ignore[attr-defined,arg-type]  # neither looks at the context


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_in_backticks_exist(page: Path) -> None:
    """`section.key` in backticks is a setting."""
    named = SETTING.findall(page.read_text(encoding="utf-8"))
    assert [f"{section}.{key}" for section, key in named if key not in SETTINGS[section]] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_configurations_are_valid(page: Path) -> None:
    """Every TOML block of the pages is a configuration that tierd reads."""
    for text in TOML.findall(page.read_text(encoding="utf-8")):
        read_config(text)


def test_glossary_is_short() -> None:
    """The glossary has at most 40 terms, in order."""
    text = (DOCS / "explanation" / "how-it-works.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| ([^|]+) \|", text[text.index("## Glossary") :], re.MULTILINE)[1:]
    assert terms == sorted(terms) and len(terms) <= TERMS
