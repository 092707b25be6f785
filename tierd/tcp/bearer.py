"""The credential of TCP, as both sides read it from a file.

Purpose: one rule for what it may be, so that what the daemon takes a client can send. Non-purpose: comparing (server/grpc/guard.py), credentials of the session socket (server/session/identity.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from tierd.errors import ConfigError

_SENDABLE = re.compile(r"[ -~]*")
"""In a header of a call."""


def read_bearer(path: str, *, setting: str) -> str:
    """What the file holds, without the blanks around it. setting: which gave the path. Raises ConfigError."""
    try:
        bearer = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {path} cannot be read ({error}); give the path of a text file") from error
    if not _SENDABLE.fullmatch(bearer):
        raise ConfigError(
            f"{setting}: {path} holds more than one line of printable ASCII, and no call can carry more; make one with"
            " `openssl rand -hex 32`"
        )
    return bearer
