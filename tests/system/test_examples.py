"""The commands of deploy/examples/events and deploy/examples/cupy, as written."""

from __future__ import annotations

import os
from pathlib import Path

from tests.engines.documented import ROOT, Shell, free_port, is_said, run_blocks
from tests.unit.kernels.fake_driver import fake_environment
from tierd.testing import Daemon

DOCUMENT = "deploy/examples/events/README.md"
CUPY = "deploy/examples/cupy/README.md"
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


def test_a_worker_with_cupy_gets_its_pages_back(tmp_path: Path) -> None:
    """The worker stores pages of its own pool and gets them back right, over a substitute for cupy on
    the fake driver."""
    (block,) = run_blocks(CUPY)
    (tmp_path / "cupy.py").write_text("from tests.system.small_cupy import cuda, empty, uint8\n")
    fake = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    fake |= {name: value for name, value in fake_environment().items() if name not in {"PATH", *fake}}
    with Daemon("nvme = []") as daemon, Shell(daemon, None, **fake) as shell:
        assert is_said(block, shell.run(block))
