"""`tierctl quality` and `tierctl codecs` as a user or a script runs them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from tierd.cli import ask
from tierd.cli.ctl import cli
from tierd.cli.quality import codecs_of
from tierd.codecs.layered import COARSE
from tierd.codecs.named import ALL, BY_NAME
from tierd.quality.identity import IDENTITY

KEYS = {
    *(
        "codec",
        "tokens",
        "bits",
        "ratio",
        "restore_tok",
        "restore_tok_se",
        "restore_kl",
        "restore_kl_se",
        "restore_top1",
    ),
    *("recall_tok", "recall_tok_se", "recall_kl", "recall_kl_se", "recall_top1", "encode_gbps", "decode_gbps"),
}


@pytest.fixture
def run(folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function: `run("--codec", "int8")` measures two windows of the small model."""
    monkeypatch.setattr("tierd.quality.speed.LEAST_S", 1e-9)

    def measured(*arguments: str, jobs: int = 1) -> Result:
        words = ["quality", "--model", str(folder), "--text", str(text), "--windows", "2", "--jobs", str(jobs)]
        return CliRunner().invoke(cli, [*words, *arguments], prog_name="tierctl")

    return measured


def answer(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_codecs_that_are_measured_alone() -> None:
    """Beside the codecs that stores take, identity and the coarse part of layered-2 have names."""
    assert [codec.name for codec in codecs_of("identity,layered-2-coarse,int8")] == [IDENTITY.name, COARSE.name, "int8"]
    assert {IDENTITY.name, COARSE.name}.isdisjoint(BY_NAME)


def figures(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows without speeds, which differ from run to run."""
    return [{key: row[key] for key in row if not key.endswith("gbps")} for row in report["rows"]]


def test_json_has_a_row_for_each_codec(run: Any, folder: Path, text: Path) -> None:
    """The report names its source and has fixed keys; rows come in the order asked, each codec once."""
    report = answer(run("--codec", "int8,identity,int8", "--block-tokens", "100", "--json"))
    rest = {key: report[key] for key in ("model", "text", "windows", "block_tokens", "calibration")}
    assert rest == {
        "model": str(folder),
        "text": str(text),
        "windows": 2,
        "block_tokens": 100,
        "calibration": None,
    }
    assert set(report) == {*rest, "copy_gbps", "exact", "rows"}
    assert set(report["exact"]) == {"restore_nll", "restore_top1", "recall_nll", "recall_top1"}
    assert [(row["codec"], set(row)) for row in report["rows"]] == [("int8", KEYS), ("identity", KEYS)]
    same = report["rows"][1]
    assert (same["restore_tok"], same["restore_kl"], same["recall_kl"], same["restore_top1"]) == (0, 0, 0, 1)
    assert same["bits"] == 16 + 8 * 64 * 8 / (768 * 2 * 2 * 2 * 64)


def test_any_number_of_processes_gives_the_same_figures(run: Any) -> None:
    """Two processes and one give equal rows, speeds apart."""
    reports = [answer(run("--codec", "int3", "--json", jobs=jobs)) for jobs in (1, 2)]
    assert figures(reports[0]) == figures(reports[1])


def test_the_table_has_the_same_figures(run: Any) -> None:
    """In a pipe the table is whole: each row with its bits, below it a line about exact KV."""
    lines = run("--codec", "int8,int3").stdout.splitlines()
    assert re.split(r"\s{2,}", lines[0])[:4] == ["codec", "bits", "ratio", "restore tok"]
    assert [line.split()[0] for line in lines[1:3]] == ["int8", "int3"]
    assert [float(line.split()[1]) for line in lines[1:3]] == [
        pytest.approx(8.07, abs=0.02),
        pytest.approx(3.25, abs=0.02),
    ]
    assert lines[3].startswith("exact: restore ") and lines[3].endswith("windows 2")


def test_policies_have_rows_of_their_own(run: Any) -> None:
    """Below each codec's row stands one for each policy; the table then has a column of policies."""
    lines = run("--codec", "identity", "--tokens", "streaming:96,h2o:0.25", "--windows", "1").stdout.splitlines()
    words = [line.split() for line in lines[:4]]
    assert [row[:2] for row in words] == [
        ["codec", "tokens"],
        *(["identity", p] for p in ("all", "streaming:96", "h2o:0.25")),
    ]
    assert [float(row[2]) for row in words[1:]] == pytest.approx([16.004, 2.0, 4.001])


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_a_terminal(run: Any, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 and 120 columns the table keeps what a codec is judged by, and no line is cut."""
    monkeypatch.setattr(ask, "new_console", lambda **_: Console(force_terminal=True, width=width, color_system=None))
    lines = run("--codec", "rot-4-4,int8").stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert {"codec", "bits", "restore tok", "recall tok", "recall top-1"} <= set(re.split(r"\s{2,}", lines[0].strip()))


def test_a_picture_has_both_panels(run: Any, tmp_path: Path) -> None:
    """--plot writes an SVG in which each codec is named in each panel."""
    pytest.importorskip("matplotlib")
    result = run("--codec", "identity,int3", "--plot", str(tmp_path / "plot.svg"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plot.svg").read_text().count("<!-- int3 -->") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--codec", "int9"], "codec: 'int9' is unknown; use one of int8"),
        (["--codec", ""], "codec: '' is unknown"),
        (["--codec", "int8", "--tokens", "h3o:0.2"], "'h3o' is unknown; choose from h2o"),
        (["--codec", "int8", "--tokens", "h2o"], "--tokens: 'h2o' has no share or number of tokens; write h2o:0.2"),
        (["--codec", "int8", "--tokens", "h2o:1.5"], "1.5 is outside (0, 1]"),
        (["--codec", "int8", "--windows", "5"], "windows: 5 of 1024 tokens do not fit a text of 5000; ask for 1 to 4"),
        (["--codec", "int8", "--block-tokens", "769"], "block tokens: 769 is outside 1 to 768"),
        (["--codec", "int8", "--text", "{tmp}/short"], "text: it has 5 tokens, a window has 1024"),
        (["--codec", "int8", "--model", "{tmp}"], "config.json"),
        (["--codec", "int8", "--calibration", "{tmp}/short"], "no calibration of tierd"),
        (["--codec", "int8", "--plot", "{tmp}/x.gif"], "--plot: {tmp}/x.gif does not end in .png or .svg"),
        (["--codec", "int8", "--plot", "{tmp}/no/x.png"], "the directory {tmp}/no does not exist"),
    ],
)
def test_impossible_measurements_are_refused(run: Any, tmp_path: Path, words: list[str], said: str) -> None:
    """Each fault ends in one line that names it, before anything is measured."""
    (tmp_path / "short").write_text("short")
    result = run(*(word.format(tmp=tmp_path) for word in words))
    assert result.exit_code in {1, 2} and result.stdout == ""
    assert said.format(tmp=tmp_path) in result.stderr and result.stderr.count("\n") == 1


def test_a_picture_needs_matplotlib(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib --plot is refused at once, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--codec", "int8", "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 1 and "pip install 'tierd[plot]'" in result.stderr


def test_codecs_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs stand in the JSON and in the table in their list's order, a calibrated one with dashes."""

    class Calibrated:
        name, number, is_exact, is_calibrated = "learnt", 99, False, True

    monkeypatch.setattr("tierd.quality.speed.LEAST_S", 1e-9)
    monkeypatch.setattr("tierd.cli.codecs.ALL", (ALL[0], Calibrated()))
    rows = answer(CliRunner().invoke(cli, ["codecs", "--json"]))["codecs"]
    keys = ["codec", "number", "is_exact", "is_calibrated", "loops", "bits", "error", "encode_gbps", "decode_gbps"]
    assert [list(row) for row in rows] == [keys, keys]
    lines = [line.split() for line in CliRunner().invoke(cli, ["codecs"]).stdout.splitlines()]
    assert [line[:2] for line in lines] == [["codec", "number"], ["int8", "1"], ["learnt", "99"]]
    assert lines[2][2:] == ["-", "-", "needed", lines[2][5], "-", "-"]


def test_a_calibration_that_is_not_there_is_refused(run: Any, tmp_path: Path) -> None:
    """A missing file is named before anything is measured."""
    result = run("--codec", "kvquant-4", "--calibration", str(tmp_path / "none"))
    assert result.exit_code == 2 and "does not exist" in result.output
