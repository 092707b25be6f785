"""Daemons for the threat table, and clients of other users with their actions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.blocks import BlockClient, Leased
from tests.system.elsewhere import Elsewhere
from tests.system.peers import NAMES
from tierd.testing import Daemon

CONFIG = """\
[server]
shutdown_deadline = "2 s"
[scrub]
period = "0 s"
[[host]]
capacity = "8 MiB"
segment = "1 MiB"
verify = "{verify}"
[[nvme]]
capacity = "16 MiB"
segment = "2 MiB"
"""
FIRST_UID, SECOND_UID, GROUP = 54421, 54422, 54420
TEAM = f'\n[identity]\ntenants = {{"{FIRST_UID}" = "team", "{SECOND_UID}" = "team"}}\n'
TRIES = 256 * 20
"""Hits under "sampled", one in 256 checked, that miss a change in two of a thousand million runs."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of other users, which takes root")


def made(verify: str = "first_hit", *, more: str = "", sealed: bool = False) -> Daemon:
    """A daemon, not started, whose sockets belong to a group, as with a unit file."""
    config = CONFIG.replace("[[host]]", "[[host]]\nsealed_puts = true") if sealed else CONFIG
    daemon = Daemon(config.replace("{verify}", verify) + more)
    Path(daemon.target).mkdir()
    if os.geteuid() == 0:
        daemon.root.chmod(0o755)
        os.chown(daemon.target, 0, GROUP)
        Path(daemon.target).chmod(0o2750)
    return daemon


@contextlib.contextmanager
def running(verify: str = "first_hit", *, more: str = "", sealed: bool = False) -> Iterator[Daemon]:
    """A daemon for one test."""
    with made(verify, more=more, sealed=sealed) as daemon:
        yield daemon


def user(function: Any, daemon: Daemon, uid: int, **given: Any) -> Elsewhere:
    """Runs a function in a process of another user of the group."""
    return Elsewhere(function, daemon.target, uid=uid, gid=GROUP, **given)


def put(client: BlockClient, *, durable: bool = False) -> int:
    """Stores NAMES. Returns the namespace."""
    namespace = client.open_namespace()
    assert client.put(namespace, NAMES, durable=durable) == len(NAMES)
    return namespace


def scribble(client: BlockClient, leased: Leased) -> None:
    """Changes a committed block through the page that its writer still maps for writing."""
    client.page(leased.handles[0], writable=True)[5] ^= 1
