"""Facts that an engine reports to the daemon, for `tierctl engines`.

They show which engines share blocks and why others do not. Identity is not here; the namespace
defines it. All facts are texts within a hello's limits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

WORD_CHARS = 128
"""The longest text that a hello carries."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """engine, version: as the engine calls itself. `face` names our integration. hash_algorithm,
    hash_seed: of its block hashes, "" if it uses tierd's own. tokens_per_block, dtype, layout:
    of its KV. ranks: "0/2" is rank 0 of 2. `role` names this process's part of the engine."""

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
        """The known facts, in the form that a hello carries."""
        return {name: str(value)[:WORD_CHARS] for name, value in asdict(self).items() if value != ""}
