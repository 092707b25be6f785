"""What a user may set in the part of an engine's configuration that is ours.

Purpose: one set of names for all engines, checked as a whole. Non-purpose: what the engine itself is told. Invariant: an unknown name or an impossible
value is a ConfigError that says where it stands and what may stand there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierd.errors import ConfigError


class Options(BaseModel):
    """Of every engine. target: directory of the daemon's sockets ("": TIERD_TARGET, or this user's daemon); model, weights_digest: what tells this model from
    others, where the engine's own name for it does not; threads, queue_limit: transfers at one time, and
    waiting ones, beyond which loads are misses and saves are dropped; least_load_tokens: a smaller match is not worth a load."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = ""
    model: str = ""
    weights_digest: str = ""
    timeout_s: float = Field(default=5.0, gt=0)
    lookup_timeout_s: float = Field(default=0.25, gt=0)
    threads: int = Field(default=2, ge=1, le=64)
    queue_limit: int = Field(default=256, ge=1)
    least_load_tokens: int = Field(default=0, ge=0)

    @classmethod
    def read(cls, words: Mapping[str, Any], *, where: str) -> Self:
        """From an engine's configuration. where: what the engine calls it, for errors. Raises ConfigError."""
        try:
            return cls.model_validate(dict(words))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{where}.{name}: {first['msg'].lower()}, found {first['input']!r:.80}; known are {', '.join(sorted(cls.model_fields))}"
            ) from error
