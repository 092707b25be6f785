"""tierctl's verbs against a fake Admin service: their requests, their output, their failures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
from click.testing import Result
from fake_admin import COUNTERS, HASH, FakeAdmin

from tierd._proto import admin_pb2 as pb
from tierd.cli.figures import human_seconds
from tierd.errors import NotFound, NotPermitted, Unavailable

Run = Callable[..., Result]

SHOWN = {
    ("status",): "serving",
    ("tiers", "--classes"): "o_direct",
    ("blocks",): HASH.hex()[:12],
    ("inspect", HASH.hex()[:8]): HASH.hex(),
    ("sessions",): "vllm-worker-0",
    ("namespaces",): "llama-3-8b",
    ("evict", "--tier", "host.0"): "evicted 3 blocks, 3.00 MiB; 1 pinned stayed",
    ("pin", "00ff"): "pinned 1 block",
    ("unpin", "00ff"): "unpinned 1 block",
    ("drain",): "2 leases left",
    ("flush",): "wrote 8 blocks, 8.00 MiB, to NVMe",
    ("wear",): "install it (package nvme-cli)",
    ("ceiling",): "ceiling over 1 h   at 320 GiB 41.0 %   at 640 GiB 52.0 %   at 1.25 TiB 58.0 %   no limit 61.0 %",
    ("epoch", "bump", "--model", "llama-3-8b"): "61 blocks became unreachable",
    ("record", "start", "a"): "recording into /state/a.jsonl.gz, at most 256 MiB and ",
    ("record", "stop"): "ended: stopped",
    ("record", "status"): "lost: 3 requests are missing",
    ("top", "--interval", "1 ms"): "evict/s",
    ("tree", "--sort", "recent"): "llama-3-8b\n  000102030405 ",
}


@pytest.mark.parametrize("arguments", SHOWN, ids="-".join)
def test_a_verb_shows_its_answer_without_escape_codes_in_a_pipe(run: Run, arguments: tuple[str, ...]) -> None:
    """Every verb succeeds, prints its answer and uses no colours when stdout is not a terminal."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert SHOWN[arguments] in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("verb", ["status", "tiers"])
def test_memory_that_is_not_ready_is_told(run: Run, verb: str) -> None:
    """The verb shows how much of a tier's memory is ready and the reason that stops the background work."""
    told = run(verb).stdout
    assert "device.0: 192 MiB of 256 MiB are ready; the rest follows on demand (no room)" in told
    assert "host.0: 480 MiB of 512 MiB are ready; the rest follows in the background" in told
    assert "nvme.0: " not in told


@pytest.mark.parametrize("arguments", SHOWN, ids="-".join)
def test_every_verb_speaks_json(run: Run, arguments: tuple[str, ...]) -> None:
    """Every verb prints one JSON object with --json."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(result.stdout), dict)


def test_a_flush_that_left_something_fails(run: Run, admin: FakeAdmin) -> None:
    """flush counts the blocks that it could not make durable and ends with exit code 1."""
    admin.answers["Flush"] = pb.FlushReply(blocks=8, bytes=8 << 20, left=2)
    result = run("flush")
    assert result.exit_code == 1
    assert "wrote 8 blocks, 8.00 MiB, to NVMe; 2 blocks could not be" in result.stdout


def test_a_drain_says_what_ends_it(run: Run) -> None:
    """drain's help and answer state that --undo or a restart reverts it."""
    assert "until --undo or a restart" in " ".join(run("drain", "--help").stdout.split())
    assert "until `tierctl drain --undo` or a restart" in run("drain").stdout


def test_json_has_raw_numbers_and_whole_hashes(run: Run) -> None:
    """JSON carries integers, hexadecimal hashes and short enum names."""
    block = json.loads(run("blocks", "--json").stdout)["blocks"][0]
    assert (block["hash"], block["bytes"], block["tiers"]) == (HASH.hex(), 65536, ["host.0", "nvme.0"])
    assert json.loads(run("tiers", "--json").stdout)["tiers"][2]["kind"] == "nvme"
    assert json.loads(run("status", "--json").stdout)["counters"] == COUNTERS


