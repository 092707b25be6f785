"""A daemon's directories, from the environment.

Daemon and clients share this rule. It creates no directories and checks no owners. Standard library
only, so the SDK may import it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SOCKET_NAME = "tierd.sock"
"""gRPC."""
SESSION_SOCKET_NAME = "session.sock"
"""The session socket."""
SOCKET_PATH_MAX_BYTES = 107
"""The size of sun_path without its final zero."""


def runtime_dir(environ: Mapping[str, str], *, uid: int) -> str:
    """The directory of the sockets. TIERD_RUNTIME_DIR, else $XDG_RUNTIME_DIR/tierd, else
    /run/tierd, else /tmp/tierd-<uid>."""
    return (
        environ.get("TIERD_RUNTIME_DIR")
        or _below(environ.get("XDG_RUNTIME_DIR"))
        or _usable("/run/tierd", uid=uid)
        or f"/tmp/tierd-{uid}"
    )


def state_dir(environ: Mapping[str, str], *, uid: int) -> str:
    """The directory of stores and identity. TIERD_STATE_DIR, else $XDG_STATE_HOME/tierd, else
    /var/lib/tierd, else in the user's home."""
    return (
        environ.get("TIERD_STATE_DIR")
        or _below(environ.get("XDG_STATE_HOME"))
        or _usable("/var/lib/tierd", uid=uid)
        or os.path.join(environ.get("HOME") or f"/tmp/tierd-{uid}", ".local/state/tierd")
    )


def _below(directory: str | None) -> str:
    return os.path.join(directory, "tierd") if directory else ""


def _usable(directory: str, *, uid: int) -> str:
    """The directory if this user may write there (root creates it), else ""."""
    return directory if uid == 0 or os.access(directory, os.W_OK | os.X_OK) else ""
