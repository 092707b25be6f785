"""`tierctl record` on real daemons: recordings are correct and anonymous; file faults fail no call."""

from __future__ import annotations

import gzip
import json
import os
import resource
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.system.blocks import await_true
from tests.system.test_replay import BLOCK_BYTES, CONFIG, conversations
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.cli.ctl import cli
from tierd.cli.trace import read_trace
from tierd.client import Client, Group, NamespaceSpec, OpenedNamespace
from tierd.simulator.sequences import Request
from tierd.testing import chain

SMALL = """\
[[host]]
capacity = "32 MiB"
segment = "2 MiB"
"""
TOKENS = 16
MODEL = "a-model-with-a-name"
SALT = "a-salt-of-somebody"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon shared by this file, with memory alone."""
    with Daemon(SMALL) as started:
        yield started


def run(daemon: Daemon, *arguments: str) -> Result:
    """Runs a verb."""
    return CliRunner().invoke(cli, [*arguments, "--target", daemon.target])


def record(daemon: Daemon, *arguments: str) -> dict[str, Any]:
    """The JSON answer of `record`."""
    result = run(daemon, "record", *arguments, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def opened(client: Client) -> OpenedNamespace:
    return client.open_namespace(NamespaceSpec(model=MODEL, tokens_per_block=TOKENS, block_bytes=4096, salt=SALT))


def kept(daemon: Daemon) -> set[str]:
    """Names of files with recordings."""
    return {path.name for path in (daemon.root / "state" / "recordings").iterdir()}


def renumbered(requests: list[Request]) -> list[tuple[int, int, list[int]]]:
    """Times, lengths, and ids by first appearance."""
    numbers: dict[int, int] = {}
    return [(r.time_ms, r.tokens, [numbers.setdefault(i, len(numbers)) for i in r.blocks]) for r in requests]


def test_a_replayed_trace_is_recorded_as_it_is(tmp_path: Path) -> None:
    """A recording has the trace's times, lengths and shared prefixes, and its replay has equal hits."""
    trace, sums = conversations(tmp_path / "made-up.gz", count=40), []
    for _ in range(2):
        with Daemon(CONFIG) as daemon:
            path = record(daemon, "start", "taken")["path"]
            how = ("--lockstep", "--block-bytes", str(BLOCK_BYTES), "--target", daemon.target, "--json")
            replayed = CliRunner().invoke(cli, ["replay", str(trace), *how])
            sums.append(json.loads(replayed.stdout)["tier_tokens"])
            told = record(daemon, "stop")
            found, wanted = list(read_trace(Path(path))), list(read_trace(trace))
            trace = Path(gzip_copy(Path(path), tmp_path / "again.gz"))
        assert renumbered(found) == [(t, n, ids) for t, n, ids in renumbered(wanted)]
        assert {(r.block_tokens, r.block_bytes, r.namespace) for r in found} == {(512, BLOCK_BYTES, 0)}
        assert (told["requests"], told["lost"], told["reason"]) == (40, 0, "stopped")
        assert (told["blocks"], told["distinct"]) == (len(flat(wanted)), len(set(flat(wanted))))
    assert sums[0] == sums[1]
    assert sum(sums[0].values())


def gzip_copy(path: Path, target: Path) -> Path:
    """Copies the file to a path that outlives the daemon."""
    target.write_bytes(path.read_bytes())
    return target


def flat(requests: list[Request]) -> list[int]:
    return [block for request in requests for block in request.blocks]


def test_nothing_of_the_blocks_can_be_recognised(daemon: Daemon) -> None:
    """A recording has no hash, model, salt or tenant; ids always begin at 0; only the owner can read it."""
    paths, names = [], []
    with Client(daemon.target) as client:
        space = opened(client)
        for number in range(2):
            paths.append(Path(record(daemon, "start", f"n{number}")["path"]))
            names.append(chain(number, 5))
            client.acquire(space, names[-1])
            record(daemon, "stop")
    texts = [gzip.decompress(path.read_bytes()) for path in paths]
    for hashes in names:
        for name in hashes:
            raw = name.tobytes()
            spellings = [
                raw[:6],
                raw[:6].hex().encode(),
                *(str(int.from_bytes(raw[:8], o)).encode() for o in ("little", "big")),
            ]
            assert not [spelling for spelling in spellings for text in texts if spelling in text]
    assert not [word for word in (MODEL, SALT, "uid-") for text in texts if word.encode() in text]
    assert [tuple(request.blocks) for path in paths for request in read_trace(path)] == [(0, 1, 2, 3, 4)] * 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o700
    assert paths[0].parent.parent == daemon.root / "state"


