"""`make gpu` on the fake driver, with emulated kernels, from the first probe to the results' text.
Also its reports when a check fails."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.depth import report as figures
from tests.repo.source import ROOT
from tests.unit.gpu_checks.broken_parts import HANGS_S
from tests.unit.kernels.fake_driver import fake_environment, on_fake_driver
from tierd.errors import TierFailed
from tierd.kernels.pages import KvPages, store_tokens
from tools.fake_cuda import build_fatbins
from tools.gpu import deaths, decode, decodes, forecasts, pages, prefills, report, shapes, sharing
from tools.gpu.__main__ import NEEDED
from tools.gpu.bench import Bench, end
from tools.gpu.device import Gpu
from tools.gpu.forecasts import FORECASTS, verdict
from tools.gpu.parts import PARTS, TOTAL_S, Part, results_of
from tools.gpu.results import Check, Fact, Left, Result, Row, line_of, result_of, row_of

LIMIT_S = 110
BOUND_S = 8
"""Bound of a part that hangs: many times the time that it takes to start."""
NEEDS_SANITIZER = {name for name, forecast in FORECASTS.items() if forecast.part == "sanitizers"}
NEEDS_RIVALS = {name for name, forecast in FORECASTS.items() if forecast.part == "rivals"}
NEEDS_DAEMON = {name for name, forecast in FORECASTS.items() if forecast.part == "endtoend"}
NO_DRIVER = Path("/proc/driver/nvidia")
NOT_NEEDED = (
    "aiofiles",
    "click",
    "grpc",
    "hypothesis",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pytest",
    "rich",
    "safetensors",
    "structlog",
    "zmq",
)
"""Modules that the rest of the project needs: a machine with a GPU may have none of them."""


@dataclass
class Ended:
    """A run of `python -m tools.gpu`."""

    status: int
    said: str
    results: dict[str, dict[str, Any]]
    text: str


def run_gpu(into: Path, *arguments: str, environment: dict[str, str]) -> Ended:
    """Runs it as a user does, except for the output folder."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu", "--into", str(into), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    told, text = into / "gpu.json", into / "RESULTS.md"
    results = json.loads(told.read_text())["results"] if told.exists() else []
    said = done.stdout + done.stderr
    print(said)
    return Ended(
        done.returncode, said, {each["name"]: each for each in results}, text.read_text() if text.exists() else ""
    )


def small(into: Path, *parts: str, fatbins: Path | None = None, **environment: str) -> Ended:
    """Tiny sizes on the fake driver."""
    given = ("--small", "--fatbins", str(fatbins or build_fatbins()), *parts)
    return run_gpu(into, *given, environment=fake_environment() | environment)


def without(folder: Path, *modules: str) -> str:
    """A PYTHONPATH on which these modules cannot be imported."""
    folder.mkdir()
    for module in modules:
        (folder / f"{module}.py").write_text(f"raise ModuleNotFoundError('no module {module}')")
    return str(folder)


# -- a whole run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """All parts, with no package beyond the documented ones."""
    begun, into = time.monotonic(), tmp_path_factory.mktemp("gpu")
    ended = small(into, PYTHONPATH=without(into / "hidden", *NOT_NEEDED))
    figures("make gpu on the fake driver", seconds=round(time.monotonic() - begun, 1), results=len(ended.results))
    return ended


def test_a_small_run_is_right(whole: Ended) -> None:
    """Every check that the fake driver can run passes, and the exit status says so."""
    wrong = [each for each in whole.results.values() if each["verdict"] == "failed"]
    assert (whole.status, wrong) == (0, [])


def test_every_row_is_there_or_said_to_be_left_out(whole: Ended) -> None:
    """The results are those forecast; only rows that this machine cannot give are skipped, with a reason."""
    assert set(whole.results) == set(FORECASTS)
    left = {name: each["said"] for name, each in whole.results.items() if each["kind"] == "left"}
    assert set(left) == NEEDS_RIVALS | NEEDS_SANITIZER | NEEDS_DAEMON | {"direct_rate", "kvikio_rate"}
    assert all(reason not in ("", "not reached") for reason in left.values())


