"""Reports faults of prose that a program can count: long sentences, long lines, hidden actors.

`python -m tests.repo.prose FILE ...` lists them. Prose is: docstrings and comments of Python files,
and the paragraphs of Markdown files. Code, tables, links and headings are not.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

WORDS, COLUMNS = 25, 100
"""Of a sentence at most; of a line of prose at most."""
OPENINGS = ("what", "who", "whoever", "whatever", "where", "wherever")
"""A sentence that begins so hides its actor. A question may."""
_END = re.compile(r"(?<=[.!?:;])[\"')\]*_`]*\s+(?=[\"'(\[*_`]*[A-Z0-9`*])")
_CODE = re.compile(r"``?[^`]+``?|\$[^$]+\$")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Finding(NamedTuple):
    """line: its number in the file; fault: the broken rule; text: the words."""

    line: int
    fault: str
    text: str


def findings(path: Path) -> list[Finding]:
    """The faults in the prose of a file, by line."""
    text = path.read_text(encoding="utf-8")
    parts = _of_markdown(text) if path.suffix == ".md" else _of_python(text)
    return sorted(finding for line, part in parts for finding in _of_part(line, part))


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        for doc in getattr(node, "body", []) if hasattr(node, "body") and isinstance(node.body, list) else []:
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str):
                yield doc.lineno, doc.value.value
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(r"#!|# (noqa|type:|mypy:|ruff:|fmt:)", token.string):
            continue
        words = re.sub(r"\s*# (noqa|type: ignore).*", "", token.string.lstrip("# "))
        if comments and comments[-1][0] + comments[-1][1].count("\n") + 1 == token.start[0]:
            comments[-1] = (comments[-1][0], f"{comments[-1][1]}\n{words}")
        else:
            comments.append((token.start[0], words))
    yield from comments


def _of_markdown(text: str) -> Iterator[tuple[int, str]]:
    fenced, begun, lines = False, 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        is_fence = line.lstrip().startswith(("```", "~~~"))
        is_prose = not (fenced or is_fence or re.match(r"\s*(\||#|<|!\[|---|\[[^\]]+\]:)", line)) and bool(line.strip())
        if lines and (not is_prose or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield begun, "\n".join(lines)
            lines = []
        if is_prose:
            begun = begun if lines else number
            lines.append(line)
        fenced ^= is_fence


def _of_part(first: int, part: str) -> Iterator[Finding]:
    for number, line in enumerate(part.split("\n")):
        if len(line) > COLUMNS and " " in line.strip()[:COLUMNS] and not line.lstrip().startswith("|"):
            yield Finding(first + number, f"{len(line)} columns, {COLUMNS} at most", line.strip()[:60])
    for number, paragraph in _paragraphs(part):
        plain = _LINK.sub(r"\1", _CODE.sub("x", paragraph))
        for sentence in _END.split(" ".join(plain.split())):
            words = re.findall(r"[^\W_][\w'.,/%-]*", sentence)
            if len(words) > WORDS:
                yield Finding(first + number, f"{len(words)} words, {WORDS} at most", sentence[:100])
            if words and words[0].lower() in OPENINGS and not sentence.rstrip("\"')*_`").endswith("?"):
                yield Finding(first + number, f"begins with {words[0]!r}: name the actor", sentence[:100])


def _paragraphs(part: str) -> Iterator[tuple[int, str]]:
    begun, lines = 0, list[str]()
    for number, line in enumerate([*part.split("\n"), ""]):
        is_drawn = re.search(r"[─│┌┐└┘▶▼▲═╞╡]|^\s{4,}\S.*\s{2,}\S|->|^\s*\|", line) is not None
        if lines and (not line.strip() or is_drawn or re.match(r"\s*([-*]|\d+\.) |\s*\w+: ", line)):
            yield begun, "\n".join(lines)
            lines = []
        if line.strip() and not is_drawn:
            begun = begun if lines else number
            lines.append(line)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for found in findings(Path(name)):
            print(f"{name}:{found.line}: {found.fault}: {found.text}")
