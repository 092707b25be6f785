"""fsck reports planted damage in each kind of file, nothing in a healthy one, and changes no byte."""

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
    """A daemon that holds eight blocks, in memory and in its store."""
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
    """Runs `tierctl fsck` in this process."""
    environ = {"TIERD_RUNTIME_DIR": daemon.target, "TIERD_STATE_DIR": str(daemon.root / "state"), "COLUMNS": "80"}
    return CliRunner().invoke(ctl.cli, ["fsck", *arguments], env=environ)


def _sums(daemon: Daemon) -> dict[Path, str]:
    """Digests of every file of the daemon, locks included."""
    files = [path for top in (daemon.root / "state", daemon.arena) for path in top.rglob("*") if path.is_file()]
    return {path: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in files}


def test_where_nothing_is_kept(tmp_path: Path) -> None:
    """Without a used directory fsck checks nothing, exits with 2 and names the directory."""
    (tmp_path / "config.toml").write_text('[[host]]\ncapacity = "8 MiB"\n')
    for arguments in ([], ["--json"], ["--config", str(tmp_path / "config.toml")]):
        environ = {"TIERD_STATE_DIR": str(tmp_path / "none"), "TIERD_CONFIG": None}
        result = CliRunner().invoke(ctl.cli, ["fsck", *arguments], env=environ)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"nothing to check: {tmp_path}/none has no files" in result.stderr
        assert "--config" in result.stderr
    assert not (tmp_path / "none").exists()


def test_nothing_is_found_where_nothing_is_wrong(daemon: Daemon) -> None:
    """After SIGKILL or a stop, fsck reads every block, reports nothing and changes no byte."""
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
    """After SIGKILL under load on a full store fsck reports no finding."""
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
    """Puts more chains than the store holds. Sets `enough` after `number` chains; ends with the daemon."""
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
"""The damage: its plant, and the part, place and fault of the one finding that it must give."""


def test_one_flipped_bit_is_found(daemon: Daemon) -> None:
    """One flipped bit in any kind of file gives one finding at its place, and fsck changes no byte."""
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
    """Restores every file's bytes at the end."""
    before = {path: path.read_bytes() for path in _sums(daemon)}
    yield
    for path, raw in before.items():
        if path.read_bytes() != raw:
            path.write_bytes(raw)


def test_damage_in_a_snapshot_is_found(daemon: Daemon) -> None:
    """fsck reports damage in a snapshot's header, tables and rows. A start drops damaged rows silently."""
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
    """A journal cut in its last record gives a note and no finding. Damage in its middle is a finding."""
    daemon.kill()
    (path,) = (daemon.root / "state").rglob("journal-*.log")
    whole = path.read_bytes()
    for cut in random.Random(1).sample(range(1, 200), 10):
        path.write_bytes(whole[:-cut])
        store = _check(daemon)[-1]
        assert (store.findings, len(store.notes)) == ([], 1), cut
    path.write_bytes(
        whole[:60] + b"\xff\x0f" + whole[62:]
    )  # a length that reaches beyond the file's end, with whole records after it
    assert [finding.part for finding in _findings(daemon)] == ["nvme.0"]


def test_what_the_daemon_makes_of_it_is_what_was_told(daemon: Daemon) -> None:
    """After a finding the daemon starts and serves the blocks before the bad one."""
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
    """fsck refuses a running daemon's files, and names the process and --online."""
    with pytest.raises(AlreadyOwned, match=f"process {daemon.pid}.*--online"):
        _check(daemon)
    refused = _run(daemon, "--config", str(_config(daemon)))
    assert (refused.exit_code, "--online" in refused.stderr) == (2, True)
    with connected(daemon) as client:
        assert client.read(client.open_namespace(block_bytes=LENGTH), NAMES) == len(NAMES)


def test_online(daemon: Daemon) -> None:
    """fsck --online scrubs every tier and audits the accounts: 0, or 1 after planted damage."""
    clean = _run(daemon, "--online")
    assert (clean.exit_code, "records are consistent" in clean.stdout) == (0, True), clean
    flip(daemon.root / "state", BAD, shift=100)
    assert _run(daemon, "--online").exit_code == 1
    assert _run(daemon, "--online").exit_code == 0


def test_the_command_says_what_it_found(daemon: Daemon) -> None:
    """fsck exits with 0, with 1 and the findings, or with 3 without a daemon. JSON has the same."""
    daemon.stop()
    healthy = _run(daemon, "--config", str(_config(daemon)))
    assert (healthy.exit_code, "blocks and their metadata: no problems." in healthy.stdout) == (0, True), healthy
    flip(daemon.root / "state", BAD, shift=100)
    found = _run(daemon, "--config", str(_config(daemon)))
    assert (found.exit_code, "slot 3: the bytes are not those of its digest" in found.stdout) == (1, True), found
    assert '"clean": false' in _run(daemon, "--config", str(_config(daemon)), "--json").stdout
    assert _run(daemon, "--online").exit_code == ExitCode.NO_DAEMON