def test_the_text_of_the_results_has_every_row(whole: Ended) -> None:
    """Each line has its prediction and its value, and no promise judges tiny sizes."""
    for name, each in whole.results.items():
        line = next(line for line in whole.text.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {report.predicted(FORECASTS[name])} |" in line
        assert each["kind"] != "row" or f"| {each['value']:.4g} {each['unit']}" in line
    assert "Sizes were tiny" in whole.text
    assert "missed" not in whole.text
    assert "Fake GPU" in whole.text


def test_killed_clients_write_nothing_after_their_pidfd(whole: Ended) -> None:
    """Clients are killed while they copy into host memory and into a slab, and no byte changes afterwards."""
    for kind in ("host", "slab"):
        assert whole.results[f"{kind}_kills"]["value"] == 2
        assert whole.results[f"late_{kind}_writes"]["value"] == 0


def test_a_worker_and_a_daemon_run_end_to_end(tmp_path: Path) -> None:
    """With the daemon's packages every row is there: a prefix comes from the place that is asked for."""
    ended = small(tmp_path, "endtoend")
    assert ended.status == 0
    assert {each["kind"] for each in ended.results.values()} == {"row", "check"}
    assert ended.results.keys() == NEEDS_DAEMON


# -- faults are detected


def test_a_kernel_that_is_missing_fails_its_check_alone(tmp_path: Path) -> None:
    """Without the merge fatbin its check fails by name with exit status 1; the other checks still run."""
    folder = tmp_path / "fatbins"
    folder.mkdir()
    for path in build_fatbins().iterdir():
        if path.stem != "merge":
            (folder / path.name).symlink_to(path)
    ended = small(tmp_path, "prefills", fatbins=folder)
    assert ended.status == 1
    verdicts = {name: each["verdict"] for name, each in ended.results.items()}
    assert verdicts == {
        "prefill_types": "passed",
        "prefill_groups": "passed",
        "prefill_long": "passed",
        "prefill_odd": "passed",
        "prefill_narrow": "passed",
        "merge": "failed",
    }
    assert "failed: merge" in ended.said
    assert "merge_f32: the fatbins have no such kernel" in ended.said


def test_a_driver_that_registers_nothing_read_only_is_no_failure(tmp_path: Path) -> None:
    """The driver's answer is reported, and rows that need the feature are skipped with that answer."""
    ended = small(tmp_path, "register", TIERD_FAKE_CUDA_READ_ONLY_REGISTER="0")
    assert ended.status == 0
    assert ended.results["read_only_attribute"]["said"] == "no"
    assert "CUDA_ERROR_NOT_SUPPORTED" in ended.results["read_only_register"]["said"]
    assert ended.results["h2d_from_read_only"]["kind"] == "left"
    assert ended.results["register_writable"]["value"] > 0


@on_fake_driver()
def test_what_is_written_beside_an_array_is_seen() -> None:
    """A kernel that stores a token behind its pool is detected when the arrays are copied back."""
    library, new = Gpu(build_fatbins()).kernels, np.ones((1, 2, 64), np.float16)
    pool = np.zeros((2, 1, 16, 2, 64), np.float16)
    with pytest.raises(AssertionError, match="behind an array"), library.placed() as put:
        store_tokens(library, put(new), put(new), put(np.array([16], np.int64)), put(KvPages(pool[0], pool[1])))


@on_fake_driver()
def test_a_writer_that_goes_on_is_seen() -> None:
    """Bytes that still change after a client's pidfd has fired are detected, in host memory and a slab."""
    gpu = Gpu(with_kernels=False)
    bench = Bench(Path(), time.monotonic() + LIMIT_S, is_small=True)
    with gpu.room() as room:
        for memory in (deaths.HostSide(1 << 20), deaths.SlabSide(gpu, room, bench)):
            dies, lives = (deaths._client(memory) for _ in range(2))
            try:
                deaths._let_it_copy(lives, memory)
                deaths._let_it_copy(dies, memory)
                assert deaths._killed(dies, memory, watched_s=30.0).is_late
            finally:
                end(dies)
                end(lives)


@pytest.mark.parametrize(
    ("digests", "right", "is_right"),
    [({"a"}, "right", True), ({"b"}, "right", False), ({"a", "b"}, "right", False), ({"a"}, "wrong:_nan", False)],
)
def test_another_output_of_one_process_is_seen(digests: set[str], right: str, is_right: bool) -> None:
    """Readers that attend to the same pages must all give one output, and the first decode must be right."""
    with subprocess.Popen(["true"], text=True) as child:
        readers = [sharing.Reader(child) for _ in range(2)]
    readers[0].digests, readers[0].right = {"a"}, "right"
    readers[1].digests, readers[1].right = digests, right
    assert sharing._same("shared_same_bits", readers).passed is is_right


# -- parts that end badly


def broken(kind: str, bound_s: float, monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """The results of a part that hangs, dies or fails; the process that it started is gone."""
    monkeypatch.setenv("TIERD_BROKEN_PART", kind)
    part = Part("broken", "tests.unit.gpu_checks.broken_parts", 0)
    found = list(results_of(part, fatbins=Path(), is_small=True, bound_s=bound_s))
    assert isinstance(found[0], Fact)
    assert is_gone(int(found[0].said))
    return found[1:]


def is_gone(process: int) -> bool:
    """Waits at most 10 s for the process to end."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    return bool(ready)


@pytest.mark.slow
def test_a_part_that_hangs_is_killed_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child dies with it, its earlier results are kept, and the failure names the bound."""
    begun = time.monotonic()
    (failed,) = broken("hangs", BOUND_S, monkeypatch)
    assert failed == Check("part_broken", passed=False, said=f"not through after {BOUND_S} s, and killed")
    assert time.monotonic() - begun < HANGS_S / 10


def test_a_part_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part killed by a signal, as by a driver fault, is a failure that names the signal."""
    (failed,) = broken("dies", 60, monkeypatch)
    assert failed == Check("part_broken", passed=False, said="its process ended with -9")


def test_an_error_of_a_part_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure has the error's own class and words."""
    (failed,) = broken("fails", 60, monkeypatch)
    assert failed == Check("part_broken", passed=False, said=f"{TierFailed.__name__}: the GPU lost its context")


# -- no GPU, or a dependency is missing


@pytest.mark.parametrize("module", ["array_api_compat", "msgpack"])
def test_a_missing_package_is_named(tmp_path: Path, module: str) -> None:
    """The program names the package in one line, before it calls a driver."""
    ended = small(tmp_path, PYTHONPATH=without(tmp_path / "hidden", module))
    assert (ended.status, ended.results, ended.text) == (1, {}, "")
    package = NEEDED[module]
    told = f"make gpu: {package}: not installed; nothing was checked. Install with `pip install {package}`, or carry them there\n"
    assert ended.said == told


def test_the_packages_that_it_takes_are_told() -> None:
    """The README lists them for a user who carries them to a machine without package installs."""
    text = (ROOT / "cuda" / "README.md").read_text(encoding="utf-8")
    assert [package for package in NEEDED.values() if package not in text] == []


def test_a_driver_without_a_gpu_is_named(tmp_path: Path) -> None:
    """The program exits with status 1, writes nothing and does not take long."""
    ended = small(tmp_path, TIERD_FAKE_CUDA_DEVICES="0")
    assert (ended.status, ended.results, ended.text) == (1, {}, "")
    assert "CUDA_ERROR_NO_DEVICE" in ended.said
    assert "nothing was checked" in ended.said


@pytest.mark.skipif(NO_DRIVER.exists(), reason="there is a GPU here")
def test_a_machine_without_a_driver_is_named(tmp_path: Path) -> None:
    """The program says that the driver is missing."""
    ended = run_gpu(tmp_path, environment=dict(os.environ))
    assert (ended.status, ended.results) == (1, {})
    assert "no NVIDIA driver on this machine" in ended.said


def test_missing_fatbins_are_named(tmp_path: Path) -> None:
    """Without fatbins and nvcc, the program exits with status 1 and says that nothing was checked."""
    nothing = {"PATH": "/nowhere", "CUDA_HOME": "/nowhere", "NVCC_APPEND_FLAGS": "-DNOTHING_IS_KEPT_OF_IT"}
    ended = small(tmp_path, fatbins=tmp_path / "none", **nothing)
    assert ended.status == 1
    assert "nothing was checked" in ended.said


# -- forecasts and verdicts


def test_every_part_foretells_what_it_gives() -> None:
    """No name is forecast twice, and each belongs to a part that runs."""
    tables = (
        forecasts._probes,
        forecasts._correctness,
        forecasts._decode,
        forecasts._others,
        forecasts._link,
        forecasts._together,
        forecasts._rotated,
        forecasts._sparse,
        forecasts._end_to_end,
        forecasts._sanitizers,
    )
    assert sum(len(list(table())) for table in tables) == len(FORECASTS)
    assert {forecast.part for forecast in FORECASTS.values()} == {part.name for part in PARTS} == set(report.HEADINGS)


def test_the_parts_fit_eight_minutes() -> None:
    """The sum of all bounds fits the total."""
    assert sum(part.bound_s for part in PARTS) <= TOTAL_S < 8 * 60


def test_what_only_a_gpu_runs_can_be_made() -> None:
    """At full sizes each family has cases and its own row, and every decode's tables fit their pool."""
    for module in (decodes, prefills, pages):
        families = module._full()
        assert families.keys() == module._small().keys() <= FORECASTS.keys()
        assert all(families.values())
    for module in (decodes, prefills):
        cases = [case for _, case in module._narrow(decodes.DIMS)]
        assert {(shape.types, shape.head_dim) for shape in cases} >= {
            (types, dim) for types in decodes.TYPES for dim in decodes.DIMS
        }
    bench = Bench(Path(), until=0.0)
    sizes = decode.lengths(bench)
    assert sizes.keys() == forecasts.DECODE_SIZES.keys()
    for lengths in (*sizes.values(), [8192] * 32):
        assert shapes._tables(lengths, decode._pages(bench, decode.POOL_BYTES))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row("decode_8b_1x128k", 4000, "GB/s", 4400, 0.88), "passed"),
        (Row("decode_8b_1x128k", 4000, "GB/s", 4600, 0.8799), "missed"),
        (Row("mass_1x128k", 102, "us", 100, 1.02), "passed"),
        (Row("mass_1x128k", 103, "us", 100, 1.03), "missed"),
        (Row("late_host_writes", 0, "kills"), "passed"),
        (Row("late_host_writes", 1, "kills"), "missed"),
        (Row("graph_replay", 1e9, "us"), ""),
        (Check("merge", passed=False, said=""), "failed"),
        (Check("merge", passed=True, said=""), "passed"),
        (Left("merge", "no time was left"), ""),
    ],
)
def test_promises_are_judged(row: Result, said: str) -> None:
    """The verdict uses the ratio, else the value, limits included; rows without a promise get none."""
    assert verdict(row) == said
    assert verdict(row, is_judged=False) == (said if isinstance(row, Check) else "")


