"""Peers at the work of the data plane: the same batches put and got by each, side by side with a memory copy and tierd in the same run.

    python -m tools.bench.peers [NAME ...] [--environments build/peers] [--output build/peers.json]

Each peer gets an environment of its own below `--environments`, made once by pip, and one worker process there (worker.py). What does not install or does
not start is a line with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from tierd.client import Client
from tierd.testing import Daemon
from tools.bench.__main__ import title, write
from tools.bench.data_plane import CONFIG, SHAPES, Bench
from tools.bench.measure import FULL, KIB, MIB, TINY, Cold, Cost, Effort, cost_of, cpus, in_turn, line_of, rates
from tools.bench.peers.known import KNOWN
from tools.bench.peers.picture import VERBS, draw, runs_of
from tools.bench.rows import Row, row_of
from tools.bench.table import WIDE, table_of

INSTALL_S, ANSWER_S = 1800, 120
LAG, CHECKED = 4, 1_000_000
"""LAG: batches between a put and its get, and between that and the next one, so that no cache holds it. CHECKED: number of the batch whose bytes are compared."""
WARM_RUNS = 2 * LAG
"""Then each get is the first of its batch, and each other one the second."""


class Refused(Exception):
    """A peer that cannot be measured here, and why."""


class Remote:
    """A peer's worker process."""

    def __init__(self, python: Path, name: str, *, count: int, block_bytes: int) -> None:
        command = [str(python), "-m", "tools.bench.peers.worker", name, str(count), str(block_bytes)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        self._answer()

    def cost(self, verb: str, number: int) -> Cost:
        """Of one verb. Raises Refused."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb} {number}\n")
        self._process.stdin.flush()
        told = self._answer()
        return Cost(float(told["wall_s"]), float(told["cpu_s"]))

    def close(self) -> None:
        """Ends it, and with it what it started; if it hangs, all of its group are killed."""
        try:
            self._process.communicate(timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()

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
    """The Python of a peer's environment, made if there is none yet. Raises Refused."""
    python = directory / name / "bin" / "python"
    made = directory / name / ".made"
    if not made.exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *KNOWN[name].packages]
        for command in ([sys.executable, "-m", "venv", str(directory / name)], pip):
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode:
                raise Refused(f"does not install: {done.stderr.strip().splitlines()[-1:]}")
        made.touch()
    return python


def compare(name: str, directory: Path, effort: Effort) -> list[Row]:
    """Rows of a peer and of tierd in the same run, against memcpy. Raises Refused."""
    python, out = environment_of(name, directory), list[Row]()
    for shape, (count, block_bytes) in SHAPES.items():
        block_bytes = effort.pick(block_bytes, 4 * KIB)  # noqa: PLW2901
        config = CONFIG.format(capacity=effort.pick(768, 16), segment=effort.pick(32, 1))
        remote = Remote(python, name, count=count, block_bytes=block_bytes)
        try:
            with Daemon(config) as daemon, Client(daemon.target) as client:
                bench = Bench(client, Cold(effort.pick(192 * MIB, 8 * MIB)), count=count, block_bytes=block_bytes)
                costs = _costs(bench, remote, daemon.pid, effort)
        finally:
            remote.close()
        out += _rows_of(name, shape, costs, count * block_bytes / 1e9)
    return out


def _costs(bench: Bench, remote: Remote, pid: int, effort: Effort) -> dict[str, list[Cost]]:
    """Memory of both is touched first; then copies, puts, first gets and second ones take turns."""
    touched = effort.pick(512 * MIB, bench.size) // bench.size + 2 * LAG
    for number in range(touched):
        bench.put(number)()
        bench.get(number)()
        remote.cost("put", number)
        remote.cost("get", number)
    remote.cost("check", CHECKED)
    costs: dict[str, list[Cost]] = {name: [] for name in ("copy", *VERBS, *(f"tierd {verb}" for verb in VERBS))}
    for number in range(touched, touched + WARM_RUNS + effort.at_least(15)):
        works = {
            "copy": partial(cost_of, bench.copy(number)),
            "put": partial(remote.cost, "put", number),
            "tierd put": partial(cost_of, bench.put(number), pid=pid),
            "get": partial(remote.cost, "get", number - LAG),
            "tierd get": partial(cost_of, bench.get(number - LAG), pid=pid),
            "get_again": partial(remote.cost, "get", number - 2 * LAG),
            "tierd get_again": partial(cost_of, bench.get(number - 2 * LAG), pid=pid),
        }
        for name in in_turn(list(works), number):
            cost = works[name]()
            costs[name] += [cost] if number >= touched + WARM_RUNS else []
    return costs


def _rows_of(name: str, shape: str, costs: dict[str, list[Cost]], gigabytes: float) -> list[Row]:
    limits, out = rates(costs["copy"], gigabytes), list[Row]()
    for who, prefix in ((name, ""), ("tierd", "tierd ")):
        for verb in VERBS:
            each = costs[prefix + verb]
            meaning = f"{who}, in the run of {name}, against memcpy"
            values = rates(each, gigabytes)
            row = row_of(f"{who}_{verb}_{shape}", values, unit="GB/s", limits=limits, meaning=meaning)
            out.append(row.with_cpu(cpus(each), gigabytes=gigabytes))
    return out


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
