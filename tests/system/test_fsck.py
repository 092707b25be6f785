"""fsck: finds what was planted in each kind of file, nothing in a healthy one, and changes no byte."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import xxhash
from click.testing import CliRunner, Result

from tests.depth import count
from tests.system.blocks import SOON_S, connected
from tests.system.test_corruption import CONFIG, LENGTH, NAMES, flip, flip_bit
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.cli import ctl
from tierd.cli.exits import ExitCode
from tierd.config import load_config
from tierd.errors import AlreadyOwned
from tierd.server.fsck import check
from tierd.testing import chain
from tierd.tiers.fsck.fsck import Finding, Part
from tierd.tiers.store.slots import HEADER_BYTES

BAD = 3


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that keeps eight blocks, in memory and on its store."""
    with Daemon(CONFIG) as running:
        with connected(running) as client:
            namespace = client.open_namespace(block_bytes=LENGTH)
            assert client.put(namespace, NAMES, length=LENGTH, durable=True) == len(NAMES)
        yield running


def _config(daemon: Daemon) -> Path:
    return daemon.root / "tierd.toml"


def _check(daemon: Daemon) -> list[Part]:
    environ = {"TIERD_RUNTIME_DIR": daemon.target, "TIERD_STATE_DIR": str(daemon.root / "state")}
    parts: list[Part] = []
    for parts in check(load_config(_config(daemon), environ=environ)):  # noqa: B007
        pass
    return parts


def _findings(daemon: Daemon) -> list[Finding]:
    return [finding for part in _check(daemon) for finding in part.findings]


def _run(daemon: Daemon, *arguments: str) -> Result:
    """`tierctl fsck`, in this process."""
    environ = {"TIERD_RUNTIME_DIR": daemon.target, "TIERD_STATE_DIR": str(daemon.root / "state"), "COLUMNS": "80"}
    return CliRunner().invoke(ctl.cli, ["fsck", *arguments], env=environ)


def _sums(daemon: Daemon) -> dict[Path, str]:
    """Of every file that the daemon keeps, locks and all."""
    files = [path for top in (daemon.root / "state", daemon.arena) for path in top.rglob("*") if path.is_file()]
    return {path: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in files}


def test_where_nothing_is_kept(tmp_path: Path) -> None:
    """Where the configuration, or its absence, names no place that a daemon has used, nothing was checked: exit code 2, and it says where it looked."""
    (tmp_path / "config.toml").write_text('[[host]]\ncapacity = "8 MiB"\n')
    for arguments in ([], ["--json"], ["--config", str(tmp_path / "config.toml")]):
        environ = {"TIERD_STATE_DIR": str(tmp_path / "none"), "TIERD_CONFIG": None}
        result = CliRunner().invoke(ctl.cli, ["fsck", *arguments], env=environ)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"nothing to check: {tmp_path}/none has no files" in result.stderr
        assert "--config" in result.stderr
    assert not (tmp_path / "none").exists()


def test_nothing_is_found_where_nothing_is_wrong(daemon: Daemon) -> None:
    """After SIGKILL and after an orderly end: every block is looked at, nothing is found, and not a byte is changed."""
    for end in (daemon.kill, daemon.stop):
        end()
        before = _sums(daemon)
        parts = _check(daemon)
        looked_at = [(part.name, part.blocks, part.findings) for part in parts]
        assert looked_at == [("instance", 0, []), ("host.0", 8, []), ("nvme.0", 8, [])]
        assert [part.bytes for part in parts] == [part.total_bytes for part in parts] == [0, 8 * LENGTH, 8 * LENGTH]
        assert _sums(daemon) == before
        daemon.start()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(count(test=2, nightly=20, weekly=200)))
def test_nothing_is_found_after_a_death_under_load(seed: int) -> None:
    """SIGKILL while clients put, get and evict in a store that is full: what is left is in order, or a note."""
    with Daemon(CONFIG) as daemon:
        enough = threading.Event()
        worker = threading.Thread(target=_put_for_ever, args=(daemon, random.Random(seed).randint(10, 90), enough))
        worker.start()
        assert enough.wait(60), f"seed {seed}"
        daemon.kill()
        worker.join(SOON_S)
        before = _sums(daemon)
        assert _findings(daemon) == [], f"seed {seed}"
        assert _sums(daemon) == before


