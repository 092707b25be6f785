"""Peers at the work of the data plane, side by side with a memory copy and tierd in the same run.

    python -m tools.bench.peers [NAME ...] [--environments build/peers] [--output build/peers.json]

Each peer gets its own environment below `--environments`, made once by pip, and one worker process
there (worker.py). A peer that does not install or start is a line with the reason.

Each puts and gets the batches of `data_plane`, as shares of memcpy. It does so with the single
blocks of `one_block`, in microseconds, and beyond a memcpy, beside a gRPC echo. All of its memory
was written before a run counts. The bytes of every get are verified, untimed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tierd.client import Client
from tierd.testing import Daemon
from tools.bench import one_block
from tools.bench.__main__ import title, write
from tools.bench.data_plane import CONFIG, SHAPES, Bench
from tools.bench.measure import (
    FULL,
    KIB,
    MIB,
    TINY,
    Cold,
    Cost,
    Effort,
    Measure,
    cpus,
    line_of,
    measured,
    rates,
    take_turns,
)
from tools.bench.peers.known import KNOWN
from tools.bench.peers.peer import END_S, MEMORY_BYTES, PAUSE_S
from tools.bench.peers.picture import VERBS, draw, runs_of
from tools.bench.rows import Row, row_of
from tools.bench.table import WIDE, table_of

INSTALL_S, ANSWER_S = 1800, 120
LAG = 4
"""Batches between a put and its get, and between that and the next get: no cache holds it then."""
WARM_RUNS = 2 * LAG
"""After these each get is the first of its batch, and each get_again the second."""


class Refused(Exception):
    """A peer that cannot be measured here, and the reason."""


class Remote:
    """A peer's worker process."""

    def __init__(self, python: Path, name: str, *, count: int, block_bytes: int) -> None:
        command = [str(python), "-m", "tools.bench.peers.worker", name, str(count), str(block_bytes)]
        pipe, self._directory = subprocess.PIPE, tempfile.TemporaryDirectory(prefix="peer-")
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"TMPDIR": self._directory.name},
        )
        self._answer()

    def cost(self, verb: str, number: int) -> Cost:
        """Of one verb. Raises Refused."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead worker's answer is the end of its output
            self._process.stdin.write(f"{verb} {number}\n")
            self._process.stdin.flush()
        told = self._answer()
        return Cost(float(told["wall_s"]), float(told["cpu_s"]))

    def close(self) -> None:
        """Ends it and its children, and removes its files."""
        try:
            self._process.communicate(timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        if self._process.returncode:
            self._end_group()
        self._directory.cleanup()

    def _end_group(self) -> None:
        """Ends a dead worker's children: SIGTERM first, so that they remove their shared memory."""
        deadline = time.monotonic() + END_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            while time.monotonic() < deadline:
                time.sleep(PAUSE_S)
                os.killpg(self._process.pid, 0)
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self) -> dict[str, float]:
        try:
            told = json.loads(line_of(self._process, timeout_s=ANSWER_S))
        except (EOFError, TimeoutError) as error:
            self.close()
            raise Refused(str(error)) from error
        if "error" in told:
            raise Refused(str(told["error"]))
        return dict(told)


def environment_of(name: str, directory: Path) -> Path:
    """The Python of a peer's environment, made unless it has these packages. Raises Refused."""
    python = directory / name / "bin" / "python"
    made, packages = directory / name / ".made", "\n".join(KNOWN[name].packages)
    if not made.exists() or made.read_text() != packages:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *KNOWN[name].packages]
        for command in ([sys.executable, "-m", "venv", str(directory / name)], pip):
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode:
                raise Refused(f"does not install: {done.stderr.strip().splitlines()[-1:]}")
        made.write_text(packages)
    return python


def compare(name: str, directory: Path, effort: Effort) -> list[Row]:
    """Rows of a peer and of tierd in the same run, against memcpy. Raises Refused."""
    python, out = environment_of(name, directory), list[Row]()
    for shape, (count, block_bytes) in SHAPES.items():
        block_bytes = effort.pick(block_bytes, 4 * KIB)  # noqa: PLW2901
        config = CONFIG.format(capacity=effort.pick(768, 16), segment=effort.pick(32, 1))
        with (
            contextlib.closing(Remote(python, name, count=count, block_bytes=block_bytes)) as remote,
            Daemon(config) as daemon,
            Client(daemon.target) as client,
        ):
            bench = Bench(client, Cold(effort.pick(192 * MIB, 8 * MIB)), count=count, block_bytes=block_bytes)
            costs = _costs(bench, remote, daemon.pid, effort)
        out += _rows_of(name, shape, costs, count * block_bytes / 1e9)
    for size, block_bytes in one_block.SIZES.items():
        block_bytes = effort.pick(block_bytes, 4 * KIB)  # noqa: PLW2901
        with contextlib.closing(Remote(python, name, count=1, block_bytes=block_bytes)) as remote:
            out += _rows_of_one(name, size, remote, effort)
    return out


