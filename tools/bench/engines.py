"""vLLM on the CPU: throughput, and time to first token by the place of the prompt's prefix.

    python -m tools.bench.engines [--rounds 15] [--batches 7] [--prefix 1024] [--dtype bfloat16]

The prefix is computed, in vLLM's own cache, in tierd's memory, or on tierd's store. A Python with
vLLM runs it; it is no suite of `make bench`. Two engines, one without and one with the connector,
take turns within each round, so a drifting machine affects all rows alike. Ratios are per round.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.engines.vllm.engine import ENVIRONMENT, Engine
from tests.engines.vllm.models import make_in_fork
from tierd.testing import Daemon

SUFFIX_TOKENS = 16
BATCH, BATCH_PROMPT_TOKENS, BATCH_ANSWER_TOKENS = 16, 256, 32
"""Of the throughput: requests with new prompts, served together."""
CONFIG = """\
[server]
shutdown_deadline = "5 s"
[scrub]
period = "0 s"
[[host]]
capacity = "1 GiB"
segment = "64 MiB"
[[nvme]]
capacity = "4 GiB"
segment = "64 MiB"
"""
ROWS = {
    "computed": "no connector, nothing is cached",
    "miss": "tierd, nothing is stored: a complete miss",
    "own": "no connector, vLLM's own prefix cache",
    "own+": "tierd's connector, vLLM's own prefix cache",
    "host": "tierd's memory",
    "nvme": "tierd's store",
}
LIMITS = {"host": 4.0, "nvme": 8.0}
"""Milliseconds beyond vLLM's own prefix cache."""
KV_BLOCKS, WARM = 256, 3
"""So few that the rounds that warm touch most of the KV memory: the first touch of a page is slow."""


def connector(daemon: Daemon, **options: Any) -> dict[str, Any]:
    """kv_transfer_config."""
    return {
        "kv_connector": "TierdConnector",
        "kv_connector_module_path": "tierd.integrations.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": daemon.target, **options},
    }


def tierctl(daemon: Daemon, *arguments: str) -> None:
    """Runs a `tierctl` command against the daemon."""
    command = [sys.executable, "-m", "tierd.cli.ctl", *arguments, "--target", daemon.target]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def one_round(
    plain: Engine, tiered: Engine, daemon: Daemon, prompt: list[int], *, is_plain_first: bool
) -> dict[str, float]:
    """Seconds of each row, for a new prompt. The first engine to compute it pays for cold caches."""

    def first_token(engine: Engine, *, cached: bool) -> float:
        answer = engine.generate([prompt], max_tokens=1)[0]
        assert (answer.cached > 0) == cached, f"{answer.cached} tokens were cached"
        return answer.seconds

    computing = [("computed", plain), ("miss", tiered)][:: 1 if is_plain_first else -1]
    times = {row: first_token(engine, cached=False) for row, engine in computing}
    times["own"], times["own+"] = first_token(plain, cached=True), first_token(tiered, cached=True)
    tiered.reset()
    times["host"] = first_token(tiered, cached=True)
    tierctl(daemon, "flush")
    tierctl(daemon, "evict", "--tier", "host.0")
    tiered.reset()
    times["nvme"] = first_token(tiered, cached=True)
    return times


def one_batch(engine: Engine, prompts: list[list[int]]) -> float:
    """Seconds until all are answered, and the computed blocks are stored."""
    begun = time.perf_counter()
    engine.generate(prompts, max_tokens=BATCH_ANSWER_TOKENS)
    engine.settle()
    return time.perf_counter() - begun


def main() -> None:
    """Prints medians and ratios."""
    asked = _arguments()
    rng = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as directory, Daemon(CONFIG) as daemon:
        model = asked.model or make_in_fork("bench", Path(directory))
        how = {"dtype": asked.dtype, "disable_log_stats": False, "num_gpu_blocks_override": KV_BLOCKS}
        with Engine(model, **how) as plain, Engine(model, connector=connector(daemon), **how) as tiered:
            prompts = [
                [rng.randrange(3, 500) for _ in range(asked.prefix + SUFFIX_TOKENS)] for _ in range(asked.rounds + WARM)
            ]
            rounds = [
                one_round(plain, tiered, daemon, prompt, is_plain_first=bool(i % 2)) for i, prompt in enumerate(prompts)
            ][WARM:]
            batches = [
                [[rng.randrange(3, 500) for _ in range(BATCH_PROMPT_TOKENS)] for _ in range(BATCH)]
                for _ in range(asked.batches)
            ]
            through = [(one_batch(plain, batch), one_batch(tiered, batch)) for batch in batches]
    _print(rounds, asked)
    _print_throughput(through)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=7, help="of the throughput")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a directory with a model; made if it is not given")
    return parser.parse_args()


def _print(rounds: list[dict[str, float]], asked: argparse.Namespace) -> None:
    print(f"time to first token, prefix {asked.prefix}, {asked.dtype}, median of {asked.rounds}, seed {asked.seed}")
    for name, meaning in ROWS.items():
        times = [times[name] * 1e3 for times in rounds]
        of_own = statistics.median(times[name] / times["own"] for times in rounds)
        of_all = statistics.median(times[name] / times["computed"] for times in rounds)
        beyond = statistics.median(1e3 * (times[name] - times["own"]) for times in rounds)
        best = min(times) - min(1e3 * times["own"] for times in rounds)
        limit = f" (at most {LIMITS[name]})" if name in LIMITS else ""
        spread = f"{min(times):8.2f} to {max(times):8.2f}"
        print(
            f"{name:9} {statistics.median(times):8.2f} ms, {spread}; {beyond:+.2f} ms beyond own{limit}, best {best:+.2f};"
            f" {of_own:6.3f} of own, {of_all:6.3f} of computed; {meaning}"
        )
    extra = [(times["miss"] - times["computed"]) * 1e3 for times in rounds]
    print(f"a miss costs {statistics.median(extra):+.2f} ms (median of the rounds' differences)")


def _print_throughput(through: list[tuple[float, float]]) -> None:
    if not through:
        return
    tokens = BATCH * (BATCH_PROMPT_TOKENS + BATCH_ANSWER_TOKENS)
    plain, tiered = (statistics.median(tokens / times[i] for times in through) for i in (0, 1))
    ratios = [tiered_s / plain_s for plain_s, tiered_s in through]
    print(
        f"throughput {plain:.0f} tokens/s without, {tiered:.0f} with tierd, all stored; time {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) of that without, median of {len(through)}"
    )


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    import vllm  # noqa: F401 -- before the engines fork

    main()
