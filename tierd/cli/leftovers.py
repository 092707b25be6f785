"""Frees arenas and stores without a daemon, for `tierd purge`.

It selects those of a configuration's instance; tierd.tiers.fsck.purge removes the files. It frees
nothing of a running daemon.
"""

from __future__ import annotations

from pathlib import Path

from tierd.config import Config
from tierd.server.instance import Instance
from tierd.tiers.fsck.purge import list_arenas, purge, purge_store


def free_memory(config: Config, *, orphans: bool) -> dict[Path, int]:
    """Frees the arenas of the configured instance, with orphans also others. Bytes by directory.

    Raises AlreadyOwned, and frees nothing, if the instance's daemon runs.
    """
    places = [host.arena_dir for host in config.host if host.arena_dir]
    own = instance_of(Path(config.server.state_dir))
    idle = [arena for arena in list_arenas(places) if arena.instance == own or (orphans and arena.owner is None)]
    for name in sorted({arena.instance for arena in idle}):
        purge(name, arena_dirs=places)
    return {arena.data: arena.bytes for arena in idle}


def free_stores(config: Config) -> dict[Path, int]:
    """Removes the configured stores. Bytes by directory. Raises AlreadyOwned at the first one in use."""
    found = {Path(store.path): purge_store(Path(store.path)) for store in config.nvme}
    return {directory: size for directory, size in found.items() if size}


def instance_of(state_dir: Path) -> str:
    """The instance id of a state directory; empty if none ever ran. Raises AlreadyOwned if one runs."""
    if not (state_dir / "instance").exists():
        return ""
    instance = Instance(str(state_dir))
    instance.close()
    return instance.id
