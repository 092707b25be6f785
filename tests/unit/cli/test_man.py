"""Manual pages: one for each command, with all of its help, in markup that troff accepts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.unit.cli.test_help import EVERY, PROGRAMS, helped
from tierd.cli.man import _text, pages

PAGES = pages()


def shown(page: Path) -> str:
    """A page as a terminal of 80 columns shows it, by `groff -man`, without markup of bold text."""
    if not shutil.which("groff"):
        pytest.skip("groff is not installed (Debian: groff)")
    command = ["groff", "-man", "-ww", "-Tutf8", "-Kutf8", "-P-cbou", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_every_command_has_a_page() -> None:
    """There is one page for each program and each of its commands, and none besides."""
    assert PAGES.keys() == {f"{'-'.join(words)}.1" for words in [("tierd",), ("tierctl",), *EVERY]}


@pytest.mark.parametrize("words", [("tierd",), ("tierctl",), *EVERY], ids=" ".join)
def test_a_page_says_what_the_help_says(words: tuple[str, ...]) -> None:
    """A page has each word of the command's help: its sentences, options, defaults and examples."""
    page = re.sub(r"\\f[BR]|\\&", "", PAGES[f"{'-'.join(words)}.1"])
    for mark, letter in (("\\-", "-"), ("\\(ga", "`"), ("\\(aq", "'"), ("\\(ha", "^"), ("\\(ti", "~"), ("\\e", "\\")):
        page = page.replace(mark, letter)
    wanted = re.sub(r"^(Usage|\w[\w ]*):|`", "", helped(words, columns=4000), flags=re.MULTILINE)
    said = {*re.findall(r"[^\s`]+", page), *re.findall(r"[^\s`(-]+", page)}  # a group's page names tierd-config(1)
    assert "-h, --help" in page  # click keeps a command's help option, even a wrong one
    assert set(re.findall(r"\S+", wanted)) - {"Example:", "Examples:"} <= said


def test_pages_are_written_and_shown(tmp_path: Path) -> None:
    """`tierd man DIR` writes the pages; groff shows them all without a warning, examples line by line."""
    ran = CliRunner().invoke(PROGRAMS["tierd"], ["man", str(tmp_path / "man1")])
    assert ran.exit_code == 0, ran.output
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "man1").iterdir()} == PAGES
    (whole := tmp_path / "whole").write_text("".join(PAGES.values()), encoding="utf-8")
    shown(whole)
    lines = shown(tmp_path / "man1" / "tierd-serve.1").splitlines()
    assert "       tierd serve --memory 64GiB --disk /mnt/nvme0:1TiB --disk /mnt/nvme1:1TiB" in lines


def test_letters_of_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    """A help text may have a line that starts with a full stop, backslashes, hyphens and quotes."""
    odd = click.Command("odd", help=".TH is no request; 'a' \\n --x ~^ `bold -b`.\n\n\b\n.EE\n'quoted'")
    (page := tmp_path / "odd.1").write_text('.TH ODD 1 "" "" ""\n' + "\n".join(_text(odd.help)), encoding="utf-8")
    body = [line.strip() for line in shown(page).splitlines()[1:] if line.strip()]
    assert body[:3] == [".TH is no request; 'a' \\n --x ~^ bold -b.", ".EE", "'quoted'"]
