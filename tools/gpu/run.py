"""A run of `make gpu`: its parts in turn, files of the results so far, and the exit status."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tierd.kernels.loaded import FATBINS
from tools import fatbins
from tools.gpu import machine, report
from tools.gpu.bench import ROOT
from tools.gpu.forecasts import FORECASTS, verdict
from tools.gpu.parts import PARTS, TOTAL_S, Part, results_of
from tools.gpu.results import Left, Result, as_object

RESULTS = ROOT / "cuda" / "RESULTS.md"
BAD = ("failed", "missed")


class Run:
    """The results so far, kept in files."""

    def __init__(self, told: dict[str, object], folder: Path, *, is_small: bool, is_whole: bool) -> None:
        self.told, self.is_small, self.results = told, is_small, dict[str, Result]()
        self._json = folder / "gpu.json"
        self._text = RESULTS if is_whole and folder == ROOT / "build" else folder / "RESULTS.md"
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, result: Result) -> None:
        """Prints the result, and keeps it."""
        self.results[result.name] = result
        print(self._line(result), flush=True)
        self.write()

    def write(self) -> None:
        """Writes all results."""
        objects = [
            as_object(result) | {"predicted": _predicted(name), "verdict": self._verdict(result)}
            for name, result in self.results.items()
        ]
        whole = {"machine": self.told, "is_small": self.is_small, "results": objects}
        _replace(self._json, json.dumps(whole, indent=1) + "\n")

    def end(self) -> int:
        """Writes the report; returns the exit status."""
        _replace(self._text, report.text(self.told, self.results, is_judged=not self.is_small))
        bad = [result for result in self.results.values() if self._verdict(result) in BAD]
        for result in bad:
            print(f"{self._verdict(result)}: {self._line(result)}", file=sys.stderr)
        left = sum(isinstance(result, Left) for result in self.results.values())
        print(
            f"{len(self.results) - left} results, {len(bad)} failed or missed, {left} left out; {self._text}, {self._json}"
        )
        return 1 if bad else 0

    def _verdict(self, result: Result) -> str:
        return verdict(result, is_judged=not self.is_small)

    def _line(self, result: Result) -> str:
        value, limit, ratio = report.came(result)
        forecast = FORECASTS.get(result.name)
        more = [f"limit {limit}, ratio {ratio}"] if limit else []
        more += [f"predicted {report.predicted(forecast)}"] if forecast else []
        return f"{result.name:28} {'; '.join([value, *more])}  {self._verdict(result)}".rstrip()


def _predicted(name: str) -> float | str | None:
    return FORECASTS[name].predicted if name in FORECASTS else None


def _replace(path: Path, text: str) -> None:
    """Atomically: a reader sees the former file or the new one."""
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


def run_parts(run: Run, parts: Sequence[Part], folder: Path) -> None:
    """One after another, each with a share of the remaining time."""
    until = time.monotonic() + TOTAL_S
    for part in parts:
        left = until - time.monotonic()
        print(f"-- {part.name}: at most {min(part.bound_s, left):.0f} s", flush=True)
        if left > 1:
            bound = min(part.bound_s, left)
            for result in results_of(part, fatbins=folder, is_small=run.is_small, bound_s=bound):
                run.take(result)
        for name, forecast in FORECASTS.items():
            if forecast.part == part.name and name not in run.results:
                run.take(Left(name, "not reached"))


def built(folder: Path, architecture: str) -> Path:
    """The fatbins. If there are none, nvcc compiles them for this GPU alone. Raises Missing."""
    if any(folder.glob("*.fatbin")):
        return folder
    if fatbins.find_nvcc() is None:
        raise machine.Missing(f"no fatbins in {folder}; build them with `python -m tools.fatbins`, which takes nvcc")
    for line in fatbins.build(folder, [int(architecture.removeprefix("sm_"))]):
        print(line, flush=True)
    return folder


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="make gpu", description="Checks and measures the kernels on this machine's GPU."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--small", action="store_true", help="tiny sizes, of which no figure says anything")
    parser.add_argument("--waiting", action="store_true", help="writes cuda/RESULTS.md before any run")
    parser.add_argument("--fatbins", type=Path, default=FATBINS, help="a folder of them")
    parser.add_argument("--into", type=Path, default=ROOT / "build", help="the folder of gpu.json")
    given = parser.parse_args()
    if unknown := set(given.parts) - {part.name for part in PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    if given.waiting:
        _replace(RESULTS, report.waiting())
        return 0
    try:
        told = machine.asked()
        folder = built(given.fatbins, str(told["architecture"]))
    except (machine.Missing, fatbins.NvccError) as error:
        print(f"make gpu: {error}; nothing was checked", file=sys.stderr)
        return 1
    print(", ".join(f"{name} {value}" for name, value in told.items()), flush=True)
    run = Run(told, given.into, is_small=given.small, is_whole=not (given.parts or given.small))
    run_parts(run, [part for part in PARTS if not given.parts or part.name in given.parts], folder)
    return run.end()
