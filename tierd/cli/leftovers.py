"""What `tierd purge` frees: arenas whose daemon is gone.

Purpose: from a configuration to the instance whose memory it is. Non-purpose: removing files (tierd.tiers.purge), stores on NVMe.
Invariant: nothing is freed under a daemon that runs.
"""

from __future__ import annotations

from pathlib import Path

from tierd.config import Config
from tierd.server.instance import Instance
from tierd.tiers.purge import list_arenas, purge


def free_memory(config: Config, *, orphans: bool) -> dict[Path, int]:
    """Frees the configured instance's arenas, with orphans those of others too; bytes by directory.

    Raises AlreadyOwned, and then nothing was freed, if the instance's daemon runs.
    """
    places = [host.arena_dir for host in config.host if host.arena_dir]
    own = instance_of(Path(config.server.state_dir))
    idle = [arena for arena in list_arenas(places) if arena.instance == own or (orphans and arena.owner is None)]
    for name in sorted({arena.instance for arena in idle}):
        purge(name, arena_dirs=places)
    return {arena.directory: arena.bytes for arena in idle}


def instance_of(state_dir: Path) -> str:
    """The id of the instance in a state directory; empty if none ever ran there. Raises AlreadyOwned while one runs."""
    if not (state_dir / "instance").exists():
        return ""
    instance = Instance(str(state_dir))
    instance.close()
    return instance.id
