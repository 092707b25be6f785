"""SDK objects that can go to another process or client, and the errors of those that cannot."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.system.sdk import HOST
from tests.system.warm import Daemon
from tierd.client import AsyncClient, Client, Group, NamespaceSpec, PutGroup
from tierd.errors import StaleHandle, Unsupported


@pytest.mark.parametrize("carry", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy])
def test_pickling(carry: Callable[[Any], Any]) -> None:
    """Clients, leases and reservations refuse to be pickled by name; namespaces, groups and views
    work elsewhere."""
    spec = NamespaceSpec(model="pickled", tokens_per_block=16, block_bytes=4096)
    with Daemon(f"nvme = []\n{HOST}") as daemon, Client(daemon.target) as client, Client(daemon.target) as other:
        namespace = client.open_namespace(spec)
        assert client.put(namespace, list(range(32)), [bytes([1]) * 4096, bytes([2]) * 4096])
        got, lease = client.get(namespace, list(range(32))), client.acquire(namespace, namespace.hash(range(32)))
        pages = client.reserve(PutGroup.private(namespace, 1))
        for thing in (client, AsyncClient(daemon.target), lease, pages):
            with pytest.raises(Unsupported, match=f"{type(thing).__name__}: .*one in each process"):
                carry(thing)
        views = [carry(view) for view in got.views]
        assert [(view[0], len(view)) for view in views] == [(1, 4096), (2, 4096)]
        there = carry(Group(namespace, namespace.hash(range(32))))
        assert other.lookup(there).tokens == 32
        assert client.lookup(there).tokens == 32
        lease.release()
        pages.abort()


def test_a_namespace_of_another_tenant(tmp_path: Path) -> None:
    """Another tenant's namespace is refused by that name, without a word of epochs."""
    (tmp_path / "secrets").touch(mode=0o600)
    (tmp_path / "secrets").write_text("other " + "s" * 32 + "\n")
    (tmp_path / "mine").write_text("s" * 32)
    config = f'nvme = []\n[identity]\ncredential_file = "{tmp_path}/secrets"\n{HOST}'
    with (
        Daemon(config) as running,
        Client(running.target) as client,
        Client(running.target, credential_file=str(tmp_path / "mine")) as other,
    ):
        namespace = client.open_namespace(NamespaceSpec(model="mine", tokens_per_block=16, block_bytes=4096))
        with pytest.raises(StaleHandle, match="another tenant") as told:
            other.lookup(namespace, namespace.hash(range(16)))
        assert "epoch" not in str(told.value)
