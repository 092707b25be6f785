"""Up- and downgrade by one version: the older data is served by both; newer data is refused, kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.system.blocks import connected
from tests.system.golden_life import COUNT, SEEDS, SPEC, VERSIONS, Places, lay_out, life
from tests.system.raw import ask, connect, hello
from tests.system.sdk import count_calls
from tests.system.test_restart import wipe_arena
from tests.unit.cache.world import directories
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.checksum import record_checksum
from tierd.client import Client
from tierd.client.session import session
from tierd.core.formats import directory
from tierd.core.formats.versions import Versions
from tierd.errors import VersionMismatch
from tierd.testing import Daemon, chain
from tierd.testing.daemon import Process
from tierd.tiers.io.format_check import HEADS, Head

ROOT = Path(__file__).resolve().parents[2]
CONFIG = f"""\
[identity]
tenants = {{ "{os.geteuid()}" = "t" }}
[[host]]
capacity = "256 KiB"
segment = "64 KiB"
[[nvme]]
capacity = "256 KiB"
segment = "64 KiB"
"""
IN_MEMORY = {what: ["host.0"] * COUNT for what in SEEDS}
STEP_S = 60.0


@pytest.fixture
def places() -> Iterator[Places]:
    """The newest golden directories, laid out."""
    with directories() as made:
        lay_out(made)
        yield made


def hashes(places: Places) -> dict[str, str]:
    """Hashes of all files except locks, which hold the process id of their last user."""
    paths = [path for place in places.values() for path in Path(place).rglob("*") if path.suffix != ".lock"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


def of_next_version(path: Path, head: Head) -> None:
    """Raises the version that a head names, and seals it again."""
    raw = bytearray(path.read_bytes())
    raw[8:12] = (head.versions.current + 1).to_bytes(4, "little")
    raw[head.sealed_bytes : head.sealed_bytes + 8] = record_checksum(bytes(raw[: head.sealed_bytes])).to_bytes(
        8, "little"
    )
    path.write_bytes(raw)


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_directories_are_served(version: str) -> None:
    """A daemon serves an older version's blocks from memory. Without memory it serves stored ones."""
    with Daemon(CONFIG, root=None) as daemon:
        assert daemon.stop() == 0
        shutil.rmtree(daemon.root / "state")
        wipe_arena(daemon)
        lay_out({"root": str(daemon.root), "arena": str(daemon.arena)}, version)
        daemon.start()
        with connected(daemon) as client:
            namespace = client.open_namespace(model=SPEC.model, block_bytes=SPEC.block_bytes)
            for expected in ([COUNT, 0], [0, COUNT]):
                for what, seed in SEEDS.items():
                    group = pb.Group(namespace=namespace, hashes=chain(seed, COUNT).tobytes())
                    reply = client.call(client.cache.Acquire, pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST))
                    client.call(client.cache.Release, pb.ReleaseRequest(leases=[reply.lease]))
                    is_gone = expected[0] == 0 and what == "in memory"
                    assert [n // 16 for n in reply.tier_tokens] == ([0, 0] if is_gone else expected), what
                    assert client.read(namespace, chain(seed, COUNT)) == (0 if is_gone else COUNT)
                client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
        assert "damaged" not in daemon.log and "Traceback" not in daemon.log, daemon.log


def test_golden_life(places: Places) -> None:
    """Without sockets too, memory serves the golden directories; the tests below rely on it."""
    assert asyncio.run(life(places)) == IN_MEMORY


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.pattern)
def test_next_version_is_refused_and_kept(places: Places, head: Head) -> None:
    """One file of the next version causes VersionMismatch with its name and versions; no file changes."""
    path = next(path for place in places.values() for path in sorted(Path(place).rglob(head.pattern)))
    of_next_version(path, head)
    before = hashes(places)
    version = head.versions.current
    with pytest.raises(
        VersionMismatch, match=rf"{path.name}: .*version {version + 1}, this tierd reads \d+ to {version};"
    ):
        asyncio.run(life(places))
    assert hashes(places) == before


