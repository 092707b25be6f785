"""The whole `tierd demo`, with a model small enough for a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tierd.cli import coded_demo, demo
from tierd.cli.daemon import cli
from tierd.worker.engine import Engine
from tierd.worker.report import Report, Request


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model that computes 800 tokens almost at once."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16}
    monkeypatch.setattr(demo, "RANDOM", replace(demo.RANDOM, **sizes, max_positions=1024))


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The root directories of the demo's daemons."""
    found: list[Path] = []

    class Noted(demo.Daemon):
        def start(self, *, wait: bool = True) -> demo.Daemon:
            found.append(self.root)
            return super().start(wait=wait)

    for module in (demo, coded_demo):
        monkeypatch.setattr(module, "Daemon", Noted)
    return found


def test_the_demo_serves_from_every_place_and_ends_well(roots: list[Path]) -> None:
    """The table's tier serves each turn of the demo with equal tokens; it exits with 0 and cleans up."""
    result = CliRunner().invoke(cli, ["demo"])
    assert result.exit_code == 0, result.output
    assert len([line for line in result.stdout.splitlines() if line.endswith("  yes")]) == len(demo.SCENES)
    assert "all 80 generated tokens" in result.stdout
    assert len(roots) == 2  # before and after kill -9
    assert not any(root.exists() for root in roots)


def test_the_demo_ends_loudly_when_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a turn's tokens differ from those without a cache, the demo names the turn and exits with 1."""
    run = demo.Stage._run

    def other(stage: demo.Stage, engine: Engine, prompt: tuple[int, ...]) -> Report:
        report = run(stage, engine, prompt)
        return replace(report, tokens=[*report.tokens[:-1], 0]) if report.reused_tokens else report

    monkeypatch.setattr(demo.Stage, "_run", other)
    monkeypatch.setattr(demo, "SCENES", demo.SCENES[:2])
    result = CliRunner().invoke(cli, ["demo"])
    assert result.exit_code == 1
    assert "FAILED: device:" in result.stdout
    assert "all 80" not in result.stdout


def test_both_engines_are_warm_before_anything_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first turn each engine computes an unrelated long prompt, so the cold row is comparable."""
    generate, lengths = Engine.generate, dict[int, list[int]]()

    def noted(engine: Engine, requests: Sequence[Request]) -> list[Report]:
        lengths.setdefault(id(engine), []).extend(len(request.tokens) for request in requests)
        return generate(engine, requests)

    monkeypatch.setattr(Engine, "generate", noted)
    monkeypatch.setattr(demo, "SCENES", demo.SCENES[:1])
    result = CliRunner().invoke(cli, ["demo"])
    assert result.exit_code == 0, result.output
    assert [len(prompts) for prompts in lengths.values()] == [2, 2]
    assert all(warm > 200 for warm, _ in lengths.values())


def test_the_demo_with_a_codec(roots: list[Path]) -> None:
    """Every turn after the first is served encoded blocks, at half of the bytes; it exits with 0."""
    result = CliRunner().invoke(cli, ["demo", "--codec", "int8"])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if " of 16 " in line]
    assert [row.startswith(scene.source) for row, scene in zip(rows, coded_demo.CODED_SCENES, strict=True)] == [
        True
    ] * 4
    assert rows[0].endswith("-") and all("%)" in row or "%" in row.split()[-1] for row in rows[1:])
    assert "codec int8: 5" in result.stdout and "perplexity of 96 tokens" in result.stdout
    assert roots and not any(root.exists() for root in roots)


@pytest.mark.parametrize(("name", "words"), [("rot-5-5", "is unknown"), ("kvquant-4", "needs a calibration")])
def test_the_demo_refuses_a_codec_before_a_daemon_starts(roots: list[Path], name: str, words: str) -> None:
    """A codec that is unknown or needs a calibration ends the demo at once, with the codecs to use."""
    result = CliRunner().invoke(cli, ["demo", "--codec", name])
    assert result.exit_code != 0 and not roots
    assert words in str(result.exception) + result.output and "lossless" in str(result.exception) + result.output


def test_the_demo_refuses_a_codec_that_does_not_fit() -> None:
    """A codec for other shapes ends the demo with its error, before a turn."""
    result = CliRunner().invoke(cli, ["demo", "--codec", "rot-4-4"])
    assert result.exit_code != 0
    assert "head_dim 16" in result.output + str(result.exception)
