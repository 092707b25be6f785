"""Keeps the learner's state of reuse across restarts, in `reuse.npz` in the state directory.

The file is replaced whole. An unreadable file, or one of another version, is logged and ignored.
Learning then begins with the state shipped with tierd. A failed save harms nothing else.
`tierd.policies.reuse` learns.
"""

from __future__ import annotations

import asyncio
import io
import zipfile
import zlib
from pathlib import Path

import numpy as np
import structlog

from tierd.policies.named import NamedPolicies
from tierd.policies.reuse.learner import Learner
from tierd.tiers.io.durable import replace_file

log = structlog.get_logger(__name__)

FILE = "reuse.npz"
SAVE_S = 300.0
"""A crash loses at most the learning of this time."""


class Learned:
    """Saves the learner's state, if a policy of the daemon learns."""

    def __init__(self, policies: NamedPolicies, state_dir: Path) -> None:
        self._policies, self._path = policies, state_dir / FILE
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts saving; a policy that learns may come later."""
        self._task = asyncio.create_task(self._keep_for_ever())

    async def stop(self) -> None:
        """Saves a last time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._keep()

    async def _keep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self._keep()

    async def _keep(self) -> None:
        if self._policies.traffic is None:
            return
        state = self._policies.traffic.learner.state()
        try:
            await asyncio.to_thread(_write, self._path, state)
        except OSError as error:
            log.warning("learned reuse state not saved", file=str(self._path), error=str(error))


def read_learner(state_dir: Path) -> Learner | None:
    """The learner of an earlier daemon. None if its file is missing or unusable."""
    path = state_dir / FILE
    try:
        raw, learner = io.BytesIO(path.read_bytes()), Learner()
        with np.load(raw, allow_pickle=False) as state:
            learner.restore(dict(state))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        log.warning("learned reuse state not loaded", file=str(path), error=str(error))
        return None
    return learner


def _write(path: Path, state: dict[str, np.ndarray]) -> None:
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **state)
    replace_file(path, [packed.getvalue()])
