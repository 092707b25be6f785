"""Every file system call of the store fails in every way, at its first to twentieth time, under
load.

`errno_matrix.py` has the cases and the checks after each; `test_errno_buffered.py` runs them
without O_DIRECT. `test_with_the_pauses_of_a_user` uses the breaker's default pauses.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner

from tests.depth import report, slow
from tests.system.blocks import BlockClient, await_true, connected
from tests.system.errno_matrix import HITS, JOURNAL, SEG, STRIKE_S, Case, matrix, through
from tests.system.shim.iofault import READS, SYNCS, WRITES
from tests.system.silenced import SILENT, Silenced
from tests.system.trouble import BACKENDS, STORE, Troubled, config, troubled
from tierd.cli import ctl
from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.errors import TierFailed, Unavailable
from tierd.testing import chain, content_of, is_content

HANDFUL = [
    (Case("put", WRITES, "short"), 1),
    (Case("put", WRITES, "EIO", SEG), 1),
    (Case("put", WRITES, "ENOSPC", JOURNAL), 1),
    (Case("put", SYNCS, "EIO", SEG), 1),
    (Case("put", SYNCS, "EIO", JOURNAL), 1),
    (Case("put", WRITES, "EINTR"), 1),
    (Case("get", READS, "EIO"), 1),
    (Case("get", READS, "short"), 1),
    (Case("mend", SYNCS, "EIO"), 1),
    (Case("mend", "fallocate", "ENOSPC"), 1),
    (Case("cut", "ftruncate", "EIO"), 1),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("direct", BACKENDS)
def test_handful(tmp_path: Path, direct: str) -> None:
    """A few cases of the matrix pass."""
    through(tmp_path, direct, HANDFUL)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_matrix(tmp_path: Path) -> None:
    """Each call x errno x its first to twentieth hit, with O_DIRECT if the file system supports it."""
    through(tmp_path, "auto", matrix("auto"))


@pytest.mark.timeout(120)
def test_with_the_pauses_of_a_user(tmp_path: Path) -> None:
    """With default pauses, writes resume within seconds after failed syncs, failed writes or a full disk."""
    resumed = {}
    with troubled(tmp_path, config()) as world:
        assert world.put() == 1
        for name, calls, fault, pattern in (
            ("slots' sync", SYNCS, "EIO", SEG),
            ("journal's sync", SYNCS, "EIO", JOURNAL),
            ("writes", WRITES, "EIO", STORE),
            ("full disk", f"{WRITES},fallocate", "ENOSPC", STORE),
        ):
            with world.io.armed(calls, fault, pattern):
                for _ in range(12):
                    assert world.put() == 0
                await_true(lambda: bool(world.client.tiers()["nvme.0"].trouble), "the store out of service for writes")
                assert world.client.tiers()["nvme.0"].serving
                assert world.put(durable=False) == 1
            resumed[name] = round(world.await_writes(), 2)
            assert world.io.synced_again == 0
        world.forget_memory()
        assert world.lost() == []
        failed = [line for line in world.daemon.log.splitlines() if "transfers failed" in line]
        assert failed
        assert all("Errno" in line for line in failed), "each says why"
    report(
        "writes resume, seconds", **{name.replace(" ", "_").replace("'", ""): took for name, took in resumed.items()}
    )


@pytest.mark.timeout(60)
def test_resume_by_command(tmp_path: Path) -> None:
    """`tierctl tiers` names a store's trouble; --resume retries at once and succeeds once the disk works."""
    pauses = 'retry_pause = "60 s"\nretry_pause_limit = "60 s"\n'
    with troubled(tmp_path, config() + pauses) as world:

        def tiers(*arguments: str) -> str:
            result = CliRunner().invoke(ctl.cli, ["tiers", *arguments, "--target", world.daemon.target])
            assert result.exit_code == 0, result.output
            return result.stdout

        assert "accepts no new blocks" not in tiers()
        with world.io.armed(SYNCS, "EIO", STORE):
            assert world.put() == 0
            await_true(lambda: "nvme.0 accepts no new blocks" in tiers(), "the trouble told")
            assert "could not be made durable" in tiers("--resume", "nvme.0")
        assert world.put() == 0, "the pause is not over"
        assert "accepts no new blocks" not in tiers("--resume", "nvme.0")
        assert world.put() == 1
        refused = CliRunner().invoke(ctl.cli, ["tiers", "--resume", "host.0", "--target", world.daemon.target])
        assert refused.exit_code == 2
        assert "nvme.0" in refused.stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", ["EMFILE", *slow("ENFILE", "EINTR", "EAGAIN", "ECONNABORTED")])
