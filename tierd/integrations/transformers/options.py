"""Options of a TierdStore.

Names and bounds are checked as in tierd.integrations.options. Options of generate() are not here.
"""

from __future__ import annotations

from pydantic import Field

from tierd.integrations.options import Options


class StoreOptions(Options):
    """tokens_per_block: the step in which prefixes are found. salt: separates equal models.
    adapter: the active adapter, if adapters are switched at run time.
    The caller waits for a cache, so threads and queue_limit have no use."""

    tokens_per_block: int = Field(default=32, ge=1, le=4096)
    adapter: str = ""
    salt: str = ""
