"""What documents tell a reader to type, run as it stands there.

Purpose: the shell blocks of a README, a shell for them, and what the document shows as their output. Non-purpose: prose. Invariants: a block that begins with
NOT_RUN says so to its reader too; every other one is run by the tests of its engine (tests/repo/test_examples.py); what a block leaves running ends with the
shell, however the test's process ends.
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
    """script: what is typed; says: what the document shows as its output, empty if nothing."""

    script: str
    says: str

    @property
    def is_run(self) -> bool:
        return not self.script.startswith(NOT_RUN)

    def __str__(self) -> str:
        """For names of tests."""
        return " ".join(self.script.split()[:4])


def shell_blocks(document: str) -> list[Block]:
    """All of a document, by its path from the root of the repository."""
    found = FENCE.findall((ROOT / document).read_text(encoding="utf-8"))
    return [
        Block(re.sub(r"^\$ ", "", text, flags=re.MULTILINE), says if not kind else "")
        for (language, text), (kind, says) in pairwise([*found, ("-", "")])
        if language in SHELLS
    ]


def page_blocks(document: str) -> list[Block]:
    """The same of a page whose examples are files too: Python is run, and TOML whose first line is `# /its/path` is written."""
    found = FENCE.findall((ROOT / document).read_text(encoding="utf-8"))
    blocks = []
    for (language, text), (kind, says) in pairwise([*found, ("-", "")]):
        if (script := _typed_as(language, text)) is not None:
            blocks.append(Block(script, says if not kind else ""))
    return blocks


def _typed_as(language: str, text: str) -> str | None:
    """What a shell is told for it; None: nothing."""
    if language in SHELLS:
        return re.sub(r"^\$ ", "", text, flags=re.MULTILINE)
    if language == "python":
        return text if text.startswith(NOT_RUN) else f"python - <<'{END}'\n{text}{END}\n"
    path = re.match(r"# (/\S+)\n", text)
    if language == "toml" and path:
        return f"mkdir -p {Path(path[1]).parent}\ncat > {path[1]} <<'{END}'\n{text}{END}\n"
    return None


def run_blocks(document: str) -> list[Block]:
    """Those that are run."""
    return [block for block in shell_blocks(document) if block.is_run]


def is_said(block: Block, said: str) -> bool:
    """Whether each line that the document shows is a line of what was said; `...` stands for anything there."""
    assert block.says, f"the document shows no output of {block}"
    patterns = [re.escape(line).replace(r"\.\.\.", ".*") for line in block.says.splitlines()]
    return all(any(re.fullmatch(pattern, line) for line in said.splitlines()) for pattern in patterns)


class Shell:
    """`with Shell(daemon, {"8000": "41234"}) as shell: shell.run(block)`. instead: other words for words of the document, such as a port that is free.

    From the root of the repository, with the programs of this environment before others.
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
        """Until the block has ended, not what it left running; what it has printed. Raises AssertionError if it fails or takes too long."""
        return self.begin(block)(timeout_s)

    def begin(self, block: Block) -> Callable[[float], str]:
        """As run, not waited for: what is given waits so many seconds."""
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
        """Runs it again while its output is not right: on a busy machine a lookup may come too late, which is a miss. Raises AssertionError."""
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
    """A process that kills a process group as soon as its own standard input ends: when it is closed here, or when this process does, by SIGKILL too."""
    words = f"cat > /dev/null; kill -s KILL -- -{group}"
    return subprocess.Popen(
        ["sh", "-c", words], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def free_port() -> int:
    """Of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _terminate(leader: subprocess.Popen[bytes]) -> None:
    """Asks the leader's group to end, and waits a while until it has."""
    until = time.monotonic() + END_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
        while time.monotonic() < until:
            leader.poll()
            os.killpg(leader.pid, 0)
            time.sleep(POLL_S)
