"""Incidents from the field (reliability-study 2.2 to 2.4): crashes, tenants and hashes, exposure.
Incidents of 2.1 are in test_regressions.py. SHOWN names the tests elsewhere that cover most.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.depth import count, report
from tests.repo.source import imports, modules
from tests.system.blocks import BlockClient, connected
from tests.system.sdk import MIB, SMALL, put, right
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.client import Client
from tierd.core.formats.block import hash_tokens
from tierd.errors import ERROR_KEY
from tierd.testing import Daemon, chain, content_of

TESTS = Path(__file__).resolve().parents[1]
SHOWN = {
    "dead workers reaped after minutes, space back after more": "system/test_client_deaths.py::test_deaths",
    "living ranks reaped": "system/test_client_ends.py::test_living_client",
    "another process under the number of one that is gone": "unit/server/session/test_sessions.py::test_restoring_for_another_process",
    "cleanup that waits for a lock": "unit/client/session/test_session.py::test_letting_go_never_waits",
    "a restart that unlinks the memory of living ranks": "system/test_restart_live.py::test_restarts_with_live_clients",
    "chaos that kills the master alone": "system/test_crash.py::test_killed_again_and_again",
    "memory of an instance that is no more": "system/test_cli.py::test_drain_then_purge",
    "an allocation that spins for ever": "system/test_pressure.py::test_asking_for_twice_the_tier",
    "prefixes of another tenant, by time or by name": "system/test_tenants.py::test_stranger_gets_nothing",
    "a tenant that the request names": "unit/server/session/test_identity.py::test_tenant_of_an_unlisted_uid",
    "a salt that is no part of the name": "property/test_hashes.py::test_a_digest_tells_apart_whatever_differs",
    "the same hashes in two namespaces": "property/test_hashes.py::test_namespaces_share_no_hash",
    "open by default": "system/test_remote.py::test_no_tcp_by_default",
    "open on every interface": "system/test_remote.py::test_loopback_alone",
    "methods that nobody guards": "system/test_remote.py::test_every_method_wants_the_credential",
    "operators' verbs for everybody": "system/test_remote.py::test_operators_are_local",
    "a server that never evicts": "system/test_races.py::test_evict_against_read",
}
"""Each incident and the test that shows tierd's behaviour."""
CONFIG = """\
[[host]]
capacity = "16 MiB"
segment = "2 MiB"

[[nvme]]
capacity = "32 MiB"
segment = "4 MiB"
"""
COUNT = 8
RESETS = count(test=400, nightly=20_000, weekly=100_000)
AT_ONCE = 16
"""Calls in flight, within a session's credits."""
NESTED = 100_000
UNSAFE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
HASHES = "from tierd.core.formats.block import hash_tokens as h; print(h(range(40), digest=bytes(32), tokens_per_block=16, with_tail=True).tobytes().hex())"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon with host memory above an NVMe store."""
    with Daemon(CONFIG) as running:
        yield running


@pytest.mark.parametrize("incident", SHOWN)
def test_elsewhere(incident: str) -> None:
    """The test that SHOWN names exists."""
    path, _, name = SHOWN[incident].partition("::")
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


# -- crashes


@pytest.mark.slow
def test_memory_does_not_pile_up() -> None:
    """Elsewhere, killed servers filled /dev/shm until none could start. A tierd daemon that is
    repeatedly killed, at its start too, uses its capacity plus a few tables, and serves each
    time."""
    with Daemon(CONFIG) as daemon:
        for turn in range(5):
            with Client(daemon.target) as client:
                assert put(client, client.open_namespace(SMALL), turn, COUNT).stored == COUNT
            daemon.kill()
            if turn % 2:
                daemon.start(wait=False, failpoints="arena.open.after_recovery=kill")
                assert daemon.await_end() == -9
            daemon.start()
            assert taken(daemon.arena) < 20 * MIB, turn


def taken(directory: Path) -> int:
    """Bytes of memory or disk below a directory."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


