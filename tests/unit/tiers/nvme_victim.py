"""A store for tests to kill. It prints `+ key ...` for durable blocks, `- key ...` before a free.

It flushes each line and never uses a key twice. Run as: nvme_victim.py DIRECTORY DIRECT SEED
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.unit.tiers.store_world import PAGES, PLACES, World, key_of
from tierd.core.formats.model import BlockStatus
from tierd.tiers.store import ledger

ledger.JOURNAL_LIMIT_BYTES = 24 << 10  # compacts often


def say(sign: str, keys: list[int]) -> None:
    print(sign, *keys, flush=True)


async def churn(world: World, random: random.Random) -> None:
    found = await world.open()
    number, key = found.next_segment, max((key_of(m) for m in found.metas), default=0) + 1_000_000
    living = {s.slot: s.segment for s in found.segments}
    while True:
        place = random.randrange(PLACES)
        if place not in living or random.random() < 0.02:
            number, living[place] = number + 1, number
            gone = [k for k, (extent, _) in world.held.items() if extent["segment"][0] not in living.values()]
            if gone:
                say("-", gone)
                world.free(gone)
            await world.begin(living[place], place=place)
        slots = random.sample(range(PAGES), random.randrange(1, PAGES))
        keys = list(range(key, key + len(slots)))
        key += len(slots)
        taken = set(zip([living[place]] * len(slots), slots, strict=True))
        old = [k for k, (e, _) in world.held.items() if (int(e["segment"][0]), int(e["slot"][0])) in taken]
        if old:
            say("-", old)
            world.free(old)
        assert set(await world.write(keys, segment=living[place], slots=slots)) == {BlockStatus.READY}
        await world.store.sync()
        say("+", keys)


if __name__ == "__main__":
    directory, direct, seed = sys.argv[1:]
    asyncio.run(churn(World.at(Path(directory), direct=direct), random.Random(int(seed))))
