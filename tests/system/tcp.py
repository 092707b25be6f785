"""A daemon that also listens on loopback TCP, and its clients' credential."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.system.sdk import HOST

SECRET = "a-secret-of-some-length"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that no process listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def has_ipv6() -> bool:
    """Whether this machine's loopback has an IPv6 address."""
    try:
        return free_port("::1") > 0
    except OSError:
        return False


def remote_config(root: Path, port: int, *, host: str = HOST, address: str = "127.0.0.1") -> str:
    """A configuration; the credential is in root/secret."""
    (root / "secret").touch(mode=0o600)
    (root / "secret").write_text(SECRET + "\n")
    return f'[server]\ntcp_listen = "{address}:{port}"\ntcp_credential_file = "{root}/secret"\n\n{host}'
