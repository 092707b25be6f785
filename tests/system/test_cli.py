"""tierctl and tierd against a real daemon: every verb, its JSON and its failures."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.system.warm import Daemon
from tierd.cli import ctl
from tierd.cli import daemon as tierd_cli
from tierd.cli.exits import ExitCode
from tierd.client import Client, NamespaceSpec

TOKENS = np.arange(16 * 6, dtype=np.uint32)
BLOCK_BYTES = 8192
WATCHED_PUTS = 200
"""A watcher must report an event within this many puts."""
MODEL = "cli-test"

Run = Callable[..., Result]
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def started() -> Iterator[Daemon]:
    """One daemon for the file."""
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def client(started: Daemon) -> Iterator[Client]:
    """A client that has put six blocks."""
    with Client(started.target, name="the test") as connected:
        space = connected.open_namespace(NamespaceSpec(model=MODEL, tokens_per_block=16, block_bytes=BLOCK_BYTES))
        assert connected.put(space, TOKENS, [bytes([i]) * BLOCK_BYTES for i in range(6)])
        yield connected


@pytest.fixture
def run(started: Daemon, client: Client) -> Run:
    """`run("status")` runs the verb against the daemon."""
    return lambda *arguments: CliRunner().invoke(ctl.cli, [*arguments, "--target", started.target], prog_name="tierctl")


@pytest.fixture
def ask(run: Run) -> Ask:
    """The verb's JSON."""

    def asked(*arguments: str) -> dict[str, Any]:
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    return asked


def test_status_tells_what_is_so(run: Run, ask: Ask, started: Daemon) -> None:
    """Status shows the daemon's pid, state and blocks, in JSON and in the picture."""
    status = ask("status")
    assert (status["pid"], status["state"], status["blocks"]) == (started.pid, "serving", 6)
    shown = run("status", "--counters").stdout
    assert f"pid {started.pid}" in shown and "host.0" in shown and "calls" in shown


def test_the_hit_ratio_is_what_clients_met(client: Client, run: Run, ask: Ask) -> None:
    """A full hit and a miss change the hit ratio by their tokens."""
    before = ask("status")["hits"]
    space = client.open_namespace(NamespaceSpec(model=MODEL, tokens_per_block=16, block_bytes=BLOCK_BYTES))
    assert client.get(space, TOKENS).tokens == TOKENS.size
    assert client.get(space, TOKENS + 1000).tokens == 0
    ask("top", "--interval", "50 ms")
    after = ask("status")["hits"]
    assert after["tokens_hit"] - before["tokens_hit"] == TOKENS.size
    assert after["tokens_asked"] - before["tokens_asked"] == 2 * TOKENS.size
    assert "host.0 " in run("status").stdout.split("hit ratio")[1]


def test_a_lookup_that_finds_nothing_is_a_miss(client: Client, ask: Ask) -> None:
    """An engine acquires only the tokens found, so lookups count the tokens that they did not find."""
    before = ask("status")["hits"]
    space = client.open_namespace(NamespaceSpec(model=MODEL, tokens_per_block=16, block_bytes=BLOCK_BYTES))
    assert client.lookup(space, space.hash(TOKENS + 2000)).tokens == 0
    assert client.lookup(space, space.hash(TOKENS)).tokens == TOKENS.size
    after = ask("status")["hits"]
    assert after["tokens_asked"] - before["tokens_asked"] == TOKENS.size
    assert after["tokens_hit"] == before["tokens_hit"]


def test_tiers_add_up(ask: Ask) -> None:
    """The host tier's pages hold the blocks, and its classes show the blocks' size."""
    host, nvme = ask("tiers")["tiers"]
    assert (host["name"], host["kind"], nvme["kind"]) == ("host.0", "host", "nvme")
    assert host["used_bytes"] >= 6 * BLOCK_BYTES
    assert host["classes"][0]["class_bytes"] == BLOCK_BYTES


