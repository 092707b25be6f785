"""The pages of deploy/docs, run as written: commands, Python, and configurations at their paths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.documented import END, ROOT, Block, Shell, free_port, is_said, page_blocks
from tierd.testing import Daemon
from tierd.testing.daemon import SMALL

DOCS = ROOT / "deploy" / "docs"
PAGES = [
    page
    for page in (path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md")))
    if "/reference/" not in page and any(block.is_run for block in page_blocks(page))
]
pytestmark = pytest.mark.timeout(600)
PORTS = ("9440", "9441")
SERVES = "tierd serve"
DEFAULT = '[[nvme]]\ncapacity = "4 GiB"\nzero_ahead = false\n'
"""The defaults, except that a new store is not zeroed."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="tierd-docs-"))
    yield path
    shutil.rmtree(path)


def with_small_tiers(block: Block) -> Block:
    """Adds small tiers to a configuration without any."""
    is_file = block.script.startswith("mkdir -p ") and f"{END}\n" in block.script and "\ncat > " in block.script
    if not is_file or "[[" in block.script:
        return block
    return Block(block.script.removesuffix(f"{END}\n") + SMALL.partition("\n\n")[2] + f"{END}\n", block.says)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_typed_as_it_stands(page: str, place: Path) -> None:
    """Every block that is run succeeds and prints the page's text, in the page's order."""
    blocks = [with_small_tiers(block) for block in page_blocks(page) if block.is_run]
    if not any(SERVES in block.script for block in blocks):
        with Daemon() as daemon, Shell(daemon, PYTHONPATH=str(ROOT)) as shell:
            type_all(shell, blocks)
        return
    (place / "default.toml").write_text(DEFAULT, encoding="utf-8")
    own = {"TIERD_RUNTIME_DIR": str(place / "run"), "TIERD_STATE_DIR": str(place / "state"), "PYTHONPATH": str(ROOT)}
    own["TIERD_CONFIG"] = str(place / "default.toml")
    instead = {
        name: str(place / name[1:]) for name in ("/tmp", "/etc/tierd", "/mnt")
    }  # in this order, because the other values contain /tmp
    try:
        with Shell(str(place / "run"), instead | {port: str(free_port()) for port in PORTS}, **own) as shell:
            (place / "tmp").mkdir()
            type_all(shell, blocks)
    finally:
        written = place / "etc/tierd/tierd.toml"
        purge(own | {"TIERD_CONFIG": str(written)} if written.exists() else own)


def type_all(shell: Shell, blocks: list[Block]) -> None:
    for block in blocks:
        said = shell.run(block, timeout_s=120.0)
        assert not block.says or is_said(block, said), f"{block}: the page shows\n{block.says}\nand it printed\n{said}"


def purge(env: dict[str, str]) -> None:
    """Frees the memory and stores of the page's daemon."""
    words = [sys.executable, "-m", "tierd.cli.daemon", "purge", "--nvme"]
    subprocess.run(words, env=os.environ | env, cwd=ROOT, check=True, capture_output=True)


def test_pages_are_found() -> None:
    """At least eight pages are run, so this file cannot pass empty."""
    assert len(PAGES) >= 8
