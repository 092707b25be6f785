"""Lives of a daemon without its sockets, on the directories of tests/golden/v1 and v2.

`python -m tests.system.golden_life` rewrites the golden files: only with a new version number.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.hexed import from_text, to_text
from tests.unit.cache.world import World, opened
from tierd.core.formats.block import NamespaceSpec
from tierd.core.formats.model import PUT_BLOCK, ROOT, Durability, TierKind
from tierd.core.plan import GroupQuery, PutQuery
from tierd.testing import chain, content_of, is_content

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
VERSIONS = ("v1", "v2")
"""Old to new. The last is what today's code writes."""
INSTANCE = "0123456789abcdef"
SIZES = """
[[host]]
capacity = "256 KiB"
segment = "64 KiB"
arena_dir = "{arena}"
[[nvme]]
path = "{root}/state/nvme-0"
capacity = "256 KiB"
segment = "64 KiB"
"""
CONFIG = f"""
[server]
runtime_dir = "{{root}}/run"
state_dir = "{{root}}/state"
{SIZES}"""
SPEC = NamespaceSpec(model="golden", tokens_per_block=16, block_bytes=512)
SEEDS = {"on both": 1, "in memory": 2, "told by the journal": 3}
COUNT = 3
"""Blocks of each chain."""

Places = dict[str, str]
Stored = dict[int, Durability]


def lay_out(places: Places, version: str = VERSIONS[-1]) -> None:
    """Writes the golden files into the directories of a daemon."""
    for path in sorted((GOLDEN / version).rglob("*.hex")):
        part, *rest = path.relative_to(GOLDEN / version).with_suffix("").parts
        target = (Path(places["root"]) / "state" if part == "state" else _arena(places)).joinpath(*rest)
        for directory in reversed(target.parents):
            directory.mkdir(mode=0o700, exist_ok=True)
        target.write_bytes(from_text(path.read_text()))


async def life(
    places: Places, *, stores: Stored | None = None, during: Callable[[], None] = lambda: None
) -> dict[str, list[str]]:
    """One life: stores these chains, finds the tiers of each of SEEDS, and calls `during` before it ends."""
    async with opened(CONFIG, places=places) as world:
        world.namespace = world.cache.open_namespace(world.session, SPEC)
        await world.daemon.keep_namespaces(world.namespace)
        for seed, durability in (stores or {}).items():
            await _put(world, seed, durability)
        found = {what: await _found(world, seed) for what, seed in SEEDS.items()}
        during()
        return found


async def _put(world: World, seed: int, durability: Durability) -> None:
    blocks = np.zeros(COUNT, dtype=PUT_BLOCK)
    blocks["hash"], blocks["tokens"], blocks["length"] = chain(seed, COUNT), 16, SPEC.block_bytes
    query = PutQuery(namespace=world.namespace.id, parent=ROOT, position=0, blocks=blocks)
    reserved = await world.cache.reserve(world.session, [query], kind=TierKind.HOST)
    for row, name in zip(reserved.extents[0], chain(seed, COUNT), strict=True):
        world.page(row)[:] = content_of(name, SPEC.block_bytes).tobytes()
    await world.commit(reserved.reservation, durability=durability)


async def _found(world: World, seed: int) -> list[str]:
    names = chain(seed, COUNT)
    query = GroupQuery((world.namespace.id,), names, tokens_per_block=16, tokens=16 * COUNT)
    lease = await world.cache.acquire(world.session, [query], kind=TierKind.HOST, timeout_s=10)
    rows = [row for group in lease.served.groups for row in group.extents.reshape(-1)]
    assert all(is_content(world.page(row), name) for row, name in zip(rows, names, strict=False)), "a wrong byte"
    tiers = zip(world.daemon.tiers, lease.tier_tokens, strict=True)
    return [tier.spec.name for tier, tokens in tiers for _ in range(tokens // 16)] if rows else []


# -- the files


def _arena(places: Places) -> Path:
    return Path(places["arena"]) / f"tierd-{os.geteuid()}" / INSTANCE / "host.0"


def _keep(places: Places) -> None:
    """Saves the current files as golden files, without spare files and locks."""
    state = Path(places["root"]) / "state"
    for part, base in (("state", state), ("arena", _arena(places))):
        for path in base.rglob("*"):
            if path.is_file() and path.suffix != ".lock" and not path.name.startswith("spare-"):
                target = GOLDEN / VERSIONS[-1] / part / path.relative_to(base)
                target.parent.mkdir(parents=True, exist_ok=True)
                data = path.read_bytes()
                target.with_name(target.name + ".hex").write_text(to_text(data))


def _write() -> None:
    """The first life ends with a snapshot. The second is copied before its end, with a journal."""
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory(dir="/dev/shm") as arena:
        places = {"root": root, "arena": arena}
        (Path(root) / "state").mkdir(mode=0o700)
        (Path(root) / "state" / "instance").write_text(INSTANCE)
        asyncio.run(life(places, stores={1: Durability.DURABLE}))
        rest = {2: Durability.MEMORY, 3: Durability.DURABLE}
        asyncio.run(life(places, stores=rest, during=lambda: _keep(places)))


if __name__ == "__main__":
    _write()