def test_engines_that_look_and_then_load_make_one_request(daemon: Daemon) -> None:
    """A prompt's lookup, another session's acquire of the hit, and the put of the rest are one request."""
    with Client(daemon.target) as scheduler, Client(daemon.target) as worker:
        space, prompt = opened(scheduler), chain(1, 8)
        worker.put(opened(worker), prompt[:5], [bytes(4096)] * 5)
        path = record(daemon, "start")["path"]
        for _ in range(2):
            found = scheduler.lookup([Group(space, prompt)])
            worker.acquire(opened(worker), prompt[: found.tokens // TOKENS]).release()
        assert found.tokens == 5 * TOKENS
        worker.put(opened(worker), prompt, [bytes(4096)] * 8)
        told = record(daemon, "stop")
    assert (told["requests"], told["lost"]) == (2, 0)
    assert [(r.tokens, tuple(r.blocks)) for r in read_trace(Path(path))] == [(8 * TOKENS, tuple(range(8)))] * 2


def test_a_killed_daemon_leaves_what_was_written() -> None:
    """After SIGKILL or a stop, a recording is a valid prefix of the traffic; the next life can record."""
    with Daemon(SMALL) as daemon:
        with Client(daemon.target, best_effort=True) as client:
            space = opened(client)
            path = Path(record(daemon, "start", "first")["path"])
            asked = 0
            while record(daemon, "status")["requests"] < 20:
                for _ in range(20):
                    client.acquire(space, chain(asked, 3))
                    asked += 1
            written = record(daemon, "status")["requests"]
            daemon.kill()
        found = list(read_trace(path))
        assert written <= len(found) <= asked
        assert [tuple(r.blocks) for r in found] == [tuple(range(3 * i, 3 * i + 3)) for i in range(len(found))]
        with Client(daemon.start().target) as client:
            assert record(daemon, "status")["state"] == "none"
            again = run(daemon, "record", "start", "first")
            assert (again.exit_code, "exists already" in again.stderr) == (2, True)
            path = Path(record(daemon, "start", "second")["path"])
            client.acquire(opened(client), chain(1, 3))
        daemon.stop()
        assert len(list(read_trace(path))) == 1


def test_one_recording_at_a_time(daemon: Daemon) -> None:
    """A second start or stop is refused with the reason, and so are invalid names and options."""
    record(daemon, "start", "one")
    second = run(daemon, "record", "start", "two")
    assert (second.exit_code, "only one may run" in second.stderr) == (1, True)
    assert record(daemon, "stop")["state"] == "ended"
    stopped = run(daemon, "record", "stop")
    assert (stopped.exit_code, "none is running; one has ended: stopped" in stopped.stderr) == (1, True)
    for name in ("../two", "/tmp/two", ".two", "a/b", "x" * 65, "a b", "-"):
        refused = run(daemon, "record", "start", name)
        assert (refused.exit_code, "name: " in refused.stderr) == (2, True), name
    for option in (("--max-bytes", "1 KiB"), ("--seconds", "1e9")):
        assert run(daemon, "record", "start", *option).exit_code == 2
    assert {"one.jsonl.gz"} <= kept(daemon) and not kept(daemon) & {"two.jsonl.gz", "a.jsonl.gz", "-.jsonl.gz"}


def test_a_recording_ends_by_itself(daemon: Daemon) -> None:
    """A recording ends at its size or time limit with the reason, and client calls still succeed."""
    with Client(daemon.target) as client:
        space = opened(client)
        record(daemon, "start", "timed", "--seconds", "100ms")
        await_true(lambda: record(daemon, "status")["state"] == "ended", "the end")
        assert "seconds are over" in record(daemon, "status")["reason"]
        path = Path(record(daemon, "start", "sized", "--max-bytes", "64 KiB")["path"])
        asked = 0
        while record(daemon, "status")["state"] == "recording":
            for _ in range(50):
                client.acquire(space, chain(asked, 200))
                asked += 1
        told = record(daemon, "status")
        assert client.put(space, chain(0, 4), [bytes(4096)] * 4)
    assert (told["bytes"], "would pass 65536 bytes" in told["reason"]) == (path.stat().st_size, True)
    assert 0 < told["bytes"] <= 65536
    assert 0 < len(list(read_trace(path))) == told["requests"] < asked


def test_a_file_that_cannot_grow_ends_it_and_nothing_else(daemon: Daemon) -> None:
    """When a write fails partway, the recording ends with the reason and a valid file; no call fails."""
    with Client(daemon.target) as client, connect(daemon.target) as operator:

        def told() -> pb.RecordReply:
            return operator.ask(pb.RecordStatusRequest())  # opens no new session, which would need a row in a file

        space = opened(client)
        assert client.put(space, chain(1, 4), [bytes(4096)] * 4)
        path = Path(record(daemon, "start", "cut")["path"])
        client.acquire(space, chain(1, 4)).release()
        await_true(lambda: told().requests == 1, "the first line")
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (path.stat().st_size + 40, limits[1]))
        for seed in range(2, 52):
            assert not client.acquire(space, chain(seed, 40))
        await_true(lambda: told().state == "ended", "the end")
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, limits)
        assert client.acquire(space, chain(1, 4)).tokens == 4 * TOKENS
        assert ("File too large" in told().reason, told().requests, told().lost) == (True, 1, 50)
    assert gzip.decompress(path.read_bytes()).count(b"\n") == 1


