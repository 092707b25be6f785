"""The commands of deploy/examples/sglang run as written; the one that needs a GPU has valid options."""

from __future__ import annotations

import argparse
import shlex
from functools import partial

import pytest

pytest.importorskip(
    "sglang", reason="sglang is not installed: make test-engines runs this in an environment of its own"
)

from sglang.srt.server_args import ServerArgs

from tests.engines.documented import ROOT, Shell, is_said, run_blocks, shell_blocks
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(600)
DOCUMENT = "deploy/examples/sglang/README.md"


def test_the_commands(daemon: Daemon) -> None:
    """The command prints the output that the document shows."""
    (block,) = run_blocks(DOCUMENT)
    with Shell(daemon) as shell:
        shell.until(block, partial(is_said, block))


def test_the_engines_options_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own parser accepts the command that needs a GPU, and the storage's file is at its path."""
    (block,) = [one for one in shell_blocks(DOCUMENT) if not one.is_run]
    words = shlex.split(block.script.partition("sglang.launch_server")[2].replace("\\\n", " "))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    monkeypatch.chdir(ROOT)
    given = parser.parse_args(words)
    assert given.enable_hierarchical_cache and given.hicache_storage_backend == "dynamic"
    assert (ROOT / given.hicache_storage_backend_extra_config.removeprefix("@")).is_file()
