"""The next version's daemon on the golden files: `python -m tests.system.next_version ROOT ARENA`.

It raises every format version by one and runs golden_life. It prints the tiers of the golden blocks
and compares every byte.
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
    """Raises the versions before any import of the daemon's modules."""
    for name in FORMATS:
        now = getattr(versions, name)
        setattr(versions, name, dataclasses.replace(now, oldest=now.current, current=now.current + 1))
    golden_life = importlib.import_module("tests.system.golden_life")
    print(json.dumps(asyncio.run(golden_life.life({"root": sys.argv[1], "arena": sys.argv[2]}))))


if __name__ == "__main__":
    main()