def test_accept(tmp_path: Path, fault: str) -> None:
    """After failed accepts new connections are accepted, and the existing ones go on."""
    with troubled(tmp_path, config()) as world:
        namespace = world.namespace
        with world.io.armed("accept", fault, "socket:*", times=20), connected(world.daemon) as other:
            assert other.put(namespace, chain(1, 2)) == 2
            assert world.client.read(namespace, chain(1, 2)) == 2
        assert world.client.status().state == "serving"


CROWD = """\
import sys
from tests.system.raw import RawClient
sessions = []
try:
    while len(sessions) < 64:
        sessions.append(RawClient(sys.argv[1]))
except (OSError, KeyError, ValueError):
    pass
print(len(sessions), flush=True)
sys.stdin.read()
"""
"""Opens sessions until one fails, and holds them until told to end."""


@pytest.mark.timeout(120)
def test_descriptors_run_out(tmp_path: Path) -> None:
    """Without free descriptors new sessions fail or wait, memory hits go on, and nothing is lost."""
    with troubled(tmp_path, config(direct="off")) as world:
        client, namespace = world.client, world.namespace
        assert client.put(namespace, chain(1, 8), durable=True) == 8
        assert (
            client.read(namespace, chain(1, 8)) == 8
        )  # maps the segment now; at the limit the daemon may have no descriptor left for it
        before = _descriptors(world.daemon.pid)
        resource.prlimit(world.daemon.pid, resource.RLIMIT_NOFILE, (before + 24, before + 24))
        command = [sys.executable, "-c", CROWD, world.daemon.target]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
            assert crowd.stdout
            sessions = int(crowd.stdout.readline())
            assert 0 < sessions < 64, "descriptors did not run out"
            assert client.read(namespace, chain(1, 8)) == 8
            world.put()
            crowd.communicate()
        await_true(lambda: _descriptors(world.daemon.pid) <= before + 2, "descriptors given back")
        world.await_writes()
        with connected(world.daemon) as other:
            assert other.read(other.open_namespace(), chain(1, 8)) == 8
        world.forget_memory()
        assert world.lost() == []
        assert client.read(namespace, chain(1, 8)) == 8
    report("descriptors", before=before, limit=before + 24, sessions=sessions)


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


