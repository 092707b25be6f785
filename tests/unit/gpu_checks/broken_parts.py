"""Parts of `make gpu` that end badly, each written as a module; TIERD_BROKEN_PART chooses one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tierd.errors import TierFailed
from tools.gpu.bench import Bench
from tools.gpu.results import Fact, Result

HANGS_S = 600


def results(bench: Bench) -> Iterator[Result]:
    """Yields one fact, the pid of a process that it started, then ends as the environment asks."""
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANGS_S})"])
    yield Fact("started", str(child.pid))
    match os.environ["TIERD_BROKEN_PART"]:
        case "hangs":
            time.sleep(HANGS_S)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fails":
            raise TierFailed("the GPU lost its context")
    child.kill()