def test_blocks_are_filtered_sorted_and_paged(ask: Ask) -> None:
    """Pages of the list cover it without overlap; filters narrow it, and the sort order holds."""
    first, second = (
        ask("blocks", "--sort", "position", "--limit", "4"),
        ask("blocks", "--sort", "position", "--limit", "4", "--offset", "4"),
    )
    assert [b["position"] for b in first["blocks"] + second["blocks"]] == [0, 1, 2, 3, 4, 5]
    one = first["blocks"][2]
    assert ask("blocks", "--prefix", one["hash"][:16])["blocks"] == [
        one | {"idle_s": pytest.approx(one["idle_s"], abs=60)}
    ]
    assert ask("blocks", "--tier", "nvme.0")["total"] + ask("blocks", "--pinned")["total"] == 0
    assert ask("blocks", "--namespace", str(one["namespace"]))["total"] == 6


def test_inspect_finds_parent_and_child(ask: Ask) -> None:
    """Inspect shows a block's page, its parent and its children."""
    chain = ask("blocks", "--sort", "position")["blocks"]
    seen = ask("inspect", chain[2]["hash"][:20])
    assert seen["block"]["parent"] == chain[1]["hash"]
    assert seen["children"] == [chain[3]["hash"]]
    assert [(page["tier"], page["state"]) for page in seen["pages"]] == [("host.0", "ready")]


def test_sessions_and_namespaces_name_who_is_there(ask: Ask) -> None:
    """The lists show the test's own session and its model."""
    sessions = {one["name"]: one for one in ask("sessions")["sessions"]}
    assert sessions["the test"]["pid"] == os.getpid()
    assert sessions["the test"]["state"] == "open"
    assert [one["blocks"] for one in ask("namespaces")["namespaces"] if one["model"] == MODEL and one["current"]] == [6]


def test_a_pinned_block_stays_when_all_is_evicted(ask: Ask) -> None:
    """Evict drops every block except pinned ones, and drops those after an unpin."""
    block = ask("blocks")["blocks"][0]["hash"]
    assert ask("pin", block)["blocks"] == 1
    assert ask("evict", "--all") == {"blocks": 5, "bytes": 5 * BLOCK_BYTES, "pinned": 1}
    assert ask("unpin", block)["blocks"] == 1
    assert ask("evict", block)["blocks"] == 1
    assert ask("status")["blocks"] == 0


def test_flushed_blocks_survive_eviction_from_memory(ask: Ask) -> None:
    """Flush writes missing blocks to NVMe once. Evicting the host tier then loses nothing."""
    assert ask("flush") == {"blocks": 6, "bytes": 6 * BLOCK_BYTES, "left": 0}
    assert ask("flush")["blocks"] == 0
    ask("evict", "--tier", "host.0")
    assert [block["tiers"] for block in ask("blocks")["blocks"]] == [["nvme.0"]] * 6
    ask("evict", "--all")


def test_an_epoch_bump_hides_what_was_stored(ask: Ask) -> None:
    """After an epoch bump the old blocks are gone, and the list shows the next epoch."""
    assert ask("epoch", "bump", "--model", MODEL) == {"namespaces": 1, "blocks": 6}
    assert ask("status")["blocks"] == 0
    epochs = {one["epoch"]: one["current"] for one in ask("namespaces")["namespaces"] if one["model"] == MODEL}
    assert [current for _, current in sorted(epochs.items())][-2:] == [False, True]


def test_top_counts_what_happens(ask: Ask) -> None:
    """A frame shows the tiers and the rates between two samples."""
    frame = ask("top", "--interval", "20 ms")
    assert frame["seconds"] >= 0.02
    assert {tier["name"] for tier in frame["tiers"]} == {"host.0", "nvme.0"}


