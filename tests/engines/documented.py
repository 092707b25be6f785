"""Runs the shell blocks of a document as a reader types them.

Purpose: the shell blocks of a README, a shell for them, and the output that the document shows.
Non-purpose: prose. Invariants: A block that is not run begins with NOT_RUN, as its reader sees. The
tests of its engine run every other block (tests/repo/test_examples.py). Background processes of a
block end with the shell, however the test's process ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Self

from tierd.testing import Daemon

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = "# not run: "
SHELLS = ("sh", "console")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END = "END_OF_THE_FENCE"
POLL_S, END_S = 0.2, 60.0


@dataclass(frozen=True)
class Block:
    """script: the text that a reader types; says: the output that the document shows, empty if none."""

    script: str
    says: str

    @property
    def is_run(self) -> bool:
        return not self.script.startswith(NOT_RUN)

    def __str__(self) -> str:
        """The first four words, for the names of tests."""
        return " ".join(self.script.split()[:4])


def shell_blocks(document: str) -> list[Block]:
    """All shell blocks of a document, which is given by its path from the repository's root."""
    found = FENCE.findall((ROOT / document).read_text(encoding="utf-8"))
    return [
        Block(re.sub(r"^\$ ", "", text, flags=re.MULTILINE), says if not kind else "")
        for (language, text), (kind, says) in pairwise([*found, ("-", "")])
        if language in SHELLS
    ]


def page_blocks(document: str) -> list[Block]:
    """The same for a page with example files: Python is run; TOML is written if it begins `# /its/path`."""
    found = FENCE.findall((ROOT / document).read_text(encoding="utf-8"))
    blocks = []
    for (language, text), (kind, says) in pairwise([*found, ("-", "")]):
        if (script := _typed_as(language, text)) is not None:
            blocks.append(Block(script, says if not kind else ""))
    return blocks


def _typed_as(language: str, text: str) -> str | None:
    """The shell text for a fenced block; None if the block is neither run nor written."""
    if language in SHELLS:
        return re.sub(r"^\$ ", "", text, flags=re.MULTILINE)
    if language == "python":
        return text if text.startswith(NOT_RUN) else f"python - <<'{END}'\n{text}{END}\n"
    path = re.match(r"# (/\S+)\n", text)
    if language == "toml" and path:
        return f"mkdir -p {Path(path[1]).parent}\ncat > {path[1]} <<'{END}'\n{text}{END}\n"
    return None


def run_blocks(document: str) -> list[Block]:
    """The blocks of a document that are run."""
    return [block for block in shell_blocks(document) if block.is_run]


def is_said(block: Block, said: str) -> bool:
    """Whether each line that the document shows is in the output; `...` in it matches any text."""
    assert block.says, f"the document shows no output of {block}"
    patterns = [re.escape(line).replace(r"\.\.\.", ".*") for line in block.says.splitlines()]
    return all(any(re.fullmatch(pattern, line) for line in said.splitlines()) for pattern in patterns)


class Shell:
    """`with Shell(daemon, {"8000": "41234"}) as shell: shell.run(block)`.

    instead: replacements for words of the document, such as a free port. Blocks run in the
    repository's root. The programs of this environment come first in PATH.
    """

    def __init__(self, daemon: Daemon | str, instead: Mapping[str, str] | None = None, **env: str) -> None:
        self._instead = instead or {}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._env = (
            os.environ | {"PATH": path, "TIERD_TARGET": daemon if isinstance(daemon, str) else daemon.target} | env
        )
        self._logs: list[IO[bytes]] = []
        self._groups: list[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]] = []

    def run(self, block: Block, *, timeout_s: float = 300.0) -> str:
        """Returns a block's output; background processes go on. Raises AssertionError on failure or timeout."""
        return self.begin(block)(timeout_s)

    def begin(self, block: Block) -> Callable[[float], str]:
        """Starts a block. The returned function waits so many seconds at most and returns the output."""
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- ends with the shell
        self._logs.append(log)
        words = ["bash", "-e", "-o", "pipefail", "-c", self._typed(block)]
        process = subprocess.Popen(words, cwd=ROOT, env=self._env, stdout=log, stderr=log, start_new_session=True)
        self._groups.append((process, guard_of(process.pid)))

        def end(timeout_s: float) -> str:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            said = os.pread(log.fileno(), 1 << 22, 0).decode(errors="replace")
            assert process.returncode == 0, f"{block}: {process.returncode}\n{said[-6000:]}"
            return said

        return end

    def until(self, block: Block, is_right: Callable[[str], bool], *, times: int = 5) -> str:
        """Runs a block until its output is right: a late lookup misses. Raises AssertionError after `times`."""
        said = ""
        for _ in range(times):
            said = self.run(block)
            if is_right(said):
                return said
        raise AssertionError(f"{block}: {times} times another output than is wanted\n{said[-6000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, guard in self._groups:
            _terminate(process)
            guard.communicate(timeout=END_S)
            process.wait(END_S)
        for log in self._logs:
            log.close()

    def _typed(self, block: Block) -> str:
        script = block.script
        for word, other in self._instead.items():
            script = script.replace(word, other)
        return script


def guard_of(group: int) -> subprocess.Popen[bytes]:
    """Starts a process that kills a process group when its own standard input closes. The caller
    closes it, or the system does when this process ends, by SIGKILL too."""
    words = f"cat > /dev/null; kill -s KILL -- -{group}"
    return subprocess.Popen(
        ["sh", "-c", words], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def free_port() -> int:
    """A free port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _terminate(leader: subprocess.Popen[bytes]) -> None:
    """Sends SIGTERM to the leader's group, and waits up to END_S until the group has ended."""
    until = time.monotonic() + END_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
        while time.monotonic() < until:
            leader.poll()
            os.killpg(leader.pid, 0)
            time.sleep(POLL_S)