def _put_for_ever(daemon: Daemon, number: int, enough: threading.Event) -> None:
    """Chains of eight blocks, more than the store holds; tells when there were so many, and ends with the daemon."""
    with contextlib.suppress(grpc.RpcError, OSError), connected(daemon) as client:
        namespace = client.open_namespace(block_bytes=LENGTH)
        for turn in itertools.count():
            client.put(namespace, chain(turn, 8), length=LENGTH, durable=turn % 3 > 0)
            if turn >= number:
                enough.set()


Plant = Callable[[Daemon], None]


def _in_file(pattern: str, at: int) -> Plant:
    def plant(daemon: Daemon) -> None:
        found = [path for top in (daemon.root / "state", daemon.arena) for path in top.rglob(pattern)]
        flip_bit(max(found), at)

    return plant


def _from_end(pattern: str, back: int) -> Plant:
    def plant(daemon: Daemon) -> None:
        (path,) = (daemon.root / "state").rglob(pattern)
        flip_bit(path, path.stat().st_size - back)

    return plant


def _entry(daemon: Daemon) -> None:
    (path,) = daemon.arena.rglob("*.cat")
    at = path.read_bytes().find(NAMES[BAD].tobytes())
    flip_bit(path, at)


def _without_arena(daemon: Daemon) -> None:
    flip(daemon.root / "state", BAD, shift=0)


PLANTS: dict[str, tuple[Plant, str, str, str]] = {
    "page": (lambda d: flip(d.arena, BAD, shift=LENGTH - 1), "host.0", "page 3", "bytes are not those of its digest"),
    "entry": (_entry, "host.0", "page 3", "entry is damaged"),
    "catalogue": (_in_file("*.cat", 20), "host.0", ".cat", "header's checksum"),
    "arena": (_in_file("arena.tbl", 20), "host.0", "arena.tbl", "checksum"),
    "names": (_in_file("namespaces.log", 40), "host.0", "namespaces.log", "checksum"),
    "sessions": (_in_file("sessions.tbl", 9), "host.0", "sessions.tbl", "header"),
    "payload": (_without_arena, "nvme.0", "slot 3", "bytes are not those of its digest"),
    "last byte": (lambda d: flip(d.root / "state", BAD, shift=LENGTH - 1), "nvme.0", "slot 3", "bytes are not"),
    "header": (
        lambda d: flip(d.root / "state", BAD, shift=100 - HEADER_BYTES),
        "nvme.0",
        "slot 3",
        "header is damaged",
    ),
    "table": (lambda d: flip(d.root / "state", BAD, shift=256 - HEADER_BYTES), "nvme.0", "slot 3", "header is damaged"),
    "journal": (_from_end("journal-*.log", 3), "nvme.0", "journal-", "checksum does not match"),
    "journal's head": (_in_file("journal-*.log", 12), "nvme.0", "journal-", "checksum does not match"),
    "description": (_in_file("store.json", 1), "nvme.0", "store.json", "not a description"),
    "namespaces": (_in_file("namespaces.jsonl", 60), "instance", "line 1", "checksum does not match"),
}
"""What is damaged: how, and part, place and fault of the one finding that must come of it."""


def test_one_flipped_bit_is_found(daemon: Daemon) -> None:
    """In each kind of file: one finding, at its place, and not a byte more is changed."""
    daemon.kill()
    for what, (plant, part, place, fault) in PLANTS.items():
        with _mended(daemon):
            plant(daemon)
            before = _sums(daemon)
            findings = _findings(daemon)
            assert len(findings) == 1, (what, findings)
            (found,) = findings
            assert (found.part, place in found.where, fault in found.fault) == (part, True, True), (what, found)
            assert found.outcome
            assert _sums(daemon) == before, what
    assert _findings(daemon) == []