def _costs(bench: Bench, remote: Remote, pid: int, effort: Effort) -> dict[str, list[Cost]]:
    """Fills the memory of both first; then copies, puts, first gets and second ones take turns."""
    filled = _filled(bench.size, effort)
    for number in range(filled):
        bench.put(number)()
        bench.note(number)
        remote.cost("put", number)
    measures = {
        "copy": measured(bench.copy),
        "copy_apart": measured(bench.copy_apart),
        "put": lambda number: remote.cost("put", number),
        "tierd put": measured(bench.put, pid=pid, then=bench.note),
        "get": lambda number: remote.cost("get", number - LAG),
        "tierd get": _get(bench, LAG, pid),
        "get_again": lambda number: remote.cost("get", number - 2 * LAG),
        "tierd get_again": _get(bench, 2 * LAG, pid),
    }
    return take_turns(measures, runs=effort.at_least(15), warm=WARM_RUNS, first=filled)


def _get(bench: Bench, lag: int, pid: int) -> Measure:
    """tierd's get of the batch put `lag` batches before."""
    return measured(lambda number: bench.get(number - lag), pid=pid, then=lambda number: bench.verify(number - lag))


def _filled(batch_bytes: int, effort: Effort) -> int:
    """Batches after which a cache has written all of its memory: first writes cost several times
    more."""
    return effort.pick(MEMORY_BYTES // batch_bytes, 1) + 2 * LAG


def _rows_of(name: str, shape: str, costs: dict[str, list[Cost]], gigabytes: float) -> list[Row]:
    out = list[Row]()
    for who, prefix in ((name, ""), ("tierd", "tierd ")):
        for verb in VERBS:
            each = costs[prefix + verb]
            limits = rates(costs["copy_apart" if verb == "put" else "copy"], gigabytes)
            meaning = f"{who}, in the run of {name}, against memcpy"
            values = rates(each, gigabytes)
            row = row_of(f"{who}_{verb}_{shape}", values, unit="GB/s", limits=limits, meaning=meaning)
            out.append(row.with_cpu(cpus(each), gigabytes=gigabytes))
    return out


def _rows_of_one(name: str, size: str, remote: Remote, effort: Effort) -> list[Row]:
    """Single blocks of both take turns. Gets read blocks that were got before, in turn."""
    block_bytes = effort.pick(one_block.SIZES[size], 4 * KIB)
    filled, got = _filled(block_bytes, effort), effort.pick(one_block.GOT_BYTES // block_bytes, 2)
    for number in range(filled):
        remote.cost("put", number)
    for number in range(filled - got, filled):
        remote.cost("get", number)
    beside = {
        "peer_put": lambda run: remote.cost("put", filled + run),
        "peer_get": lambda run: remote.cost("get", filled - got + run % got),
    }
    times = one_block.took(size, effort, beside)
    peer = {limit: times[limit] for limit in one_block.LIMITS}
    peer |= {"put": times["peer_put"], "get": times["peer_get"]}
    out = one_block.rows_of(peer, size, who=f"{name}_", whose=f"{name}, in the run of {name}, ")
    return out + one_block.rows_of(times, size, who="tierd_", whose=f"tierd, in the run of {name}, ")


def main(names: Sequence[str] | None = None) -> None:
    """Measures the peers named, or all that are known."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.peers", description="other caches, side by side")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KNOWN)}")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--output", type=Path, default=Path("build/peers.json"))
    parser.add_argument("--tiny", action="store_true", help="only to see that it works")
    asked = parser.parse_args(names)
    if unknown := set(asked.names) - set(KNOWN):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(KNOWN)}")
    console, rows, refused = Console(width=WIDE), list[Row](), dict[str, str]()
    for name in asked.names or KNOWN:
        try:
            rows += compare(name, asked.environments, TINY if asked.tiny else FULL)
        except Refused as error:
            refused[name] = str(error)
    if rows:
        console.print(table_of(rows, title=title()))
    for name, reason in refused.items():
        console.print(f"[red]{name}[/]: {reason}", highlight=False)
    paths = write(rows, asked.output, refused=refused, picture=lambda path: draw(runs_of(rows), path, title=title()))
    console.print(f"written to {' and '.join(map(str, paths))}")


if __name__ == "__main__":
    main()
