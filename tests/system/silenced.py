"""A daemon whose log goes nowhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.system.warm import Daemon
from tierd.testing.daemon import Process

SILENT = {"full": 'exec "$@" >/dev/full 2>&1', "closed": 'exec "$@" <&- >&- 2>&-'}
"""State of its standard streams: on a full disk, or closed."""


class Silenced(Daemon):
    """how: one of SILENT."""

    def __init__(self, how: str, config: str, **more: object) -> None:
        self._how = SILENT[how]
        super().__init__(config, **more)  # type: ignore[arg-type]

    def _spawn(self, arguments: Sequence[str], *, env: Mapping[str, str], log: int) -> Process:
        command = [sys.executable, "-m", "tierd.cli.daemon", *arguments]
        return subprocess.Popen(["/bin/sh", "-c", self._how, "sh", *command], env=env)