def first_line(client: Client, lines: queue.Queue[str]) -> str:
    """Puts blocks until the watcher reports one, because it misses events from before it listens."""
    space = client.open_namespace(NamespaceSpec(model="a/watched", tokens_per_block=16, block_bytes=BLOCK_BYTES))
    for number in range(WATCHED_PUTS):
        tokens = np.arange(16, dtype=np.uint32) + 1000 * (number + 1)
        assert client.put(space, tokens, [bytes(BLOCK_BYTES)])
        with contextlib.suppress(queue.Empty):
            return lines.get(timeout=0.2)
    raise AssertionError(f"no event after {WATCHED_PUTS} puts")


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["lines", "json"])
def test_watch_tells_each_event_until_ctrl_c(started: Daemon, client: Client, words: list[str]) -> None:
    """watch writes one line for each event, and Ctrl-C ends it with 130 and an empty stderr."""
    # A background shell ignores Ctrl-C, and so would its children.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from tierd.cli.ctl import main; main()"
    command = [sys.executable, "-c", program, "watch", "--target", started.target, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: [lines.put(line) for line in process.stdout or ()]).start()
        try:
            line = first_line(client, lines)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 130
        finally:
            process.kill()
        assert process.stderr.read() == ""
    if words:
        event = json.loads(line)
        assert (event["kind"], event["tier"], len(event["hashes"][0])) == ("stored", "host.0", 64)
    else:
        assert line.split()[1:6] == ["stored", "host.0", "watched", "1", "block"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("inspect", "ab" * 32), 1, "no tier holds"),
        (("inspect", "not-hex"), 2, "hexadecimal"),
        (("evict", "--tier", "moon.0"), 1, "host.0"),
        (("epoch", "bump", "--model", "nobody"), 1, "nobody"),
        (("replay", __file__), 2, "line 1"),
        (("replay", "/nowhere"), 2, "/nowhere"),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_a_refusal_is_one_line(run: Run, arguments: tuple[str, ...], code: int, words: str) -> None:
    """A refusal is one line on stderr with thing, fault and remedy; the exit code gives its kind."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("tierctl: ") and result.stderr.count("\n") == 1 and words in result.stderr


@pytest.mark.parametrize("verb", ["status", "top", "watch", "blocks", "flush", "replay"])
def test_no_daemon_is_exit_code_3(tmp_path: Path, verb: str) -> None:
    """Without a daemon every verb prints one line that names the place and the remedy."""
    trace = tmp_path / "trace"
    trace.write_text('{"timestamp":0,"input_length":1,"hash_ids":[0]}\n')
    arguments = [verb, *([str(trace)] if verb == "replay" else []), "--target", str(tmp_path)]
    result = CliRunner().invoke(ctl.cli, arguments, prog_name="tierctl")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert str(tmp_path) in result.stderr and "tierd serve" in result.stderr


def test_drain_then_purge(tmp_path: Path) -> None:
    """Drain ends when nothing is held. `tierd purge` frees the rest once, and never under a running
    daemon."""
    with Daemon(root=tmp_path) as daemon:
        config = ["--config", str(tmp_path / "tierd.toml")]
        environment = {"TIERD_RUNTIME_DIR": daemon.target, "TIERD_STATE_DIR": str(tmp_path / "state")}
        purge = lambda: CliRunner(env=environment).invoke(tierd_cli.cli, ["purge", *config], prog_name="tierd")  # noqa: E731
        running = purge()
        assert running.exit_code == 1 and "held by process" in running.stderr
        drained = CliRunner().invoke(ctl.cli, ["drain", "--deadline", "2 s", "--target", daemon.target])
        assert (
            drained.stdout
            == "drained; no lease left. The daemon refuses new work until `tierctl drain --undo` or a restart.\n"
        )
        daemon.stop()
        assert "freed" in purge().stdout
        assert purge().stdout == "nothing to free\n"


def test_purge_of_stores_removes_them_and_nothing_else(tmp_path: Path) -> None:
    """`tierd purge --nvme` removes only the stores' own files, and only after the daemon's end."""
    space = NamespaceSpec("purged", 16, 4096)
    with Daemon(root=tmp_path) as daemon:
        (store,) = {path.parent for path in tmp_path.rglob("store.json")}
        (store / "somebody's").write_text("own")
        environment = {"TIERD_RUNTIME_DIR": daemon.target, "TIERD_STATE_DIR": str(tmp_path / "state")}
        words = ["purge", "--nvme", "--config", str(tmp_path / "tierd.toml")]
        purge = lambda: CliRunner(env=environment).invoke(tierd_cli.cli, words, prog_name="tierd")  # noqa: E731
        with Client(daemon.target) as client:
            assert client.put(client.open_namespace(space), list(range(16)), [bytes(4096)], durable=True)
        assert "held by process" in purge().stderr
        daemon.stop()
        said = purge()
        assert f"in {store}\n" in said.stdout and os.listdir(store) == ["somebody's"], said.output
        assert purge().stdout == "nothing to free\n"
        daemon.start()
        with Client(daemon.target) as client:
            assert client.get(client.open_namespace(space), list(range(16))).tokens == 0


def test_a_bad_configuration_is_one_line(tmp_path: Path) -> None:
    """`tierd serve` with an unknown key names the nearest key and exits with 2, without a traceback."""
    config = tmp_path / "bad.toml"
    config.write_text('[server]\nclok = "replay"\n')
    result = CliRunner().invoke(tierd_cli.cli, ["serve", "--config", str(config)], prog_name="tierd")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "server.clock" in result.stderr


def test_a_broken_pipe_is_quiet(started: Daemon, client: Client) -> None:
    """`tierctl blocks | head -1` ends without an error message."""
    command = [sys.executable, "-m", "tierd.cli.ctl", "blocks", "--target", started.target]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()


def test_a_daemon_runs_with_the_sizes_of_its_command_line(tmp_path: Path) -> None:
    """`tierd serve --memory --disk` without a file has tiers of these sizes in these places."""
    places = {"TIERD_RUNTIME_DIR": str(tmp_path / "run"), "TIERD_STATE_DIR": str(tmp_path / "state")}
    words = ["serve", "--release-on-exit", "--memory", "16MiB"]
    words += [word for name in ("a", "b") for word in ("--disk", f"{tmp_path / name}:8MiB")]
    command = [sys.executable, "-m", "tierd.cli.daemon", *words]
    with subprocess.Popen(command, env=os.environ | places, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                told = CliRunner().invoke(ctl.cli, ["--json", "tiers", "--target", str(tmp_path / "run")])
                if told.exit_code != ExitCode.NO_DAEMON:
                    break
                time.sleep(0.05)
        finally:
            process.terminate()
    tiers = [(one["capacity_bytes"], one["place"]) for one in json.loads(told.stdout)["tiers"]]
    assert [size for size, _ in tiers] == [16 << 20, 8 << 20, 8 << 20]
    assert [place for _, place in tiers[1:]] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_calls_of_tierctl_are_not_in_the_log(tmp_path: Path) -> None:
    """A daemon logs no line for a call of tierctl, and one for an engine's session."""
    with Daemon(root=tmp_path) as daemon:
        before = daemon.log
        for verb in ("status", "tiers", "sessions"):
            assert CliRunner().invoke(ctl.cli, [verb, "--target", daemon.target]).exit_code == 0
        assert daemon.log == before
        with Client(daemon.target) as client:
            client.open_namespace(NamespaceSpec(MODEL, 16, 4096))
        assert daemon.log.count("session open") == before.count("session open") + 1


def test_the_first_lines_of_a_log_say_where_the_daemon_is(tmp_path: Path) -> None:
    """A log begins with the tiers, their sizes and directories, and every address with its port."""
    (tmp_path / "credential").write_text("0123456789abcdef\n")
    (tmp_path / "credential").chmod(0o600)
    listen = (
        f'tcp_listen = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\ntcp_credential_file = "{tmp_path}/credential"'
    )
    tiers = f'[[host]]\ncapacity = "16 MiB"\n[[nvme]]\ncapacity = "8 MiB"\npath = "{tmp_path}/store"'
    with Daemon(f"[server]\n{listen}\n{tiers}", root=tmp_path) as daemon:
        lines = daemon.log.splitlines()
        first = "\n".join(lines[:5])
    for said in (
        "16 MiB",
        "8 MiB",
        f"{tmp_path}/store",
        f"{daemon.target}/session.sock",
        f"{daemon.target}/tierd.sock",
    ):
        assert said in first, daemon.log
    ports = re.findall(r"127\.0\.0\.1:(\d+)", first)
    assert len(ports) == 2 and "0" not in ports, first
