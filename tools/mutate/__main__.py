"""Mutation runs: `python -m tools.mutate [--only NAME] [--list]`.

Each row of `mutations.py` is one small change that removes a check. The program makes it in a copy
of the tree, runs the tests that should fail, and undoes it. The same tests must first pass without
it. A table names the test that failed. Exit status: 1 if no test failed for some mutation. 2 if one
could not be tried: its text is not there exactly once, or its tests fail without it.

Purpose: proof that the tests detect a missing check. Non-purpose: a search for places to change.
Invariant: the working tree is only read.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.mutate.command import NOT_TRIED, SURVIVED, choose
from tools.mutate.mutation import Mutation
from tools.mutate.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (
    ".git",
    ".venv*",
    "build",
    "dist",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
)
TIMEOUT_S = 240.0
"""Of the tests of one mutation; a mutation that makes them hang this long counts as detected."""
PASSED, FAILED = 0, 1
"""pytest's exit statuses; with any other one it could not run."""


@dataclass(frozen=True)
class Outcome:
    """The result of the tests. status: pytest's, None if they timed out; test: the first that
    failed; text: the end of the output."""

    status: int | None
    test: str
    text: str
    seconds: float


class Copy:
    """A copy of the tree in which one file at a time is changed."""

    def __init__(self, place: Path) -> None:
        self._place = place / "tree"
        shutil.copytree(ROOT, self._place, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        self._green: dict[tuple[str, ...], Outcome] = {}

    def without(self, mutation: Mutation) -> Outcome:
        """Runs a mutation's tests on the unchanged tree, once for all mutations with the same."""
        if mutation.tests not in self._green:
            self._green[mutation.tests] = self._run(mutation.tests)
        return self._green[mutation.tests]

    def with_it(self, mutation: Mutation) -> Outcome:
        """The tests on the tree with the mutation."""
        with self._changed(mutation):
            return self._run(mutation.tests)

    @contextmanager
    def _changed(self, mutation: Mutation) -> Iterator[None]:
        path = self._place / mutation.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def _run(self, tests: tuple[str, ...]) -> Outcome:
        # No bytecode: Python would not see a change and its undoing within one second.
        subprocess.run([sys.executable, "-m", "tools.native"], cwd=self._place, check=False, stderr=subprocess.DEVNULL)
        env = os.environ | {"PYTHONPATH": str(self._place), "PYTHONDONTWRITEBYTECODE": "1", "TIERD_DEPTH": "test"}
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        with subprocess.Popen(
            command, cwd=self._place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                text, status = process.communicate(timeout=TIMEOUT_S)[0], process.returncode
            except subprocess.TimeoutExpired:
                process.terminate()
                text, status = process.communicate()[0], None
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        return Outcome(status, failed[1] if failed else "", text[-2000:], time.monotonic() - begun)


def verdict(copy: Copy, mutation: Mutation) -> tuple[str, int]:
    """The table's text for a mutation, and the exit status that follows from it."""
    if not mutation.is_there(ROOT):
        return f"NOT TRIED: its text is not in {mutation.file} once", NOT_TRIED
    before = copy.without(mutation)
    if before.status != PASSED:
        return f"NOT TRIED: its tests do not pass without it: {before.test or before.text}", NOT_TRIED
    after = copy.with_it(mutation)
    if after.status == PASSED:
        return "SURVIVED", SURVIVED
    if after.status in (FAILED, None):
        return after.test or "out of time", PASSED
    return f"NOT TRIED: pytest ended with {after.status}: {after.text}", NOT_TRIED


def main() -> int:
    """The exit status."""
    chosen = choose(MUTATIONS, "Takes checks out of the code and shows which test notices.")
    worst, begun = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierd-mutate-") as place:
        copy = Copy(Path(place))
        for mutation in chosen:
            said, status = verdict(copy, mutation)
            worst = max(worst, status)
            print(f"{mutation.name:34} {said}", flush=True)
    print(f"{len(chosen)} mutations in {time.monotonic() - begun:.0f} s")
    return worst


if __name__ == "__main__":
    sys.exit(main())
