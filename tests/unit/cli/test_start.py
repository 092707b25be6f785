"""What a daemon's start leaves for the garbage collector."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc, sys
from tierd.cli.daemon import run_daemon
from tierd.config import load_config
config = load_config(environ={"TIERD_STATE_DIR": sys.argv[1], "TIERD_RUNTIME_DIR": sys.argv[1]})
try:
    run_daemon(config, release=False)
except OSError:
    print(gc.isenabled(), len(gc.get_objects()), gc.get_freeze_count())
"""
"""A start that ends at once, since its directory is a file."""


def test_the_collector_looks_at_no_imports(tmp_path: Path) -> None:
    """Garbage is collected while a daemon runs, but not sought among the tens of thousands of objects that stay for its life."""
    (file := tmp_path / "a file").touch()
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    enabled, seen, spared = ran.stdout.split()
    assert (enabled, int(spared) > 10 * int(seen)) == ("True", True), ran
