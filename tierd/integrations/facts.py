"""What an engine says of itself to the daemon, for `tierctl engines`.

Purpose: enough to tell which engines share blocks, and why others do not. Non-purpose: identity; that is the namespace's. Invariant: texts only, within
what a hello may say.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

WORD_CHARS = 128
"""The longest text that a hello carries."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """engine, version: as the engine calls itself; face: which of our integrations; hash_algorithm, hash_seed: what its block hashes are made with ("" where
    tierd's own are used); tokens_per_block, dtype, layout: of its KV; ranks: "0/2", this one of how many; role: what of the engine this process is."""

    engine: str
    version: str
    face: str
    model: str = ""
    hash_algorithm: str = ""
    hash_seed: str = ""
    tokens_per_block: str = ""
    dtype: str = ""
    layout: str = ""
    ranks: str = ""
    role: str = ""
    load_failure_policy: str = ""

    def words(self) -> dict[str, str]:
        """What is known, as a hello carries it."""
        return {name: str(value)[:WORD_CHARS] for name, value in asdict(self).items() if value != ""}
