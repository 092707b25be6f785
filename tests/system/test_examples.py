"""The commands of deploy/examples/events, as written."""

from __future__ import annotations

from tests.engines.documented import ROOT, Shell, free_port, is_said, run_blocks
from tierd.testing import Daemon

DOCUMENT = "deploy/examples/events/README.md"
PORTS = ("5557", "5558")


def test_a_router_hears_of_blocks() -> None:
    """With the example's configuration, the example's router gets the events of its client's blocks."""
    (block,) = run_blocks(DOCUMENT)
    config = (ROOT / DOCUMENT).with_name("tierd.toml").read_text(encoding="utf-8")
    free = {port: str(free_port()) for port in PORTS}
    for port, other in free.items():
        config = config.replace(port, other)
    with Daemon(config) as daemon, Shell(daemon, free) as shell:
        said = shell.run(block)
    assert is_said(block, said) and said.count("CPU") == 4
    assert all(port in block.script for port in PORTS)
