"""The credential of TCP, as both sides read it from a file.

One rule for its form, so clients can send every credential that the daemon accepts. The daemon
compares it in server/grpc/guard.py; server/session/identity.py is for the session socket.
"""

from __future__ import annotations

import re
from pathlib import Path

from tierd.errors import ConfigError

_SENDABLE = re.compile(r"[ -~]*")
"""In a header of a call."""


def read_bearer(path: str, *, setting: str) -> str:
    """The file's text without surrounding blanks. setting: names the path. Raises ConfigError."""
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