def test_the_issues_promises_are_there() -> None:
    """Decode 88 %, masses 2 %, 2 MiB pages 90 % of the link both ways, 1.05 times the best rival."""
    assert {
        FORECASTS[f"decode_{model}_{size}"].at_least for model in ("8b", "70b") for size in forecasts.DECODE_SIZES
    } == {0.88}
    assert FORECASTS["mass_128x2k"].at_most == 1.02
    assert {FORECASTS[f"{way}_batch_2m"].at_least for way in ("h2d", "d2h")} == {0.9}
    assert {FORECASTS[f"{rival}_1x1k"].at_most for rival in ("sdpa", "flashinfer")} == {1.05}


@pytest.mark.parametrize(
    "result",
    [Row("a", 1.5, "us", 2.0, 0.75, "note"), Check("b", passed=False, said="x\ny"), Fact("c", "yes"), Left("d", "no")],
)
def test_results_travel(result: Result) -> None:
    """Each result becomes one line of JSON and comes back equal."""
    assert result_of(line_of(result)) == result
    assert line_of(result).count(b"\n") == 1


def test_a_row_is_of_medians() -> None:
    """Ratios are taken pair by pair; one limit serves for all."""
    assert row_of("a", [1, 2, 9], "us", [2, 2, 3]) == Row("a", 2, "us", 2, 1.0)
    assert row_of("a", [1, 2, 9], "us", [4]) == Row("a", 2, "us", 4, 0.5)
    assert row_of("a", [3], "us") == Row("a", 3, "us")


NEVER_RUN = {
    *("decode_odd", "prefill_odd", "sanitizer_memcheck", "sanitizer_racecheck", "sanitizer_synccheck"),
    *("shared_64x8k", "shared_16x32k", "shared_right", "kvikio_rate"),
    *("arrays_torch", "arrays_load", "arrays_cupy", "prefill_fa3", "prefill_flashinfer"),
    *(name for name, forecast in FORECASTS.items() if forecast.part in ("rotated", "sparse", "endtoend")),
}
"""Rows that no GPU has given yet."""


def test_the_results_in_the_repository_are_made_by_the_code() -> None:
    """The file is the code's placeholder or comes from a GPU, and lacks only rows newer than that."""
    text = (ROOT / "cuda" / "RESULTS.md").read_text(encoding="utf-8")
    assert text == report.waiting() or "\n- GPU: " in text
    assert {name for name in FORECASTS if f"| `{name}` |" not in text} == NEVER_RUN