@pytest.mark.parametrize("arguments", [("status",), ("top", "--interval", "1 ms")], ids=lambda words: words[0])
def test_the_hit_ratio_is_shown(run: Run, admin: FakeAdmin, arguments: tuple[str, ...]) -> None:
    """status and top show the token hit ratio, in all and by tier; a dash if no tokens were asked for."""
    assert "hit ratio 80.0 % of 1,000 tokens   host.0 60.0 %   nvme.0 20.0 %" in run(*arguments).stdout
    hits = json.loads(run(*arguments, "--json").stdout)["hits"]
    tiers = {"host.0": 600, "nvme.0": 200}
    assert hits == {"ratio": 0.8, "tokens_hit": 800, "tokens_asked": 1000, "tiers": tiers}
    answer = admin.answers["Status"]
    assert isinstance(answer, pb.StatusReply)
    answer.counters.clear()
    assert "hit ratio - (no tokens asked for)" in run(*arguments).stdout


def test_a_tree_in_a_pipe_is_indented_and_says_that_it_is_cut(run: Run, admin: FakeAdmin) -> None:
    """Each run is indented below the run that it follows, and the last line counts what is not shown."""
    lines = run("tree", "--limit", "4", "--depth", "2", "--model", "llama-3-8b").stdout.splitlines()
    assert [line[: len(line) - len(line.lstrip())] for line in lines[1:7]] == ["", "  ", "    ", "    ", "", "  "]
    assert "0303030303030303 " not in lines[6] and "030303030303 (first 4 evicted)" in lines[6]
    assert lines[2].split()[-5:] == ["1", "host.0", "4,", "nvme.0", "2"]
    sums = "19 blocks, 304 tokens, 96 of them shared by several sequences; 1 blocks follow evicted ones: "
    assert lines[-1].startswith(f"{sums}of use to layers with windows only; 4 of 5 runs are shown: ")
    asked = admin.last
    assert (asked.root, asked.limit, asked.depth, asked.model) == ("", 4, 2, "llama-3-8b")
    assert (asked.sort, asked.has_namespace) == ("hits", False)
    assert "evicted)" not in run("tree", "--under", "0x00FF").stdout and admin.last.root == "00ff"
    answer = admin.answers["Tree"]
    assert isinstance(answer, pb.TreeReply)
    answer.Clear()
    assert run("tree").stdout == "no block is cached\n"


def test_blocks_are_headed_plainly(run: Run) -> None:
    """blocks shows the model and the position of each block; inspect shows the model."""
    head, row = run("blocks").stdout.splitlines()[:2]
    assert head.split()[:3] == ["block", "model", "position"]
    assert row.split()[:3] == [HASH.hex()[:12], "llama-3-8b", "0"]
    assert "model llama-3-8b   namespace 1" in run("inspect", "00").stdout


def test_counters_have_the_names_of_metrics(run: Run) -> None:
    """A counter has the same name and labels as in /metrics."""
    shown = run("status", "--counters").stdout
    assert all((name in shown) == bool(count) for name, count in COUNTERS.items())


def test_a_session_is_short_and_this_program_is_none(run: Run, admin: FakeAdmin) -> None:
    """A session shows the first digits of its number; tierctl neither lists nor counts its own session."""
    answer = admin.answers["Sessions"]
    assert isinstance(answer, pb.SessionsReply)
    answer.sessions[0].id = 1234567890123456789
    answer.sessions.add(id=7, name="tierctl", pid=os.getpid())
    shown = run("sessions").stdout
    assert "12345678 " in shown and "123456789" not in shown and "tierctl" not in shown
    assert len(json.loads(run("sessions", "--json").stdout)["sessions"]) == 2
    assert "sessions 2 " in run("status").stdout


