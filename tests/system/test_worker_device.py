"""The worker over the daemon's "cuda" device tier: kernels store into GPU pages and attend in
place.

Each worker is a separate process. numpy does its arithmetic; keys, values and attention are on the
GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.compilers import skip_without
from tests.depth import report
from tests.still import stand_still
from tests.system.blocks import await_true
from tests.system.device_driver import rights_at, use_driver, use_fatbins
from tests.system.device_worker import evict, gpu_process
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.lone_worker import OPTIONS, PROMPT, SPEC, random_model
from tests.system.sdk import await_nothing_held, held
from tests.system.warm import Daemon
from tierd.client import Client
from tierd.errors import TierFailed
from tierd.kernels import PagedBatch, paged_attention
from tierd.kernels.attention import KernelAttention, KernelPass
from tierd.kernels.e4m3 import E4M3
from tierd.worker.backend import Backend
from tierd.worker.blocks import BlockTable
from tierd.worker.engine import Engine
from tierd.worker.pages import LocalPages, Page, page_shape
from tierd.worker.report import Request
from tierd.worker.tierd_pages import TierdOptions, TierdPages
from tools.kernels import MissingTool

DEVICE = '[[device]]\nkind = "cuda"\ncapacity = "16 MiB"\nsegment = "4 MiB"\nhang_limit = "1 s"\n'
CONFIG = DEVICE + '[[host]]\ncapacity = "32 MiB"\nsegment = "4 MiB"\n[[nvme]]\ncapacity = "64 MiB"\nsegment = "4 MiB"\n'
NEW = 8
"""Tokens after the prompt; they complete one block."""
PREFIX = 64
"""Tokens of PROMPT in whole blocks."""
PREFIX_BYTES = PREFIX * SPEC.layers * 2 * SPEC.kv_heads * SPEC.head_dim * 2


class Attending:
    """A worker on the GPU, with one method for each request of a test."""

    def __init__(self, target: str, *, durable: bool = False, kv_dtype: str = "float16") -> None:
        self.model = random_model(Backend("numpy", "float32", "cuda:0"))
        self.client = Client(target)
        options, shape = TierdOptions(durable=durable, reserve_pages=4), page_shape(self.model, kv_dtype=kv_dtype)
        self.source = TierdPages(self.client, self.model, name="random", options=options, shape=shape)
        self.engine = Engine(self.model, self.source, options=OPTIONS)
        self.gpu = self.model.backend.gpu

    def begin(self, count: int = len(PROMPT)) -> dict[str, int]:
        """Computes `count` tokens of the prompt and the first new token. Returns the tokens hit, by tier."""
        self.sequence = self.engine.begin(Request(PROMPT[:count], NEW))
        self.engine.pick([self.sequence])
        return dict(self.sequence.report.tier_tokens)

    def step(self, count: int) -> int:
        """Computes `count` more tokens. Returns the number generated."""
        for _ in range(count):
            self.engine.step([self.sequence])
        return len(self.sequence.generated)

    def end(self) -> list[int]:
        """Computes all missing tokens. Returns the tokens."""
        self.step(NEW)
        return self.engine.end(self.sequence).tokens

    def recomputed(self) -> int:
        """Tokens of the request that were computed again because their page was lost."""
        return self.sequence.report.recomputed_tokens

    def faults(self) -> dict[str, int]:
        """The daemon's failures, by kind."""
        return dict(self.source.faults)

    def moved(self) -> dict[str, int]:
        """Bytes that the worker copied to, from and on the GPU."""
        return dict(self.gpu.moved)

    def places(self) -> list[list[Any]]:
        """For each prefix page: tier, segment, offset, and this process's rights in the driver."""
        return [[*self._place_of(page), rights_at(self.gpu._gpu, page.array.address)] for page in self._prefix()]

    def sums(self) -> list[int]:
        """Sums of the bytes of the prefix's pages."""
        return [int(self.gpu.read(page.array).view(np.uint16).sum(dtype=np.int64)) for page in self._prefix()]

    def commit_at_once(self, count: int) -> int:
        """Stores and commits `count` tokens, a whole or short block, without a wait. Returns the tokens hit."""
        table, tokens = BlockTable(self.source), list(range(count))
        table.grow(count)
        over = self._over(table.pages[0], slots=np.arange(count))
        for layer in range(SPEC.layers):
            rows = np.full((count, SPEC.kv_heads, SPEC.head_dim), layer + 1, np.float16)
            over.store(layer, self.gpu.filled(rows), self.gpu.filled(-rows))
        table.advance(count)
        if count == 16:
            table.commit(tokens)
        else:
            assert table.commit_tail(tokens)
        self.gpu.finish()
        return self.find(tokens)

    def find(self, tokens: list[int]) -> int:
        """The number of these tokens that are stored correctly."""
        return self.source.acquire(tokens, marks=[len(tokens)]).tokens

    def store_where_it_may_not(self) -> str:
        """Launches the store kernel into a page of the prefix. Returns the result or the error."""
        k = self.gpu.filled(np.ones((1, SPEC.kv_heads, SPEC.head_dim), np.float16))
        self._over(self._prefix()[0], slots=np.zeros(1, np.int64)).store(0, k, k)
        try:
            return f"wrote {self.gpu.read(k).nbytes}"
        except TierFailed as error:
            return str(error)

    def _over(self, page: Page, *, slots: NDArray[np.int64]) -> KernelPass:
        attention = self.engine._attention
        assert isinstance(attention, KernelAttention)
        return attention.over([page.array], PagedBatch([0, 1], [1], [[0]]), slots=slots)

    def _prefix(self) -> list[Page]:
        return self.sequence.table.pages[: PREFIX // 16]

    def _place_of(self, page: Page) -> tuple[str, int, int]:
        handle = page.origin.lease.handles[page.origin.index]
        return self.client.tiers[int(handle["tier"])], int(handle["segment"]), int(handle["offset"])


def serve(talk: Talk, target: str, **given: Any) -> None:
    """Runs in the other process: serves requests until the test ends."""
    worker = Attending(target, **given)
    while True:
        verb, *told = talk.hear()
        talk.say(getattr(worker, verb)(*told))


@pytest.fixture(scope="module", autouse=True)
def driver() -> Iterator[None]:
    """Makes the driver and its fatbins available to processes that start here."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            use_fatbins(patch)
        except MissingTool as error:
            skip_without(error, "g++", "nvcc")
        use_driver(patch)
        patch.delenv("TIERD_KERNELS", raising=False)
        yield


def reference(count: int = len(PROMPT), kv_dtype: str = "float16") -> list[int]:
    """The reference's tokens, on the CPU, without a cache."""
    model = random_model()
    engine = Engine(model, LocalPages(page_shape(model, kv_dtype=kv_dtype)), attention=paged_attention, options=OPTIONS)
    return engine.generate([Request(PROMPT[:count], NEW)])[0].tokens


@pytest.fixture(scope="module")
def want() -> list[int]:
    """The reference's tokens for the whole prompt."""
    return reference()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    # With the fake driver, its GPU process sums on the host, because the emulated kernel only takes
    # time.
    with Daemon(CONFIG, env={"TIERD_FATBINS_FOLDER": ""}) as running:
        yield running


@pytest.mark.parametrize("kv_dtype", ["float16", E4M3])
def test_a_second_worker_attends_in_place_to_what_the_first_committed(daemon: Daemon, kv_dtype: str) -> None:
    """Cold or restored, tokens are the reference's; a second process reads the prefix in place, read-only."""
    given = {"kv_dtype": kv_dtype}
    with Elsewhere(serve, daemon.target, **given) as one, Elsewhere(serve, daemon.target, **given) as two:
        assert one.ask(["begin"]) == {}
        assert two.ask(["begin"]) == {"device.0": PREFIX}
        mine, its = one.ask(["places"]), two.ask(["places"])
        assert [place[:3] for place in mine] == [place[:3] for place in its]
        assert {(tier, rights) for tier, _, _, rights in its} == {("device.0", "READ")}
        moved = two.ask(["moved"])
        assert moved.get("within", 0) == 0 and moved["in"] + moved["out"] < PREFIX_BYTES
        report("worker on a device, bytes copied beside a prefix", prefix=PREFIX_BYTES, **moved)
        assert one.ask(["end"]) == two.ask(["end"]) == reference(kv_dtype=kv_dtype)
        assert [each.ask(["faults"]) for each in (one, two)] == [{}, {}]


def test_a_prompt_that_is_stored_whole(daemon: Daemon) -> None:
    """A fully stored prompt's last token is recomputed and not written to the committed page."""
    with Elsewhere(serve, daemon.target) as one, Elsewhere(serve, daemon.target) as two:
        one.ask(["begin"])
        assert two.ask(["begin", PREFIX]) == {"device.0": PREFIX}
        assert two.ask(["end"]) == reference(PREFIX)


@pytest.mark.parametrize("count", [16, 7], ids=["whole", "short"])
def test_a_commit_is_sent_behind_the_store_kernels(daemon: Daemon, count: int) -> None:
    """A commit right after its store kernels or copies has their data; both workers hit and verify it."""
    with Elsewhere(serve, daemon.target) as one, Elsewhere(serve, daemon.target) as two:
        assert one.ask(["commit_at_once", count]) == count
        assert two.ask(["find", list(range(count))]) == count


def test_one_of_several_is_killed(daemon: Daemon, want: list[int]) -> None:
    """If one of several workers on the same pages is killed, the others' tokens stay right; its
    leases end."""
    with (
        Elsewhere(serve, daemon.target) as one,
        Elsewhere(serve, daemon.target) as two,
        Elsewhere(serve, daemon.target) as three,
    ):
        workers = (one, two, three)
        found = [worker.ask(["begin"]) for worker in workers]
        assert found == [{}, {"device.0": PREFIX}, {"device.0": PREFIX}]
        assert len({tuple(map(tuple, (place[:3] for place in worker.ask(["places"])))) for worker in workers}) == 1
        for worker in workers:
            worker.ask(["step", 2])
        leases = held(daemon)[0]
        two.say(["end"])
        two.kill()
        await_true(lambda: held(daemon)[0] < leases, "the end of its leases")
        assert one.ask(["step", 3]) == 6
        assert three.ask(["end"]) == one.ask(["end"]) == want
    await_nothing_held(daemon, "workers that have gone")


def test_the_gpu_process_hangs_and_dies(daemon: Daemon, want: list[int]) -> None:
    """While the GPU process hangs and dies, workers recompute; with a new one, blocks are hit again."""
    with Elsewhere(serve, daemon.target) as one, Elsewhere(serve, daemon.target) as two:
        child = gpu_process(daemon)
        stand_still(child.pid)
        assert one.ask(["begin"]) == {}
        tokens = one.ask(["end"])
        lost, faults = one.ask(["recomputed"]), one.ask(["faults"])
        assert tokens == want
        assert lost >= OPTIONS.chunk_tokens, "a commit failed, and its tokens were computed again"
        await_true(lambda: not child.is_running(), "the end of the GPU process")
        assert two.ask(["begin"]).get("device.0", 0) in (0, PREFIX) and two.ask(["end"]) == want
        report("worker on a device, GPU process hung", recomputed=lost, **faults)

        def is_found() -> bool:
            found = two.ask(["begin"])
            assert two.ask(["end"]) == want
            return bool(found == {"device.0": PREFIX})

        await_true(is_found, "a hit in the tier that is back")
        assert gpu_process(daemon).pid != child.pid


def test_evicted_and_promoted_pages_give_the_same_tokens(daemon: Daemon, want: list[int]) -> None:
    """A prefix evicted from the device is promoted again, and the next worker attends to it there."""
    with Elsewhere(serve, daemon.target, durable=True) as one, Elsewhere(serve, daemon.target) as two:
        assert one.ask(["begin"]) == {} and one.ask(["end"]) == want
        await_true(lambda: held(daemon)[0] == 0, "the end of its leases")
        evict(daemon.target, "device.0")
        (found,) = two.ask(["begin"]).items()
        assert found[0] in ("host.0", "nvme.0") and found[1] == PREFIX
        assert {place[0] for place in two.ask(["places"])} == {"device.0"}
        # The block after the prefix, which the worker fills, is in the host too: it is promoted,
        # none lost.
        assert two.ask(["end"]) == want
        assert (two.ask(["recomputed"]), two.ask(["faults"])) == (0, {})


def test_a_worker_cannot_write_to_what_another_committed(daemon: Daemon, want: list[int]) -> None:
    """A store kernel into another worker's committed page fails in its own worker; no byte changes."""
    with Elsewhere(serve, daemon.target) as one, Elsewhere(serve, daemon.target) as two:
        one.ask(["begin"])
        two.ask(["begin"])
        before = one.ask(["sums"])
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in two.ask(["store_where_it_may_not"])
        assert one.ask(["sums"]) == before
        assert one.ask(["end"]) == want
