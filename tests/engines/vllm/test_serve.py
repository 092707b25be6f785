"""The commands of deploy/examples/vllm run as written; tierd has prefixes vLLM dropped or never had."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import vllm

from tests.depth import report
from tests.engines.documented import Block, Shell, free_port, is_said, run_blocks
from tests.engines.vllm.served import Server
from tests.engines.vllm.tiered import VERIFIED, far_from, prompt
from tests.system.blocks import await_true
from tierd.integrations.versions import WINDOWS
from tierd.testing import Daemon

pytestmark = [pytest.mark.timeout(1200)]
_, ON_CPU, ON_CPU_TIER, SERVE, ASK, AGAIN, WHO = run_blocks("deploy/examples/vllm/README.md")
MODEL, PORT, REQUEST = "/tmp/tierd-example-model", "8000", "/tmp/tierd-example-request.json"
PROMPT = [3 + i * 7 % 500 for i in range(400)]
"""The document's prompt."""
WHOLE = 384
"""Its tokens that may be restored; a vLLM block on the CPU has 128."""
TRIES = 60


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(VERIFIED) as daemon:
        yield daemon


@pytest.mark.parametrize("block", [ON_CPU, ON_CPU_TIER], ids=["connector", "tier"])
def test_an_engine_alone(daemon: Daemon, tmp_path: Path, block: Block) -> None:
    """The command for one engine prints the output that the document shows."""
    with Shell(daemon, {MODEL: str(tmp_path / "model")}) as shell:
        shell.until(block, lambda said: is_said(block, said), times=3)


def served(server: Server, asked: list[int], known: tuple[list[int], list[float]]) -> float:
    """Empties vLLM's own cache and asks, until tierd serves; returns the hit tokens by vLLM's
    count. A busy machine misses the example's lookup time of a quarter of a second."""
    hits = "vllm:external_prefix_cache_hits_total"
    for _ in range(TRIES):
        server.reset()
        before = server.metric(hits)
        tokens, logprobs = server.complete(asked, max_tokens=len(known[0]))
        assert tokens == known[0] and (not known[1] or far_from(logprobs, known[1]) < 1e-3)
        if server.metric(hits) > before:
            return server.metric(hits) - before
    raise AssertionError(f"tierd serves nothing\n{server.log[-3000:]}")


def token_ids(said: str) -> list[list[int]]:
    """The token ids of each answer in the output."""
    return [json.loads(found) for found in re.findall(r'"token_ids":(\[[^]]*\])', said)]


def test_nothing_outlives_a_test_that_is_killed() -> None:
    """If a test is killed, the guard of its server ends the server's processes and their children."""
    script = (
        "import subprocess, sys; from tests.engines.documented import guard_of\n"
        "words = ['sh', '-c', 'sleep 600 & echo $!; sleep 600']\n"
        "server = subprocess.Popen(words, stdout=sys.stdout, start_new_session=True)\n"
        "guard_of(server.pid); print(server.pid, flush=True); server.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        pids = [int(run.stdout.readline()) for _ in range(2)]
        run.kill()
    await_true(lambda: not any(map(runs, pids)), "the guard has ended them")


def runs(pid: int) -> bool:
    """Whether this process exists and is not a zombie."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_server_is_served(daemon: Daemon, make_model: Callable[..., Path], tmp_path: Path) -> None:
    """The document's server, its cache emptied, answers the same from tierd, by both their counts.
    Another server does too, with the same log-probabilities. From a restarted daemon it is served a
    prompt that it has never seen."""
    began = time.monotonic()
    instead = {MODEL: str(make_model()), PORT: str(free_port()), REQUEST: str(tmp_path / "request.json")}
    with Server(make_model(), daemon) as other, Shell(daemon, instead, VLLM_ENABLE_V1_MULTIPROCESSING="1") as shell:
        shell.run(SERVE, timeout_s=600.0)  # both servers start at the same time
        started = time.monotonic()
        who = shell.run(WHO)
        assert "scheduler" in who and "worker" in who, f"an engine that nobody asked yet is not seen: {who}"
        said = shell.run(ASK)
        (first,) = token_ids(said)
        again = shell.until(AGAIN, lambda said: is_said(AGAIN, said), times=TRIES)
        assert is_said(ASK, said) and token_ids(again) == [first]
        other.await_ready()
        who = shell.run(WHO)
        assert is_said(replace(WHO, says=WHO.says.replace(WINDOWS["vllm"].ran[-1], vllm.__version__[:4])), who), who
        assert "warning" not in who, who
        known = other.complete(prompt(1, 400))
        assert served(other, prompt(1, 400), known) == other.metric("vllm:tierd_hit_tokens_host_total") == WHOLE
        asked, found = (other.metric(f"vllm:tierd_{name}_tokens_total") for name in ("lookup", "found"))
        assert asked >= found + WHOLE, "the first question found nothing, and was asked"
        assert other.metric("vllm:tierd_saved_bytes_total") > 0 and other.metric("vllm:tierd_loaded_bytes_total") > 0
        daemon.restart()
        assert served(other, PROMPT, (first, [])) == WHOLE
    report("vllm serve", start_s=f"{started - began:.1f}", test_s=f"{time.monotonic() - began:.1f}")
