"""The commands of deploy/examples/lmcache run as written."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip(
    "lmcache", reason="lmcache is not installed: make test-engines runs this in an environment of its own"
)

from tests.engines.documented import Shell, free_port, is_said, run_blocks
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(600)
SERVE, ON_CPU = run_blocks("deploy/examples/lmcache/README.md")


def test_its_storage(daemon: Daemon) -> None:
    """The command over LMCache's own storage prints the output that the document shows."""
    with Shell(daemon) as shell:
        shell.until(ON_CPU, partial(is_said, ON_CPU))


def test_its_server(daemon: Daemon) -> None:
    """LMCache's server starts with tierd beneath it, and prints so."""
    ports = {port: str(free_port()) for port in ("5555", "8080")}
    with Shell(daemon, ports, LMCACHE_TRACK_USAGE="false") as shell:
        said = shell.run(SERVE)
    assert is_said(SERVE, said)