@contextlib.contextmanager
def _mended(daemon: Daemon) -> Iterator[None]:
    """Every file has the bytes from before again, afterwards."""
    before = {path: path.read_bytes() for path in _sums(daemon)}
    yield
    for path, raw in before.items():
        if path.read_bytes() != raw:
            path.write_bytes(raw)


def test_damage_in_a_snapshot_is_found(daemon: Daemon) -> None:
    """In its head, its tables, and its rows, which are lost without a word at the start."""
    daemon.stop()
    (path,) = (daemon.root / "state").rglob("snapshot-*.bin")
    for at, fault in ((20, "header's checksum"), (100, "checksum of its tables"), (-300, "damaged pieces")):
        with _mended(daemon):
            flip_bit(path, at % path.stat().st_size)
            before = _sums(daemon)
            (found,) = _findings(daemon)
            assert ("snapshot-" in found.where, fault in found.fault) == (True, True), found
            assert _sums(daemon) == before


def test_a_torn_journal_is_a_note(daemon: Daemon) -> None:
    """Cut anywhere in its last record, as a crash cuts it: no finding; the same bytes gone from its middle are one."""
    daemon.kill()
    (path,) = (daemon.root / "state").rglob("journal-*.log")
    whole = path.read_bytes()
    for cut in random.Random(1).sample(range(1, 200), 10):
        path.write_bytes(whole[:-cut])
        store = _check(daemon)[-1]
        assert (store.findings, len(store.notes)) == ([], 1), cut
    path.write_bytes(
        whole[:60] + b"\xff\x0f" + whole[62:]
    )  # a length that reaches beyond the end, whole records behind it
    assert [finding.part for finding in _findings(daemon)] == ["nvme.0"]


def test_what_the_daemon_makes_of_it_is_what_was_told(daemon: Daemon) -> None:
    """After a finding the daemon starts, and serves the blocks before the bad one."""
    daemon.kill()
    for directory in (daemon.arena, daemon.root / "state"):
        flip(directory, BAD, shift=5)
    assert len(_findings(daemon)) == 2
    daemon.start()
    with connected(daemon) as client:
        assert client.read(client.open_namespace(block_bytes=LENGTH), NAMES) == BAD
        for tier in ("host.0", "nvme.0"):
            client.call(client.admin.Evict, apb.EvictRequest(tier=tier))
    daemon.stop()
    assert _findings(daemon) == []


def test_a_running_daemon_is_left_alone(daemon: Daemon) -> None:
    """Refused, with the process that runs and the way to check it all the same."""
    with pytest.raises(AlreadyOwned, match=f"process {daemon.pid}.*--online"):
        _check(daemon)
    refused = _run(daemon, "--config", str(_config(daemon)))
    assert (refused.exit_code, "--online" in refused.stderr) == (2, True)
    with connected(daemon) as client:
        assert client.read(client.open_namespace(block_bytes=LENGTH), NAMES) == len(NAMES)


def test_online(daemon: Daemon) -> None:
    """A scrub of every tier and an audit of the books, through the daemon: 0, then 1 once something was planted."""
    clean = _run(daemon, "--online")
    assert (clean.exit_code, "records are consistent" in clean.stdout) == (0, True), clean
    flip(daemon.root / "state", BAD, shift=100)
    assert _run(daemon, "--online").exit_code == 1
    assert _run(daemon, "--online").exit_code == 0


def test_the_command_says_what_it_found(daemon: Daemon) -> None:
    """0 and one row a part; 1 with place, fault and outcome; 3 where no daemon answers. JSON has the same."""
    daemon.stop()
    healthy = _run(daemon, "--config", str(_config(daemon)))
    assert (healthy.exit_code, "blocks and their metadata: no problems." in healthy.stdout) == (0, True), healthy
    flip(daemon.root / "state", BAD, shift=100)
    found = _run(daemon, "--config", str(_config(daemon)))
    assert (found.exit_code, "slot 3: the bytes are not those of its digest" in found.stdout) == (1, True), found
    assert '"clean": false' in _run(daemon, "--config", str(_config(daemon)), "--json").stdout
    assert _run(daemon, "--online").exit_code == ExitCode.NO_DAEMON
