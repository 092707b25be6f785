"""`tierctl replay --lockstep` and `tierctl simulate` agree exactly on hits per tier and bytes
written.

The configurations are minimal: capacities and the clock, plus a policy unless it is the default.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.depth import count, report
from tests.system.warm import Daemon
from tierd.cli.ctl import cli
from tierd.cli.simulate import measure_of
from tierd.cli.stored_form import StoredForm
from tierd.cli.trace import read_trace
from tierd.simulator.sequences import TOKENS_PER_BLOCK, Measure, trace_of

POLICIES = ("lru", "default", "reuse-index")
NARROW = {"host": "8 MiB", "nvme": "64 MiB"}
WIDE = {"host": "32 MiB", "nvme": "1 GiB"}
CODEC = ("--codec", "rot-4-4", "--geometry", "1x1x64")
THREE = {"device": "8 MiB", "host": "8 MiB", "nvme": "64 MiB"}


@dataclass(frozen=True)
class Shares:
    """hits: share of prompt tokens hit in each kind of tier. nvme_writes: in footprints of the trace."""

    hits: dict[str, float]
    nvme_writes: float


def asked(*arguments: str) -> dict[str, Any]:
    """A verb's JSON."""
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def config_of(tiers: dict[str, str], policy: str) -> str:
    """A config of capacities, the clock, and a policy unless it is the default."""
    chosen = "" if policy == "default" else f'eviction = "{policy}"\n'
    tables = [f'\n[[{kind}]]\ncapacity = "{size}"\n{chosen}' for kind, size in tiers.items()]
    return '[server]\nclock = "replay"\n' + "".join(tables)


def replayed(trace: Path, tiers: dict[str, str], policy: str, *options: str) -> Shares:
    """The shares that a daemon measures for a trace."""
    with Daemon(config_of(tiers, policy)) as daemon:
        target = ("--target", daemon.target)
        sums = asked("replay", str(trace), "--lockstep", *options, *target)
        written = {tier["name"]: tier["bytes_written"] for tier in asked("tiers", *target)["tiers"]}
    assert (sums["wrong_blocks"], list(sums["tier_ratios"])) == (0, [f"{kind}.0" for kind in tiers])
    limit = int(options[options.index("--limit") + 1]) if "--limit" in options else None
    held = trace_of(read_trace(trace, limit=limit), name="")
    footprint = held.distinct_bytes(
        measure_of(StoredForm(CODEC[1], CODEC[3]), held) if CODEC[0] in options else Measure()
    )
    return Shares({kind: sums["tier_ratios"][f"{kind}.0"] for kind in tiers}, written["nvme.0"] / footprint)


def simulated(trace: Path, tiers: dict[str, str], policy: str, *options: str) -> Shares:
    """The shares that the simulator computes for it."""
    sizes = [text for kind, size in tiers.items() for text in (f"--{kind}", size)]
    (row,) = asked("simulate", str(trace), "--policy", policy, *sizes, *options)["rows"]
    assert row["prefix_token_hit"] == pytest.approx(sum(row[f"{kind}_hit"] for kind in tiers))
    return Shares({kind: row[f"{kind}_hit"] for kind in tiers}, row["nvme_writes_footprints"])


def check_same(trace: Path, tiers: dict[str, str], policy: str, *options: str) -> Shares:
    """Replays and simulates, asserts equality and returns the shares."""
    found, wanted = replayed(trace, tiers, policy, *options), simulated(trace, tiers, policy, *options)
    report("lockstep", trace=trace.name, policy=policy, **{k: round(v, 6) for k, v in wanted.hits.items()})
    assert found == wanted
    return found


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight growing conversations in turns, with a common prefix, larger than the narrowest tier."""
    rng, ids, path = random.Random(11), iter(range(10**9)), tmp_path_factory.mktemp("trace") / "made-up"
    held, lines = [[0, 1] for _ in range(8)], []
    for number in range(count(test=32, nightly=300, weekly=1_000)):
        blocks = held[rng.randrange(8)]
        blocks += [next(ids) + 2 for _ in range(rng.randint(4, 16))]
        short = {
            "input_length": len(blocks) * TOKENS_PER_BLOCK + rng.randint(1, 512),
            "hash_ids": [*blocks, next(ids) + 2],
        }
        lines.append({"timestamp": number * 9_000} | short)
        if len(blocks) > 70:
            del blocks[2:]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tiers", [NARROW, WIDE, THREE], ids=lambda tiers: "-".join(tiers.values()))
def test_the_simulator_equals_the_daemon(made_up: Path, tiers: dict[str, str], policy: str) -> None:
    """On a made-up trace the hits of each tier and bytes written agree; NARROW has hits in all tiers."""
    shares = check_same(made_up, tiers, policy)
    assert all(shares.hits.values()) or tiers is not NARROW


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulator_equals_the_daemon_on_real_chat(shared: Path, policy: str) -> None:
    """On the first requests of a production trace, simulator and daemon agree."""
    trace, limit = shared / "traces" / "conversation_a.jsonl.gz", count(test=40, nightly=600, weekly=3_000)
    assert any(check_same(trace, NARROW, policy, "--limit", str(limit)).hits.values())


@pytest.mark.timeout(1800)
def test_the_simulator_equals_the_daemon_with_blocks_of_several_sizes(made_up: Path, tmp_path: Path) -> None:
    """For two namespaces with different block sizes and overlapping ids, simulator and daemon agree."""
    path, requests = tmp_path / "two", read_trace(made_up, limit=20)
    lines = [
        {
            "timestamp": request.time_ms,
            "input_length": request.tokens if number % 2 else -(-request.tokens // 32),
            "hash_ids": list(request.blocks),
            "namespace": number % 2,
            "tokens_per_block": 512 if number % 2 else 16,
            "block_bytes": 65536 if number % 2 else 32768,
        }
        for number, request in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, wanted = replayed(path, NARROW, "default"), simulated(path, NARROW, "default")
    assert found == wanted
    assert found.hits["host"]


@pytest.mark.timeout(1800)
def test_the_nearest_tier_may_be_named(made_up: Path) -> None:
    """`replay --tier device` equals a simulation with a device tier."""
    options = ("--limit", "20")
    found = replayed(made_up, THREE, "default", "--tier", "device", *options)
    assert found == simulated(made_up, THREE, "default", *options)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tiers", [NARROW, THREE], ids=lambda tiers: "-".join(tiers.values()))
def test_the_simulator_equals_the_daemon_with_encoded_blocks(made_up: Path, tiers: dict[str, str]) -> None:
    """With the lengths of a codec, exact first and short blocks included, simulator and daemon agree;
    hits are more than without it."""
    more, fewer = check_same(made_up, tiers, "default", *CODEC), simulated(made_up, tiers, "default", *CODEC[2:])
    assert sum(more.hits.values()) > sum(fewer.hits.values())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["conversation_a", "agent_a"])
def test_the_simulator_equals_the_daemon_with_encoded_blocks_of_real_traces(shared: Path, name: str) -> None:
    """On the first requests of both production traces, with the lengths of a codec, both agree."""
    limit = ("--limit", str(count(test=40, nightly=600, weekly=3_000)))
    assert any(check_same(shared / "traces" / f"{name}.jsonl.gz", NARROW, "default", *limit, *CODEC).hits.values())
