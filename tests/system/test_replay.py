"""`tierctl replay --lockstep` on a real daemon matches the core alone, token for token."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.depth import count
from tests.system.warm import Daemon
from tierd.cli.ctl import cli
from tierd.cli.replay import namespace_spec
from tierd.cli.trace import hash_ids, read_trace
from tierd.client import Client, OpenedNamespace
from tierd.config import load_config
from tierd.core.core import Core
from tierd.core.formats.model import TierKind
from tierd.core.instant_driver import InstantDriver, Sequence
from tierd.policies.named import NamedPolicies
from tierd.server.assembly import build_tiers
from tierd.simulator.sequences import TOKENS_PER_BLOCK

CONFIG = """\
[server]
clock = "replay"

[[device]]
capacity = "32 MiB"
segment = "1 MiB"
high_watermark = 0.6
low_watermark = 0.5

[[host]]
capacity = "64 MiB"
segment = "2 MiB"
high_watermark = 0.6
low_watermark = 0.5

[[nvme]]
capacity = "128 MiB"
segment = "4 MiB"
"""
BLOCK_BYTES = 32768


@dataclass(frozen=True)
class Outcome:
    """Results of a run, per tier from near to far."""

    tokens: list[int]
    used_bytes: list[int]
    evictions: list[int]
    copied_bytes: list[int]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon of three tiers whose clock stands still between calls."""
    with Daemon(CONFIG) as started:
        yield started


def asked(*arguments: str) -> dict[str, Any]:
    """A verb's JSON."""
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def replayed(daemon: Daemon, trace: Path, limit: int) -> Outcome:
    """The results that the daemon gives for a trace."""
    size = ("--limit", str(limit), "--block-bytes", str(BLOCK_BYTES))
    sums = asked("replay", str(trace), "--target", daemon.target, "--lockstep", "--verify", *size)
    assert (sums["requests"], sums["wrong_blocks"]) == (len(list(read_trace(trace, limit=limit))), 0)
    tiers = asked("tiers", "--target", daemon.target)["tiers"]
    columns = [[tier[name] for tier in tiers] for name in ("used_bytes", "evictions", "bytes_written")]
    return Outcome(list(sums["tier_tokens"].values()), *columns)


def decided(daemon: Daemon, trace: Path, limit: int) -> Outcome:
    """The results of the core alone, with tiers of the same sizes."""
    config = load_config(daemon.root / "tierd.toml", environ={"TIERD_STATE_DIR": str(daemon.root / "state")})
    specs = [tier.spec for tier in build_tiers(config, instance="none")]
    core = Core(specs, policies=NamedPolicies(), session_share=config.server.session_share)
    driver = InstantDriver(core, kind=TierKind.DEVICE, tier_count=len(specs))
    with Client(daemon.target) as client:
        namespace = client.open_namespace(namespace_spec(BLOCK_BYTES))
    tokens = [0] * len(specs)
    for request in read_trace(trace, limit=limit):
        found = driver.request(sequence(namespace, request.blocks, request.tokens), now=request.time_ms / 1000)
        tokens = [sum(pair) for pair in zip(tokens, found, strict=True)]
    stats = core.tier_stats()
    return Outcome(tokens, [s.used_bytes for s in stats], [s.evictions for s in stats], driver.copied_bytes)


def sequence(namespace: OpenedNamespace, blocks: tuple[int, ...], tokens: int) -> Sequence:
    """A request in the driver's format."""
    return Sequence(namespace.id, hash_ids(blocks, digest=namespace.digest), tokens, TOKENS_PER_BLOCK, BLOCK_BYTES)


def conversations(path: Path, *, count: int) -> Path:
    """A made-up trace, gzipped: conversations with a common prefix that grow, pause and return."""
    rng, ids, lines = random.Random(7), iter(range(10**9)), []
    common = [next(ids) for _ in range(4)]
    held = [list(common) for _ in range(40)]
    for number in range(count):
        blocks = rng.choice(held)
        blocks += [next(ids) for _ in range(rng.randint(1, 40))]
        short = rng.randint(1, TOKENS_PER_BLOCK)
        lines.append(
            {
                "timestamp": number * 700,
                "input_length": len(blocks) * TOKENS_PER_BLOCK + short,
                "hash_ids": [*blocks, next(ids)],
            }
        )
        if len(blocks) > 160:
            del blocks[4:]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def test_a_second_replay_finds_the_first_and_a_cold_one_does_not(tmp_path: Path) -> None:
    """A second replay hits the blocks of the first, unless it is cold; no byte is wrong at any speed."""
    trace = conversations(tmp_path / "made-up.gz", count=6)
    with Daemon() as daemon:
        common = ("replay", str(trace), "--target", daemon.target, "--verify", "--block-bytes", "4 KiB")
        first, again, cold = asked(*common), asked(*common, "--speed", "100000"), asked(*common, "--cold")
    assert again["hit_ratio"] == 1.0
    assert cold["tier_tokens"] == first["tier_tokens"]
    assert again["wrong_blocks"] == cold["wrong_blocks"] == again["bytes_written"] == 0
    assert again["latency_s"]["acquire"]["count"] == 6
    assert "reserve" not in again["latency_s"]


def test_verify_finds_bytes_that_are_not_the_blocks_own(tmp_path: Path) -> None:
    """With --verify, a replay reports blocks whose bytes do not match their hash, and exits with 1."""
    trace = conversations(tmp_path / "made-up.gz", count=1)
    request = next(read_trace(trace))
    with Daemon() as daemon, Client(daemon.target) as client:
        namespace = client.open_namespace(namespace_spec(4096))
        hashes = hash_ids(request.blocks[:3], digest=namespace.digest)
        assert client.put(namespace, hashes, [bytes(4096)] * 3)
        arguments = ["replay", str(trace), "--target", daemon.target, "--block-bytes", "4 KiB"]
        unseen = CliRunner().invoke(cli, arguments)
        seen = CliRunner().invoke(cli, [*arguments, "--verify"])
    assert (unseen.exit_code, seen.exit_code) == (0, 1)
    assert "WRONG: 3 blocks" in seen.stdout


def test_the_daemon_equals_the_core_on_a_made_up_trace(daemon: Daemon, tmp_path: Path) -> None:
    """In lockstep the daemon's hits, bytes, evictions and copies equal the core's; all tiers have hits."""
    trace = conversations(tmp_path / "made-up.gz", count=130)
    outcome = replayed(daemon, trace, 130)
    assert outcome == decided(daemon, trace, 130)
    assert all(outcome.tokens)


def test_the_daemon_equals_the_core_on_real_chat(daemon: Daemon, shared: Path) -> None:
    """In lockstep the daemon matches the core on a prefix of a production trace."""
    trace = shared / "traces" / "conversation_a.jsonl.gz"
    assert replayed(daemon, trace, 400) == decided(daemon, trace, 400)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "limit"),
    [("conversation_a", count(nightly=2_000, weekly=10_000)), ("agent_a", count(nightly=700, weekly=2_000))],
)
def test_the_daemon_equals_the_core_on_long_traces(daemon: Daemon, shared: Path, name: str, limit: int) -> None:
    """In lockstep the daemon matches the core on long traces."""
    trace = shared / "traces" / f"{name}.jsonl.gz"
    assert replayed(daemon, trace, limit) == decided(daemon, trace, limit)
