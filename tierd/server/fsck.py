"""Checks all of a stopped daemon's files: the instance, its arenas, its stores, by the daemon's
configuration.

`check` finds the parts, takes the locks of all parts before it reads anything, and checks one part
after another. It writes nothing. The checks themselves are in tiers/fsck_*.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tierd.config import Config
from tierd.core.formats.model import TierKind, TierSpec
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.errors import AlreadyOwned, CorruptRecord
from tierd.server.assembly import spec_of
from tierd.server.instance import unsealed
from tierd.server.previous_run import TABLE_NAME
from tierd.tiers.arena.arena_files import LOCK_NAME as ARENA_LOCK
from tierd.tiers.fsck.fsck import Part, borrowed_lock
from tierd.tiers.fsck.fsck_arena import check_arena, check_holds
from tierd.tiers.fsck.fsck_store import check_store
from tierd.tiers.fsck.purge import list_arenas
from tierd.tiers.store.store_files import LOCK_NAME as STORE_LOCK

INSTANCE = "instance"


def check(config: Config) -> Iterator[list[Part]]:
    """Checks all parts in order. Yields the parts begun so far, after each step. Raises
    AlreadyOwned, OSError."""
    state = Path(config.server.state_dir)
    parts: list[Part] = []
    with contextlib.ExitStack() as locks:
        try:
            for path, what in _locks(config, state):
                locks.enter_context(borrowed_lock(path, what=what))
        except AlreadyOwned as error:
            raise AlreadyOwned(f"{error}; or check it while it runs, with `tierctl fsck --online`") from error
        for part, steps in _parts(config, state):
            parts.append(part)
            yield parts
            for _ in steps:
                yield parts
    yield parts


def _locks(config: Config, state: Path) -> Iterator[tuple[Path, str]]:
    yield state / "tierd.lock", f"instance in {state}"
    for place in _arenas(config, state).values():
        yield place[1] / ARENA_LOCK, f"arena in {place[1]}"
    for index, store in enumerate(config.nvme):
        yield Path(store.path) / STORE_LOCK, f"nvme.{index}: store"


def _parts(config: Config, state: Path) -> Iterator[tuple[Part, Iterator[None]]]:
    part = Part(INSTANCE, str(state))
    yield part, _check_instance(state, part)
    arenas = _arenas(config, state)
    for spec in _mapped(config):
        if spec.name in arenas:
            data, tables = arenas[spec.name]
            part = Part(spec.name, str(data))
            yield part, _check_memory(spec, data, tables, part)
    for index, store in enumerate(config.nvme):
        part = Part(f"nvme.{index}", store.path)
        yield part, check_store(spec_of(TierKind.NVME, index, store), Path(store.path), part)


def _mapped(config: Config) -> Iterator[TierSpec]:
    # A GPU's memory does not outlast the daemon.
    devices = ((index, table) for index, table in enumerate(config.device) if table.kind == "cpu")
    yield from (spec_of(TierKind.DEVICE, index, table) for index, table in devices)
    yield from (spec_of(TierKind.HOST, index, table) for index, table in enumerate(config.host))


def _arenas(config: Config, state: Path) -> dict[str, tuple[Path, Path]]:
    """Directories of data and tables of this instance's arenas, by tier."""
    name = state / "instance"
    own = name.read_text(errors="replace").strip() if name.exists() else ""
    places = [place for place in (*(t.arena_dir for t in config.host), *(t.arena_dir for t in config.device)) if place]
    return {arena.tier: (arena.data, arena.tables) for arena in list_arenas(places) if own and arena.instance == own}


def _check_memory(spec: TierSpec, data: Path, tables: Path, part: Part) -> Iterator[None]:
    check_holds(tables / TABLE_NAME, part)
    yield from check_arena(spec, data=data, tables=tables, part=part)


def _check_instance(state: Path, part: Part) -> Iterator[None]:
    """Checks the namespaces line by line, as the daemon restores them."""
    path = state / "namespaces.jsonl"
    registry = NamespaceRegistry()
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
        try:
            registry.restore([unsealed(line)])
        except CorruptRecord as error:
            fault = str(error).partition(": ")[2].partition("; ")[0]
            part.add(f"{path} line {number}", fault, "dropped: its blocks are misses, unless a tier knows it too")
        yield
    part.files = sum((state / name).exists() for name in ("instance", "namespaces.jsonl"))
