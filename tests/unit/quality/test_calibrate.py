"""`tierctl calibrate` as a user or a script runs it."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from tierd.cli.ctl import cli
from tierd.codecs.calibration import load


def calibrated(folder: Path, text: Path, *arguments: str) -> Result:
    words = ["calibrate", str(folder), str(text), *arguments]
    return CliRunner().invoke(cli, words, prog_name="tierctl")


def test_a_calibration_is_of_its_model(folder: Path, text: Path, tmp_path: Path) -> None:
    """The file loads, is of the model's geometry, and JSON names its hash and the tokens used."""
    out = tmp_path / "made"
    result = calibrated(folder, text, "--out", str(out), "--tokens", "1500", "--between-windows", "0", "--json")
    assert result.exit_code == 0, result.output
    made = load(out)
    assert (made.geometry.layers, made.geometry.kv_heads, made.geometry.head_dim) == (2, 2, 64)
    report = json.loads(result.stdout)
    assert report == {
        "file": str(out),
        "hash": made.hash.hex(),
        "tokens": 2048,
        "bytes": out.stat().st_size,
        "has_gradients": report["has_gradients"],
    }


def test_a_measurement_needs_text_that_calibration_leaves(folder: Path, text: Path, tmp_path: Path) -> None:
    """A text with no window of free tokens between 4 to measure on is refused, with the way out."""
    result = calibrated(folder, text, "--out", str(tmp_path / "made"), "--between-windows", "4")
    assert result.exit_code == 2 and "--between-windows 0" in result.stderr
    assert not (tmp_path / "made").exists()


def test_a_missing_folder_is_found_first(folder: Path, text: Path, tmp_path: Path) -> None:
    """A directory that does not exist is refused before the model runs."""
    result = calibrated(folder, text, "--out", str(tmp_path / "no" / "made"))
    assert result.exit_code == 2 and f"--out: the directory {tmp_path}/no does not exist" in result.stderr
