"""What `tierd purge` frees: arenas and stores whose daemon is gone.

Purpose: from a configuration to the instance whose they are. Non-purpose: removing files (tierd.tiers.fsck.purge).
Invariant: nothing is freed under a daemon that runs.
"""

from __future__ import annotations

from pathlib import Path

from tierd.config import Config
from tierd.server.instance import Instance
from tierd.tiers.fsck.purge import list_arenas, purge, purge_store


def free_memory(config: Config, *, orphans: bool) -> dict[Path, int]:
    """Frees the configured instance's arenas, with orphans those of others too; bytes by directory.

    Raises AlreadyOwned, and then nothing was freed, if the instance's daemon runs.
    """
    places = [host.arena_dir for host in config.host if host.arena_dir]
    own = instance_of(Path(config.server.state_dir))
    idle = [arena for arena in list_arenas(places) if arena.instance == own or (orphans and arena.owner is None)]
    for name in sorted({arena.instance for arena in idle}):
        purge(name, arena_dirs=places)
    return {arena.data: arena.bytes for arena in idle}


def free_stores(config: Config) -> dict[Path, int]:
    """Removes the configured stores; bytes by directory. Raises AlreadyOwned at the first that a daemon uses."""
    found = {Path(store.path): purge_store(Path(store.path)) for store in config.nvme}
    return {directory: size for directory, size in found.items() if size}


def instance_of(state_dir: Path) -> str:
    """The id of the instance in a state directory; empty if none ever ran there. Raises AlreadyOwned while one runs."""
    if not (state_dir / "instance").exists():
        return ""
    instance = Instance(str(state_dir))
    instance.close()
    return instance.id
