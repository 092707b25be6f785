"""Shells complete verbs, options, tiers, settings and codecs by the scripts of install.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from tests.system.warm import Daemon
from tierd.cli.ctl import cli

TYPED = {
    "bash": """
        eval "$(_TIERCTL_COMPLETE=bash_source tierctl)"
        COMP_WORDS=(tierctl {words}) COMP_CWORD={count}
        _tierctl_completion tierctl
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """,
    "zsh": """
        compdef() {{}}
        compadd() {{ print -l -- $completions }}
        _describe() {{ print -l -- ${{completions_with_descriptions%%:*}} }}
        eval "$(_TIERCTL_COMPLETE=zsh_source tierctl)"
        words=(tierctl {words}) CURRENT={count}+1
        _tierctl_completion
    """,
    "fish": """
        _TIERCTL_COMPLETE=fish_source tierctl | source
        complete --do-complete "tierctl {words}" | string split --fields 1 \\t
    """,
}
"""Shell -> what a Tab does there after words; zsh's own functions for the screen print instead."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment with a program `tierctl`, and with a daemon as its target."""
    (program := tmp_path_factory.mktemp("bin") / "tierctl").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m tierd.cli.ctl "$@"\n'
    )
    program.chmod(0o755)
    root = str(Path(__file__).resolve().parents[2])
    with Daemon() as daemon:
        added = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": root, "TIERD_TARGET": daemon.target}
        yield os.environ | added


@pytest.mark.parametrize("shell", TYPED)
@pytest.mark.parametrize(("words", "offered"), [("evict --ti", "--tier"), ("evict --tier ho", "host.0")])
def test_a_shell_offers(environment: dict[str, str], shell: str, words: str, offered: str) -> None:
    """In each shell a Tab offers options, and the daemon's tiers."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    script = TYPED[shell].format(words=words, count=len(words.split()))
    ran = subprocess.run(
        [shell, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.stdout.split(), ran.stderr) == ([offered], "")


@pytest.mark.parametrize(
    ("words", "start", "offered"),
    [
        ("", "stat", ["status"]),
        ("--target {target} scrub --tier", "", ["host.0", "nvme.0"]),
        ("blocks --target {target} --tier", "nv", ["nvme.0"]),
        ("evict --target /nowhere --tier", "", []),
        ("set --target {target}", "host.0.h", ["host.0.headroom=", "host.0.high_watermark="]),
        ("set --target /nowhere", "host", []),
        ("simulate --codec", "rot-8", ["rot-8-4", "rot-8-8"]),
        ("quality --codec", "lz4,identi", ["lz4,identity"]),
    ],
)
def test_names_are_offered(environment: dict[str, str], words: str, start: str, offered: list[str]) -> None:
    """Verbs, codecs, and the tiers and settings of the target's daemon (none without a daemon)."""
    typed = words.format(target=environment["TIERD_TARGET"]).split()
    found = ShellComplete(cli, {}, "tierctl", "").get_completions(typed, start)
    assert sorted(item.value for item in found) == offered