def test_next_store_is_refused_and_kept(places: Places) -> None:
    """The same for a store.json that names the next version."""
    (path,) = Path(places["root"]).rglob("store.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    before = hashes(places)
    with pytest.raises(VersionMismatch, match=r"store\.json: store version 2, this tierd reads 1 to 1"):
        asyncio.run(life(places))
    assert hashes(places) == before


def test_next_version_reads_ours_and_we_refuse_its(places: Places) -> None:
    """The next version serves our data; today's version refuses the next one's data and keeps it."""
    command = [sys.executable, "-m", "tests.system.next_version", places["root"], places["arena"]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=STEP_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == IN_MEMORY
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=STEP_S, check=False)
    assert json.loads(again.stdout.splitlines()[-1]) == IN_MEMORY, again.stderr[-3000:]
    before = hashes(places)
    with pytest.raises(VersionMismatch):
        asyncio.run(life(places))
    assert hashes(places) == before


OLDER = {-1: "client", 1: "daemon"}
"""The side to upgrade, by the versions that the client is ahead."""


@pytest.mark.parametrize("step", OLDER, ids=["an older client", "an older daemon"])
def test_client_of_another_version(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart with another protocol, a client gets VersionMismatch with both versions. The
    message names the side to upgrade. With best effort, the call is a miss."""
    with Daemon() as daemon:
        client, careless = Client(daemon.target), Client(daemon.target, best_effort=True)
        assert client.put(client.open_namespace(SPEC), chain(1, 1), [bytes(SPEC.block_bytes)])
        careless.connect()
        daemon.restart()
        its, other = session.PROTO_VERSION, session.PROTO_VERSION + step
        monkeypatch.setattr(session, "PROTO_VERSION", other)
        refusal = f"client speaks protocol {other}.*daemon protocol {its}.*upgrade the {OLDER[step]}'s tierd"
        with pytest.raises(VersionMismatch, match=refusal):
            client.lookup(client.open_namespace(SPEC), chain(1, 1))
        assert careless.lookup(careless.open_namespace(SPEC), chain(1, 1)).tokens == 0
        monkeypatch.undo()
        assert client.lookup(client.open_namespace(SPEC), chain(1, 1)).tokens == 16


@pytest.mark.parametrize(
    ("theirs", "remedy"),
    [
        ({"format": 0}, "client speaks protocol 2, format 0.*upgrade the client's tierd$"),
        ({"format": 3}, "client speaks protocol 2, format 3.*upgrade the daemon's tierd$"),
        ({"proto": 3, "format": 0}, "client speaks protocol 3, format 0.*upgrade the daemon's tierd$"),
        ({"proto": "2"}, "use one tierd on both sides$"),
        ({"format": None}, "use one tierd on both sides$"),
    ],
)
def test_hello_of_another_version(theirs: dict[str, object], remedy: str) -> None:
    """A hello with other versions is refused with both sides' versions and the remedy."""
    with Daemon() as daemon, connect(daemon.target) as raw:
        refusal, _ = ask(raw, hello(**theirs))
        assert refusal["error"] == "VersionMismatch"
        assert re.search(remedy, refusal["message"]) and "daemon protocol 2, format 2" in refusal["message"]


class OtherDaemon(Daemon):
    """A daemon that is one protocol version ahead or behind."""

    step = 1

    def _spawn(self, arguments: Sequence[str], *, env: Mapping[str, str], log: int) -> Process:
        other = (
            f"from tierd.server.session import session_requests; session_requests.PROTO_VERSION += {self.step};"
            f"from tierd.cli.daemon import cli; cli.main({list(arguments)!r}, prog_name='tierd')"
        )
        return subprocess.Popen([sys.executable, "-c", other], env=env, stdout=log, stderr=log)


@pytest.mark.parametrize("step", [-1, 1], ids=["an older daemon", "a newer daemon"])
def test_daemon_of_another_version(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients and tierctl report another daemon's version mismatch and the side to upgrade."""
    monkeypatch.setattr(OtherDaemon, "step", step)
    remedy = f"upgrade the {OLDER[-step]}'s tierd"
    with OtherDaemon() as daemon, Client(daemon.target) as client:
        with pytest.raises(VersionMismatch, match=remedy):
            client.open_namespace(SPEC)
        command = [sys.executable, "-m", "tierd.cli.ctl", "status", "--target", daemon.target]
        said = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False)
        assert said.returncode == 1 and remedy in said.stderr and "Traceback" not in said.stderr


@pytest.mark.parametrize("version", [0, 2])
def test_directory_of_another_version(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that cannot read the daemon's directory version calls the daemon each time, and is served."""
    monkeypatch.setattr(directory, "DIRECTORY", Versions("directory", version, version))
    asked = count_calls(monkeypatch)
    with Daemon() as daemon, Client(daemon.target) as client:
        namespace, blocks = client.open_namespace(SPEC), [bytes([7]) * SPEC.block_bytes]
        assert client.put(namespace, chain(1, 1), blocks)
        out = bytearray(SPEC.block_bytes)
        for _ in range(3):
            assert client.get(namespace, chain(1, 1), out=out).blocks == 1
            assert client.lookup(namespace, chain(1, 1)).tokens == 16
        assert out == blocks[0] and (asked["Acquire"], asked["Lookup"]) == (3, 3)