MEMORY = "*/host.0/*"
"""The files of host memory, on a tmpfs."""
PLACES = 8
"""Segments that the tier has room for."""
SIZES = range(4096, (2 * PLACES + 1) * 4096, 4096)
"""Block sizes of twice as many size classes; every second class in turn fills all places of the tier."""
MEMORY_CALLS = [
    ("fallocate", "ENOSPC"),
    ("open", "EMFILE"),
    *slow(("ftruncate", "ENOSPC"), ("rename", "EIO"), ("unlink", "EIO"), ("close", "EIO")),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", MEMORY_CALLS, ids="-".join)
def test_memory_in_trouble(tmp_path: Path, fault: tuple[str, str]) -> None:
    """Failing calls on host memory's files cost only blocks: no byte is wrong, and every place of
    the tier is usable again."""
    with troubled(tmp_path, config()) as world, Client(world.daemon.target) as client:
        memory, fired = Memory(client, world), 0
        for hit in range(1, HITS + 1):
            with world.io.armed(*fault, MEMORY, first=hit, times=1):
                begun = time.monotonic()
                while not world.io.fired() and time.monotonic() - begun < STRIKE_S:
                    memory.turn()
                fired += world.io.fired() > 0
            await_true(lambda: memory.turn() == PLACES, "every place in use")
        assert "Traceback" not in world.daemon.log, world.daemon.log[-3000:]
    report("memory in trouble", call=fault[0], fault=fault[1], hits=HITS, fired=fired)
    assert fired


class Memory:
    """A client that fills each place of the host tier with a segment of a new size class."""

    def __init__(self, client: Client, world: Troubled) -> None:
        self._client, self._world, self._seed = client, world, 0
        specs = [NamespaceSpec(model=f"of {size}", tokens_per_block=16, block_bytes=size) for size in SIZES]
        self._spaces = [client.open_namespace(spec) for spec in specs]

    def turn(self) -> int:
        """Evicts everything, stores a block of each size, and counts the right ones that a get gives."""
        self._seed += 1
        self._world.forget_memory()
        names = chain(self._seed, 1)
        return sum(self._is_stored(space, names) for space in self._spaces[self._seed % 2 :: 2])

    def _is_stored(self, space: OpenedNamespace, names: np.ndarray) -> bool:
        with contextlib.suppress(TierFailed):
            self._client.put(space, names, [content_of(names[0], space.spec.block_bytes)])
        with contextlib.suppress(TierFailed):
            views = self._client.get(space, names).views
            assert all(is_content(view, names[0]) for view in views), "a wrong byte"
            return len(views) == 1
        return False


NAMES = "*/state/namespaces*"
"""The file of known namespaces, and its replacement."""
NAMES_CALLS = [(SYNCS, "EIO"), *slow(("open", "EIO"), (WRITES, "ENOSPC"), ("rename", "EIO"), ("close", "EIO"))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", NAMES_CALLS, ids="-".join)
def test_names_in_trouble(tmp_path: Path, fault: tuple[str, str]) -> None:
    """An unwritable namespace is refused, others serve; once opened it survives SIGKILL with its blocks."""
    with troubled(tmp_path, config()) as world:
        client, spaces = world.client, dict[int, int]()
        for hit in range(1, HITS + 1):
            with world.io.armed(*fault, NAMES, first=hit, times=1):
                refused = [_is_refused(client, model=f"{hit} {number}") for number in range(hit)]
                assert world.io.fired()
            assert refused == [False] * (hit - 1) + [True]
            spaces[hit] = client.open_namespace(model=f"{hit} {hit - 1}")
            assert client.put(spaces[hit], chain(hit, 1), durable=True) == 1
        assert world.io.synced_again == 0
        world.daemon.restart()
        with connected(world.daemon) as world.client:
            for hit, space in spaces.items():
                assert world.client.open_namespace(model=f"{hit} {hit - 1}") == space
                assert world.client.read(space, chain(hit, 1)) == 1
        assert "Traceback" not in world.daemon.log, world.daemon.log[-3000:]


def _is_refused(client: BlockClient, *, model: str) -> bool:
    try:
        client.open_namespace(model=model)
    except grpc.RpcError:
        return True
    return False


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", slow("open", "fallocate", "rename", "pread", "pwrite", "fdatasync"))
def test_start_in_trouble(tmp_path: Path, call: str) -> None:
    """A start with a failing store call loses nothing for the next start."""
    with troubled(tmp_path, config()) as world:
        assert world.put(4) == 4
        world.daemon.kill()
        with contextlib.suppress(Unavailable), world.io.armed(call, "EIO", STORE, times=1):
            world.daemon.start()
            world.daemon.kill()
        assert "Traceback" not in world.daemon.log.split("serving")[-1]
        world.daemon.start()
        with connected(world.daemon) as world.client:
            assert world.lost() == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", SILENT)
def test_log_that_cannot_be_written(how: str) -> None:
    """A daemon without a writable log starts, serves, refuses and ends like any other."""
    with Silenced(how, config()) as daemon, connected(daemon) as client:
        space, names = client.open_namespace(model="m"), chain(1, 8)
        assert client.put(space, names, durable=True) == len(names)
        assert client.read(space, names) == len(names)
        with pytest.raises(grpc.RpcError, match="characters"):
            client.open_namespace(model="m" * 1_000_000)
        assert client.read(space, names) == len(names)
        assert daemon.stop() == 0