# -- tenants and hashes


def test_no_tier_forgets_the_salt(daemon: Daemon) -> None:
    """Elsewhere, a far tier dropped the salt and served one tenant's blocks to another. In tierd,
    no other salt hits blocks of one salt on NVMe alone by their hashes, before or after a
    restart."""
    specs = [replace(SMALL, model="salted", salt=salt) for salt in ("one", "another", "")]
    for _ in range(2):
        with Client(daemon.target) as client:
            own, *others = [client.open_namespace(spec) for spec in specs]
            blocks = [content_of(name, SMALL.block_bytes) for name in chain(30, COUNT)]
            assert client.put(own, chain(30, COUNT), blocks, durable=True).stored == COUNT
            evict(daemon)
            assert [client.get(space, chain(30, COUNT)).blocks for space in others] == [0, 0]
            assert right(client.get(own, chain(30, COUNT)).views, 30) == COUNT
        daemon.restart()


def evict(daemon: Daemon) -> None:
    """Evicts everything from host memory."""
    with BlockClient(daemon.target) as raw:
        raw.call(raw.admin.Evict, apb.EvictRequest(tier="host.0"))


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_hashes_are_those_of_every_process(seed: str) -> None:
    """Elsewhere, hashes were predictable or differed by process. Here PYTHONHASHSEED has no effect."""
    command = [sys.executable, "-c", HASHES]
    found = subprocess.run(
        command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    expected = hash_tokens(range(40), digest=bytes(32), tokens_per_block=16, with_tail=True)
    assert found.stdout.strip() == expected.tobytes().hex()


# -- exposure


def test_nothing_is_unpickled() -> None:
    """Elsewhere, servers unpickled and ran network bytes. No tierd module can decode executable input."""
    wrong = [
        (module.name, name)
        for module in modules()
        for name in (*imports(module.tree), *called(module.tree))
        if name.partition(".")[0] in UNSAFE or "json_format" in name or name in ("eval", "exec", "__import__")
    ]
    assert wrong == []


def called(tree: ast.AST) -> list[str]:
    """Names of functions called by their bare name."""
    return [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]


def test_messages_that_nest_without_end(daemon: Daemon) -> None:
    """Elsewhere, nested messages overflowed the parser's stack. Here they raise InvalidArgument."""
    with connected(daemon) as client:
        for verb in ("Lookup", "Acquire", "Reserve", "Commit"):
            method = client._channel.unary_unary(f"/tierd.v1.Cache/{verb}")
            with pytest.raises(grpc.RpcError) as refused:
                method(b"\x0b" * NESTED, metadata=client.metadata, timeout=15)
            assert dict(refused.value.trailing_metadata() or ()).get(ERROR_KEY) == "InvalidArgument"
        assert client.status().state == "serving"


@pytest.mark.timeout(600)
def test_calls_that_are_begun_and_reset(daemon: Daemon) -> None:
    """Elsewhere, thousands of calls that were begun and reset used up the server's memory. Here
    another client is served during them, and the daemon grows by less than 64 MiB."""
    with connected(daemon) as rude, connected(daemon) as other:
        namespace = other.open_namespace()
        assert other.put(namespace, chain(40, COUNT)) == COUNT
        request = pb.LookupRequest(groups=[pb.Group(namespace=namespace, hashes=chain(40, COUNT).tobytes())])
        before = resident(daemon)
        for _ in range(RESETS // AT_ONCE):
            for call in [rude.cache.Lookup.future(request, metadata=rude.metadata, timeout=15) for _ in range(AT_ONCE)]:
                call.cancel()
            assert other.read(namespace, chain(40, COUNT)) == COUNT
        grown = resident(daemon) - before
        report("calls that are reset", calls=RESETS, grown_mib=round(grown / MIB, 1))
        assert grown < 64 * MIB
        assert rude.lookup(namespace, chain(40, COUNT)) == COUNT


def resident(daemon: Daemon) -> int:
    """Bytes of the daemon's own memory."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
