"""A life of the next version's daemon: `python -m tests.system.next_version ROOT ARENA` raises every format by one, then does as golden_life says.

It prints in which tiers it found the golden blocks, every byte compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import sys

from tierd.core.formats import versions

FORMATS = ("META", "CATALOGUE", "ARENA", "SESSIONS", "STORE", "JOURNAL", "SNAPSHOT", "DIRECTORY")


def main() -> None:
    """Raises the versions before anything of the daemon is imported."""
    for name in FORMATS:
        now = getattr(versions, name)
        setattr(versions, name, dataclasses.replace(now, oldest=now.current, current=now.current + 1))
    golden_life = importlib.import_module("tests.system.golden_life")
    print(json.dumps(asyncio.run(golden_life.life({"root": sys.argv[1], "arena": sys.argv[2]}))))


if __name__ == "__main__":
    main()