def test_a_block_shows_its_priority(run: Run, admin: FakeAdmin) -> None:
    """inspect shows a block's priority, and its remaining time if the priority expires."""
    answer = admin.answers["Inspect"]
    assert isinstance(answer, pb.InspectReply)
    answer.block.priority = 90
    assert "priority 90 " in run("inspect", HASH.hex()[:8]).stdout.replace("\n", " ")
    answer.block.retention_s = 90
    assert f"priority 90 {human_seconds(90)}" in run("inspect", HASH.hex()[:8]).stdout


def test_calls_carry_the_session(run: Run, admin: FakeAdmin) -> None:
    """Each call has the session's token in its metadata."""
    run("status")
    assert {token for _, _, token in admin.asked} == {"token-1"}


def test_filters_reach_the_daemon(run: Run, admin: FakeAdmin) -> None:
    """The options of `blocks` arrive as fields of the request."""
    run(
        "blocks",
        "--tier",
        "host.0",
        "--namespace",
        "0",
        "--pinned",
        "--prefix",
        "0xAB",
        "--sort",
        "-hits",
        "--limit",
        "5",
        "--offset",
        "40",
    )
    asked = admin.last
    assert (asked.tier, asked.namespace, asked.has_namespace, asked.pinned) == ("host.0", 0, True, True)
    assert (asked.hash_prefix, asked.sort, asked.limit, asked.offset) == ("ab", "-hits", 5, 40)


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "xyz"),
        ("inspect", "a" * 65),
        ("pin", ""),
        ("pin",),
        ("evict",),
        ("evict", "--all", "--tier", "host.0"),
        ("epoch", "bump"),
        ("epoch", "bump", "--model", "m", "--namespace", "1"),
        ("drain", "--deadline", "5 parsecs"),
        ("drain", "--undo", "--release"),
        ("blocks", "--sort", "colour"),
        ("nonsense",),
        ("replay", "/nowhere/trace.jsonl"),
    ],
    ids="-".join,
)
def test_a_malformed_command_line_ends_with_2_and_asks_nothing(
    run: Run, admin: FakeAdmin, arguments: tuple[str, ...]
) -> None:
    """Usage errors are reported before any request to the daemon."""
    result = run(*arguments)
    assert (result.exit_code, admin.asked) == (2, [])
    assert result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFound("block ab12: nobody holds it; see `tierctl blocks`"), 1),
        (NotPermitted("uid 7: no"), 1),
        (Unavailable("gone; start it"), 3),
    ],
    ids=["not-found", "not-permitted", "unavailable"],
)
def test_a_failure_is_one_line_and_a_code(run: Run, admin: FakeAdmin, error: Exception, code: int) -> None:
    """A daemon error prints one line on stderr, nothing on stdout, and its class sets the exit code."""
    admin.answers["Inspect"] = error  # type: ignore[assignment]
    result = run("inspect", "ab12")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"tierctl: {error}\n")


def test_help_lists_every_verb(run: Run) -> None:
    """`tierctl --help` names each verb, and each verb has help of its own with --target and --json."""
    listed = run("--help").stdout
    for verb in {arguments[0] for arguments in SHOWN} | {"replay"}:
        assert f"  {verb} " in listed
        text = run(verb, *{"epoch": ["bump"], "record": ["start"]}.get(verb, []), "--help").stdout
        assert "--target" in text and "--json" in text, verb


@pytest.mark.parametrize("reason", ["partial", "unlikely", "budget", "newer"])
def test_inspect_says_why_a_block_was_not_written(run: Run, admin: FakeAdmin, reason: str) -> None:
    """inspect explains why admission declined a block, in words if known; otherwise it prints no reason."""
    assert "not written" not in run("inspect", HASH.hex()[:8]).stdout
    answer = admin.answers["Inspect"]
    assert isinstance(answer, pb.InspectReply)
    answer.block.declined = reason
    shown = run("inspect", HASH.hex()[:8]).stdout
    assert "not written to NVMe" in shown and (reason in shown) == (reason in ("newer", "budget"))
    assert json.loads(run("inspect", HASH.hex()[:8], "--json").stdout)["block"]["declined"] == reason
