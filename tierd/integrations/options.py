"""Options that a user may set in tierd's part of an engine's configuration.

All engines use the same names; the set is checked as a whole. The engine's own options are not
here. An unknown name or an impossible value is a ConfigError that names the place and the allowed
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierd.errors import ConfigError


class Options(BaseModel):
    """Options of every engine. target: directory of the daemon's sockets ("": TIERD_TARGET, or this
    user's daemon). model, weights_digest: identify the model if the engine's own name does not.
    threads: simultaneous transfers. queue_limit: waiting ones; beyond it loads miss and saves
    are dropped. least_load_tokens: smaller matches are not loaded.
    advisor: tokens that are faster to compute than to load are computed.

    codec: encodes blocks before they are stored, such as "rot-8-8"; "": not at all. Engines share
    blocks only with engines of the same codec. calibration: the file of a calibrated codec.
    error_limit: the greatest error of a value that the engine accepts from stores that have a
    codec; 0: exact blocks alone, "inf": any error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = ""
    model: str = ""
    weights_digest: str = ""
    timeout_s: float = Field(default=5.0, gt=0)
    lookup_timeout_s: float = Field(default=0.25, gt=0)
    threads: int = Field(default=2, ge=1, le=64)
    queue_limit: int = Field(default=256, ge=1)
    least_load_tokens: int = Field(default=0, ge=0)
    advisor: bool = True
    codec: str = ""
    calibration: str = ""
    error_limit: float = Field(default=0.0, ge=0)

    @classmethod
    def read(cls, words: Mapping[str, Any], *, where: str) -> Self:
        """Reads an engine's configuration, which errors call `where`. Raises ConfigError."""
        try:
            return cls.model_validate(dict(words))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{where}.{name}: {first['msg'].lower()}, found {first['input']!r:.80}; known are {', '.join(sorted(cls.model_fields))}"
            ) from error
