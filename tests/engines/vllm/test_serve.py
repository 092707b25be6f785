"""`vllm serve` with deploy/examples/vllm/connector.json, as it stands there: what vLLM forgets, and what a server that was started anew never had, tierd has."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

from click.testing import CliRunner

from tests.depth import report
from tests.engines.vllm.served import Server
from tests.engines.vllm.tiered import VERIFIED, far_from, prompt
from tests.system.blocks import await_true
from tierd.cli import ctl
from tierd.testing import Daemon

pytestmark = [pytest.mark.timeout(1200)]
PROMPT = prompt(1, 400)
WHOLE = 384
"""Tokens of it that may be restored: vLLM's blocks on the CPU are of 128."""
TRIES = 60


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(VERIFIED) as daemon:
        yield daemon


def served(server: Server, known: tuple[list[int], list[float]]) -> dict[str, float]:
    """Asks, with vLLM's own cache empty, until tierd serves all of the prompt; what the metrics then say more than before. A busy machine answers no lookup in the
    example's quarter of a second."""
    names = (
        "vllm:external_prefix_cache_hits_total",
        "vllm:tierd_hit_tokens_host_total",
        "vllm:tierd_hit_tokens_disk_total",
    )
    for _ in range(TRIES):
        server.reset()
        before = {name: server.metric(name) for name in names}
        tokens, logprobs = server.complete(PROMPT)
        assert tokens == known[0] and far_from(logprobs, known[1]) < 1e-3
        more = {name.removeprefix("vllm:"): server.metric(name) - before[name] for name in names}
        if more["external_prefix_cache_hits_total"]:
            return more
    raise AssertionError(f"tierd serves nothing\n{server.log[-3000:]}")


def told(daemon: Daemon) -> Any:
    result = CliRunner().invoke(ctl.cli, ["engines", "--target", daemon.target, "--json"], prog_name="tierctl")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_nothing_outlives_a_test_that_is_killed() -> None:
    """The guard of a server whose test was killed ends the server's processes, its children too."""
    script = (
        "import subprocess, sys; from tests.engines.vllm.served import guard_of\n"
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
    """Whether there is such a process, and it is not one that only waits to be waited for."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_server_is_served(daemon: Daemon, make_model: Callable[..., Path]) -> None:
    """A prompt is answered the same after vLLM's cache was reset, and by a server that has never seen it over a daemon that was started anew, with all its whole
    blocks from tierd, by vLLM's own count and by tierd's; `tierctl engines` shows the server's scheduler and worker and warns of nothing."""
    began = time.monotonic()
    with Server(make_model(), daemon) as other, Server(make_model(), daemon) as server:  # both start at one time
        server.await_ready()
        started = time.monotonic()
        known = server.complete(PROMPT)
        from_memory = served(server, known)
        assert sum(from_memory.values()) == 2 * WHOLE and from_memory["tierd_hit_tokens_host_total"] == WHOLE
        assert server.metric("vllm:tierd_saved_bytes_total") > 0 and server.metric("vllm:tierd_loaded_bytes_total") > 0
        other.await_ready()
        answer = told(daemon)
        assert {row["engine"]["role"] for row in answer["engines"]} == {"scheduler", "worker"}
        assert not [said for said in answer["advice"] if said["is_urgent"]]
        daemon.restart()
        anew = served(other, known)
        assert anew["external_prefix_cache_hits_total"] == WHOLE
    took = time.monotonic() - began
    report("vllm serve", start_s=f"{started - began:.1f}", test_s=f"{took:.1f}", from_memory=from_memory, anew=anew)
