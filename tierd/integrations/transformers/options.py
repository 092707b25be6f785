"""What a program may set when it makes a TierdStore.

Purpose: names and bounds. Non-purpose: what generate() is told. Invariant: as tierd.integrations.options.
"""

from __future__ import annotations

from pydantic import Field

from tierd.integrations.options import Options


class StoreOptions(Options):
    """tokens_per_block: of each block, and so the step in which prefixes are found; adapter: which of several adapters is switched on, where they are switched at
    run time; salt: separates what equal models must not share. threads and queue_limit have no use here: whoever asks for a cache waits for it."""

    tokens_per_block: int = Field(default=32, ge=1, le=4096)
    adapter: str = ""
    salt: str = ""
