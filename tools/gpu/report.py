"""cuda/RESULTS.md: every row's forecast and result; without a run, rows that wait for a GPU.

Invariants: only this module writes it. Without a run its only figures are predictions and promises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tools.gpu.forecasts import FORECASTS, Forecast, verdict
from tools.gpu.parts import PARTS
from tools.gpu.results import Check, Fact, Left, Result, Row

TITLE = "# What a GPU says\n\nMade by `make gpu`; never written by hand. Predictions stand in `tools/gpu/forecasts.py`, written down before any run.\n"
WAITING = "\nNothing here has run on a GPU yet: every row waits for `make gpu` on a machine that has one. A prediction of a row with a limit is of the ratio to it. What the compiler says needs no GPU: no kernel of decode, prefill or sums of slices spills a register on sm_80, 89, 90, 100 or 120 (`python -m tools.kernels registers`).\n"
HEADINGS = {
    "register": "Registering host memory",
    "deaths": "Killed clients",
    "bounds": "Launch bounds",
    "decodes": "Decode is right",
    "prefills": "Prefill and merge are right",
    "pages": "What moves pages is right",
    "decode": "Decode against bandwidth",
    "kernels": "Other kernels",
    "graphs": "CUDA graphs",
    "link": "Copies between host and GPU",
    "process": "The GPU process",
    "sharing": "Several processes and one slab",
    "direct": "From a disk to a slab",
    "rotated": "Pages of rotated codes",
    "sparse": "Sparse decode over tiers",
    "endtoend": "A daemon, a worker and a model",
    "rivals": "Others' kernels",
    "sanitizers": "Under compute-sanitizer",
}


def waiting() -> str:
    """The report before any run."""
    return TITLE + WAITING + "".join(_tables({}, is_judged=False))


def text(machine: Mapping[str, object], results: Mapping[str, Result], *, is_judged: bool) -> str:
    """The report of a run. machine: its properties, by name. is_judged: whether promises cover the
    sizes."""
    told = "".join(f"\n- {name}: {value}" for name, value in machine.items())
    unforeseen = [result for name, result in results.items() if name not in FORECASTS]
    wrong = "".join(f"\n- **{result.name}**: {result.said}" for result in unforeseen if not isinstance(result, Row))
    small = "" if is_judged else "\n\nSizes were tiny: no figure says anything, and no promise is judged."
    return (
        TITLE + told + small + ("\n" + wrong if wrong else "") + "\n" + "".join(_tables(results, is_judged=is_judged))
    )


def _tables(results: Mapping[str, Result], *, is_judged: bool) -> Iterator[str]:
    for part in PARTS:
        yield f"\n## {HEADINGS[part.name]}\n\n"
        yield "| row | what it is | promised | predicted | came | limit | ratio | |\n|---|---|---|---|---|---|---|---|\n"
        for forecast in FORECASTS.values():
            if forecast.part == part.name:
                cells = _cells(forecast, results.get(forecast.name), is_judged=is_judged)
                yield "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |\n"


def _cells(forecast: Forecast, result: Result | None, *, is_judged: bool) -> list[str]:
    return [
        f"`{forecast.name}`",
        forecast.meaning,
        promised(forecast),
        predicted(forecast),
        *came(result),
        "waiting" if result is None else verdict(result, is_judged=is_judged),
    ]


def promised(forecast: Forecast) -> str:
    """In words."""
    if forecast.at_least is not None:
        return f"at least {forecast.at_least:g}"
    return "" if forecast.at_most is None else f"at most {forecast.at_most:g}"


def predicted(forecast: Forecast) -> str:
    """In words."""
    return forecast.predicted if isinstance(forecast.predicted, str) else f"{forecast.predicted:g}"


def came(result: Result | None) -> list[str]:
    """Value, limit and ratio."""
    if isinstance(result, Row):
        value = f"{result.value:.4g} {result.unit}" + (f" ({result.note})" if result.note else "")
        if result.limit is None or result.ratio is None:
            return [value, "", ""]
        return [value, f"{result.limit:.4g}", f"{result.ratio:.3f}"]
    said = {Check: "", Fact: "", Left: "left out: "}.get(type(result))
    return ["" if result is None or said is None else said + result.said, "", ""]