def test_a_stop_in_the_middle_of_traffic(daemon: Daemon) -> None:
    """While clients call, each recording holds complete requests in order and loses none."""
    stop = threading.Event()

    def ask() -> None:
        with Client(daemon.target) as client:
            space, number = opened(client), 0
            while not stop.is_set():
                client.acquire(space, chain(number, 1 + number % 7))
                number += 1

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            path = Path(record(daemon, "start", f"part{number}")["path"])
            await_true(lambda: os.stat(path).st_size > 0, "the first lines")  # noqa: B023  # called at once
            told = record(daemon, "stop")
            found = list(read_trace(path))
            assert (told["requests"], told["bytes"]) == (len(found), path.stat().st_size)
            assert told["lost"] == 0
            assert sorted(set(flat(found))) == list(range(told["distinct"]))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_full_directory_is_told(daemon: Daemon) -> None:
    """With 100 files in the directory, a new recording is refused."""
    record(daemon, "start", "last")
    record(daemon, "stop")
    made = [daemon.root / "state" / "recordings" / f"made{number}.jsonl.gz" for number in range(100)]
    for path in made:
        path.touch()
    refused = run(daemon, "record", "start", "one-more")
    for path in made:
        path.unlink()
    assert (refused.exit_code, "remove some" in refused.stderr) == (1, True)


def test_replay_knows_the_namespaces_of_a_recording(daemon: Daemon, tmp_path: Path) -> None:
    """A replay keeps a recording's two namespaces and their block sizes apart: they share no blocks."""
    lines: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 30, "hash_ids": [0, 1], "tokens_per_block": 16, "block_bytes": 4096},
        {"timestamp": 1, "input_length": 64, "hash_ids": [0, 1], "tokens_per_block": 32, "namespace": 1},
    ]
    path = tmp_path / "two"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *lines]))
    replayed = run(daemon, "replay", str(path), "--verify", "--json")
    sums = json.loads(replayed.stdout)
    assert (sums["tokens"], sum(sums["tier_tokens"].values()), sums["wrong_blocks"]) == (188, 94, 0)
    assert sums["bytes_written"] == 4096 + 4096 * 14 // 16 + 2 * 65536
