"""A GPU worker dies in each driver call: its pages are freed, its chain is whole or a miss, others
lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.depth import count, report
from tests.system.blocks import await_true
from tests.system.device_driver import fake_only, use_driver
from tests.system.device_worker import CONFIG, Worker, gpu_process, serve
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.sdk import await_nothing_held
from tests.system.warm import Daemon
from tests.unit.gpu.processes import descriptors

pytestmark = fake_only("it kills who makes the call that was chosen")

BLOCKS, RESERVED = 4, 2
OTHERS = 1
"""The seed of the shared chain. The seeds of dying workers follow it."""
CALLS = 30
"""Driver calls in one life, at least."""
LIVED = {"put": BLOCKS, "found": BLOCKS, "right": [BLOCKS, BLOCKS], "reserved": RESERVED}


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    use_driver(monkeypatch)
    with Daemon(CONFIG.replace('"16 MiB"', '"64 MiB"')) as running:  # room for all chains
        yield running


def live(talk: Talk, target: str, seed: int) -> None:
    """Runs in the worker: commits a chain, reads another in place, reserves pages, releases all."""
    worker = Worker(target)
    said = {"put": worker.put(seed, BLOCKS), "found": worker.lease(OTHERS, BLOCKS), "right": worker.right()}
    said["reserved"] = worker.reserve(RESERVED)
    worker.drop()
    worker.client.close()
    talk.say(said)


def lived(daemon: Daemon, seed: int) -> dict[str, object] | None:
    """The worker's last report; None if it was killed before."""
    with Elsewhere(live, daemon.target, seed=seed) as worker:
        status = worker.finish()
        assert status in (0, -9), status
        return None if status else worker.hear()


def kept_by(pid: int) -> int:
    """A process's descriptors, except slabs (their number depends on kept chains) and pidfds of
    live processes."""
    return sum(
        "tierd-fake-gpu" not in name and not ("pidfd" in name and watches_one_that_lives(pid, fd))
        for fd, name in descriptors(pid).items()
    )


def watches_one_that_lives(pid: int, fd: str) -> bool:
    return "\nPid:\t-1\n" not in Path(f"/proc/{pid}/fdinfo/{fd}").read_text()


def test_a_worker_dies_in_each_call_of_the_driver(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL in any driver call the daemon frees the pages and keeps no descriptor of the worker.
    Its chain is whole or a miss, and a chain that it read is intact."""
    with Elsewhere(serve, daemon.target) as other:
        assert other.ask(["put", [OTHERS, BLOCKS]]) == BLOCKS
        assert lived(daemon, OTHERS + 1) == LIVED
        await_nothing_held(daemon, "a worker that ended")
        both = (daemon.pid, gpu_process(daemon).pid)
        before = {pid: kept_by(pid) for pid in both}
        call, deaths, step = 1, 0, max(1, CALLS // count(test=1, nightly=CALLS, weekly=CALLS))
        while True:
            seed = OTHERS + 1 + call
            monkeypatch.setenv("TIERD_FAKE_CUDA_STRIKE", f"*:{call}:9")
            said = lived(daemon, seed)
            monkeypatch.delenv("TIERD_FAKE_CUDA_STRIKE")
            await_nothing_held(daemon, f"a worker that ended by call {call} of its driver")
            for chain, least in ((OTHERS, BLOCKS), (seed, BLOCKS if said else 0)):
                found = other.ask(["lease", [chain, BLOCKS]])
                assert found in (least, BLOCKS)
            pages = other.ask(["right", []])
            assert pages[0] == pages[1] and pages[0] in (BLOCKS, 2 * BLOCKS)
            other.ask(["drop", []])
            if said:
                break
            call, deaths = call + step, deaths + 1
        assert said == LIVED
        for pid in both:
            await_true(lambda pid=pid: kept_by(pid) <= before[pid], f"the descriptors of {pid} as before")
    report("worker killed in a call of the driver", deaths=deaths, of_calls=call - 1)
    assert deaths * step >= CALLS
