"""The address of the daemon: TIERD_TARGET and its defaults.

This module parses addresses. It opens and creates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from tierd.errors import InvalidArgument
from tierd.linux.trust import find_stranger
from tierd.places import SESSION_SOCKET_NAME, SOCKET_NAME, SOCKET_PATH_MAX_BYTES, runtime_dir


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """A directory with the sockets of a daemon on this machine."""

    directory: str

    @property
    def rpc_path(self) -> str:
        """The gRPC socket."""
        return str(Path(self.directory) / SOCKET_NAME)

    @property
    def session_path(self) -> str:
        """The session socket."""
        return str(Path(self.directory) / SESSION_SOCKET_NAME)

    def __str__(self) -> str:
        return self.directory


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """A daemon reached over TCP: put and get only, no handles.

    codec: for chunks (tierd/tcp/codecs.py); empty: they are not encoded.
    """

    host: str
    port: int
    codec: str = ""

    @property
    def address(self) -> str:
        """host:port, with IPv6 hosts in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.address}?codec={self.codec}" if self.codec else self.address


Target = LocalTarget | RemoteTarget


def resolve_target(text: str | None = None, *, environ: Mapping[str, str] = os.environ) -> Target:
    """Parses a target; without one takes TIERD_TARGET, else the default directory.

    A directory contains a slash or is `.` or `..`. All else is host:port or host:port?codec=name.
    Raises InvalidArgument if the text is neither, or the socket's path is too long.
    """
    text = text or environ.get("TIERD_TARGET") or _default(environ)
    if "/" not in text and text not in (".", ".."):
        return _remote(text)
    target = LocalTarget(text)
    size = len(os.fsencode(target.session_path))
    if size > SOCKET_PATH_MAX_BYTES:
        raise InvalidArgument(
            f"target {text}: its socket path has {size} bytes, above the {SOCKET_PATH_MAX_BYTES} that a unix socket may have;"
            " choose a shorter directory"
        )
    return target


def _default(environ: Mapping[str, str]) -> str:
    """This user's runtime directory, or /run/tierd if only that one holds a trusted socket."""
    own = runtime_dir(environ, uid=os.getuid())
    if environ.get("TIERD_RUNTIME_DIR"):
        return own
    # Another user's daemon may serve this user too, unless TIERD_RUNTIME_DIR names a directory.
    places = (own, "/run/tierd")
    hidden = [place for place in places if Path(place).is_dir() and not os.access(place, os.X_OK)]  # connecting raises
    sockets = {place: Path(place) / SESSION_SOCKET_NAME for place in places if place not in hidden}
    found = {place for place, socket in sockets.items() if socket.exists() and not find_stranger(place)}
    return next((place for place in places if place in hidden or place in found), own)


def _remote(text: str) -> RemoteTarget:
    place, _, options = text.partition("?")
    host, colon, port = place.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if not colon or not host or (":" in host) != is_bracketed or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgument(
            f"target {text!r}: neither a directory nor host:port; write for example /run/tierd, 127.0.0.1:9440 or [::1]:9440"
        )
    given = dict(parse_qsl(options, keep_blank_values=True))
    codec = given.pop("codec", "")
    if given:
        raise InvalidArgument(
            f"target {text!r}: {next(iter(given))!r} is no option of a target; the option is codec=lz4"
        )
    return RemoteTarget(host, int(port), codec)
