"""A daemon that also listens on loopback TCP, and what its callers must bring."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.system.sdk import HOST

SECRET = "a-secret-of-some-length"


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remote_config(root: Path, port: int, *, host: str = HOST) -> str:
    """Configuration; the credential is in root/secret."""
    (root / "secret").touch(mode=0o600)
    (root / "secret").write_text(SECRET + "\n")
    return f'[server]\ntcp_listen = "127.0.0.1:{port}"\ntcp_credential_file = "{root}/secret"\n\n{host}'
