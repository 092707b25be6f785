"""The way of bytes between host and device: a kernel copies small pages, the copy engines the rest.

Bytes arrive by either way. On the fake driver a launch, like a copy, runs only when a caller waits
for it. A missing wait therefore loses bytes. COPIES_SEED runs one seed again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.depth import count
from tests.unit.gpu.processes import HOST, PATIENCE_S, SLAB, Owner, bytes_at, lists, memory, pieces_of, sums_of
from tests.unit.kernels.fake_driver import counts, on_fake_driver
from tierd.errors import TierFailed
from tierd.gpu import cutover
from tierd.gpu.child import Engine
from tierd.gpu.cutover import SIZES, measured
from tierd.gpu.device import Device
from tierd.gpu.protocol import GpuFacts, pack_pieces, unpack_sums
from tierd.gpu.runs import RUNS_MIN, Runs, Way
from tools.fake_cuda import build_fatbins

SEED = int(os.environ.get("COPIES_SEED", "1"))
ALL, NONE = {True: 1 << 30, False: 1 << 30}, {True: 0, False: 0}
ROOM = 8 << 20
"""Bytes of the slab, and of the host memory."""
SLOW_US = "2000"
"""Microseconds per piece for the copy engines, in tests in which the kernel must be faster."""


def opened(*, gather_bytes: Mapping[bool, int] | None = None, seed: int = 5) -> tuple[Engine, int, int]:
    """An engine, and the descriptors of slab 1 and host memory. gather_bytes: overrides measured limits."""
    os.environ["TIERD_FATBINS_FOLDER"] = str(build_fatbins())
    engine = Engine(0)
    if gather_bytes is not None:
        engine.copies.gather_bytes = dict(gather_bytes)
    slab, host = engine.slabs.make(1, ROOM), memory(ROOM, seed=seed)
    engine.hosts.attach(HOST, host, ROOM)
    return engine, slab, host


def closed(engine: Engine, *descriptors: int) -> None:
    """The engine and the driver have released everything."""
    for fd in descriptors:
        os.close(fd)
    engine.close()
    assert counts() == {}


def scattered(rng: np.random.Generator, number: int, longest: int) -> Any:
    """Pieces of random lengths at random offsets of any alignment on both sides, none overlapping."""
    pieces = pieces_of([0] * number)
    pieces["length"] = rng.integers(0, longest + 1, number)
    pieces["length"][rng.random(number) < 0.5] &= ~np.uint32(15)
    for side in ("slab_offset", "host_offset"):
        gaps, order = rng.integers(0, 40, number), rng.permutation(number)
        starts = np.cumsum(pieces["length"][order] + gaps) - pieces["length"][order]
        pieces[side][order] = starts & ~np.int64(15) if rng.random() < 0.3 and gaps.min() >= 15 else starts
    return pieces


def images(slab: int, host: int) -> list[bytearray]:
    """All bytes of the slab and of the host memory."""
    return [bytearray(os.pread(fd, ROOM, 0)) for fd in (slab, host)]


def check_copies(engine: Engine, slab: int, host: int, pieces: Any) -> None:
    """Copies to the device, then back over other host bytes: the pieces' bytes change, and no others."""
    want = images(slab, host)
    for to_device in (True, False):
        to, of = (0, 1) if to_device else (1, 0)
        names = ("slab_offset", "host_offset") if to_device else ("host_offset", "slab_offset")
        for target, source, length in zip(*(pieces[name].tolist() for name in (*names, "length")), strict=True):
            want[to][target : target + length] = want[of][source : source + length]
        answer = engine.copy(pack_pieces(pieces), to_device=to_device)
        assert images(slab, host) == want
        if to_device:
            assert lists(unpack_sums(answer)) == sums_of(slab, pieces, "slab")
            want[1] = bytearray(np.random.default_rng(8).bytes(ROOM))
            os.pwrite(host, want[1], 0)


def check_random_copies(gather_bytes: Mapping[bool, int]) -> None:
    """Few and many pieces, short and long ones."""
    engine, slab, host = opened(gather_bytes=gather_bytes)
    for seed in range(SEED, SEED + count(test=4, nightly=100, weekly=1000)):
        print(f"seed {seed}", flush=True)
        rng = np.random.default_rng(seed)
        check_copies(engine, slab, host, scattered(rng, int(rng.integers(1, 200)), int(rng.choice([40, 5000, 30_000]))))
    closed(engine, slab, host)


@on_fake_driver()
def test_gathered_bytes_are_right() -> None:
    """The kernel copies random runs, odd addresses and lengths too: every byte arrives, no other changes."""
    check_random_copies(ALL)


@on_fake_driver()
def test_bytes_of_the_copy_engines_are_right() -> None:
    """The copy engines copy the same runs correctly."""
    check_random_copies(NONE)


@on_fake_driver()
def test_bytes_of_both_ways_in_one_call_are_right() -> None:
    """One call gathers short runs, copies long ones by the engines, and waits on one event for both."""
    check_random_copies({True: 1500, False: 2500})


@on_fake_driver()
def test_threads_gather_at_one_time() -> None:
    """With more threads than launches, none overwrites a run list that a kernel has not read."""
    engine, slab, host = opened(gather_bytes=ALL)
    faults = list[BaseException]()

    def work(number: int) -> None:
        try:
            engine.device.enter()
            pieces = pieces_of([2048 + number] * (RUNS_MIN + number), gap=512)
            pieces["slab_offset"] += number << 19
            pieces["host_offset"] += number << 19
            for _ in range(10):
                data = bytes_at(host, pieces, "host")
                engine.copy(pack_pieces(pieces), to_device=True)
                assert bytes_at(slab, pieces, "slab") == data
                for piece in pieces:
                    os.pwrite(slab, os.urandom(int(piece["length"])), int(piece["slab_offset"]))
                engine.copy(pack_pieces(pieces), to_device=False)
                assert bytes_at(host, pieces, "host") == bytes_at(slab, pieces, "slab")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    closed(engine, slab, host)


class Watched:
    """The memory of one launch, as `Gather` keeps it. It records how much was pending on each put."""

    def __init__(self, told: Any) -> None:
        self._told, self.pending = told, list[int]()

    def get(self) -> Any:
        return self._told

    def put(self, _: Any) -> None:
        self.pending.append(counts().get("pending", 0))


@on_fake_driver()
def test_what_a_kernel_is_told_stays_until_it_has_ended() -> None:
    """A launch's memory is free again only when nothing of it is pending, after success or failure."""
    engine, slab, host = opened(gather_bytes=ALL)
    gather: Any = engine.copies._gather
    free = gather._free
    gather._free = watched = Watched(free.get())
    check_copies(engine, slab, host, many(4096))
    strike("cuLaunchKernel:0:e1")
    with pytest.raises(TierFailed):
        engine.copy(pack_pieces(many(4096)), to_device=True)
    del os.environ["TIERD_FAKE_CUDA_STRIKE"]
    assert watched.pending == [0, 0, 0]
    closed(engine, slab, host)


# -- measurement


class Clock:
    """Copies with given times: a table's for the kernel, 10 s more in its first call; 1 s for engines."""

    def __init__(self, device: Device, to_device: Sequence[float], from_device: Sequence[float]) -> None:
        self._device, self._times = device, {True: to_device, False: from_device}
        self.asked: list[tuple[Way, int]] = []

    def seconds(self, way: Way, runs: Runs, *, to_device: bool) -> float:
        """Same signature as `Copies.seconds`."""
        (length,) = set(runs.lengths.tolist())
        assert len(runs.lengths) == RUNS_MIN
        there, here = (runs.targets, runs.sources) if to_device else (runs.sources, runs.targets)
        self._device.call(
            self._device.cuda.cuMemcpyDtoH, int(here[0]), int(there[0]), length
        )  # the driver refuses it unless the address is on the device
        self._device.call(self._device.cuda.cuMemcpyHtoD, int(there[0]), int(here[0]), length)
        is_first = (way, length) not in self.asked
        self.asked.append((way, length))
        return 1.0 if way is not Way.GATHER else self._times[to_device][SIZES.index(length)] + 10.0 * is_first


@on_fake_driver()
def test_the_limit_is_the_last_length_before_the_engines_are_as_quick() -> None:
    """The kernel's limit in each direction is the last length before the first at which the engines
    are as fast. The best call counts, not the first, which loads code. Longer ones are not tried."""
    engine, *descriptors = opened(gather_bytes=NONE)
    before, device = counts(), engine.device
    cutover.ROUND_S = 0.0  # as if each call took longer
    never, always = [1.0] * len(SIZES), [0.5] * len(SIZES)
    for times, limit in ((never, 0), (always, SIZES[-1]), ([0.5, 0.9, 1.1, 0.5, 0.5], SIZES[1]), ([2.0, 0.1], 0)):
        assert measured(device, Clock(device, times, never).seconds) == {True: limit, False: 0}
        assert measured(device, Clock(device, never, times).seconds) == {True: 0, False: limit}
    clock = Clock(device, never, never)
    measured(device, clock.seconds)
    assert {length for _, length in clock.asked} == {SIZES[0]}
    assert {way for way, _ in clock.asked} == {Way.GATHER, Way.BATCH}
    assert counts() == before
    closed(engine, *descriptors)


def strike(what: str) -> None:
    """From now on the driver refuses this call."""
    os.environ["TIERD_FAKE_CUDA_STRIKE"] = what


def many(length: int) -> Any:
    """The smallest number of pages of a length that is gathered."""
    return pieces_of([length] * RUNS_MIN, gap=4096)


@on_fake_driver(TIERD_FAKE_CUDA_PIECE_US=SLOW_US)
def test_where_the_kernel_is_sooner_small_pages_go_by_it() -> None:
    """The kernel copies small pages both ways, up to the limit in the facts; the engines copy the rest."""
    engine, slab, host = opened()
    facts = engine.facts()
    assert (facts["gather_load_bytes"], facts["gather_store_bytes"]) == (SIZES[-1], SIZES[-1])
    assert facts["notices"] == ()
    strike("cuMemcpyBatchAsync:0:e1")
    for length in (4096, SIZES[-1]):
        check_copies(engine, slab, host, many(length))
    for pieces in (many(SIZES[-1] + 1), many(4096)[1:]):
        for to_device in (True, False):
            with pytest.raises(Exception, match="cuMemcpyBatchAsync"):
                engine.copy(pack_pieces(pieces), to_device=to_device)
    closed(engine, slab, host)


@on_fake_driver()
def test_where_the_engines_are_sooner_nothing_is_gathered() -> None:
    """The fake driver's engines beat its kernels, so the limits are 0, and that gives no notice."""
    engine, slab, host = opened()
    facts = engine.facts()
    assert (facts["gather_load_bytes"], facts["gather_store_bytes"]) == (0, 0)
    assert facts["notices"] == ()
    check_engines_alone(engine, slab, host)


# -- nothing can be gathered


def check_engines_alone(engine: Engine, slab: int, host: int) -> None:
    """Small pages arrive both ways without a kernel."""
    pieces = many(4096)
    lengths = pieces["length"].astype(np.uint64)
    data = bytes_at(host, pieces, "host")
    strike("cuLaunchKernel:0:e1")
    with engine.slabs.regions.used(pieces) as slabs, engine.hosts.regions.used(pieces) as hosts:
        there, back = Runs(slabs.addresses, hosts.addresses, lengths), Runs(hosts.addresses, slabs.addresses, lengths)
        engine.copies.run(there, to_device=True, is_direct=hosts.is_direct)
        assert bytes_at(slab, pieces, "slab") == data
        os.pwrite(host, bytes(ROOM), 0)
        engine.copies.run(back, to_device=False, is_direct=hosts.is_direct)
        assert bytes_at(host, pieces, "host") == data
    del os.environ["TIERD_FAKE_CUDA_STRIKE"]
    closed(engine, slab, host)


def only_notice(engine: Engine) -> str:
    """The only notice about small pages."""
    (notice,) = (notice for notice in engine.facts()["notices"] if "small pages" in notice)
    return str(notice)


@on_fake_driver(TIERD_FAKE_CUDA_WITHOUT="host pointers", TIERD_FAKE_CUDA_PIECE_US=SLOW_US)
def test_a_gpu_that_does_not_find_the_hosts_memory_gathers_nothing() -> None:
    """Its kernels would need other addresses: a notice says so, and the engines copy."""
    engine, slab, host = opened()
    assert "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0" in only_notice(engine)
    check_engines_alone(engine, slab, host)


@on_fake_driver(TIERD_FAKE_CUDA_BYTES=str(SLAB), TIERD_FAKE_CUDA_PIECE_US=SLOW_US)
def test_without_room_to_measure_nothing_is_gathered() -> None:
    """On a full GPU a notice says so, and the attempt frees all its memory."""
    os.environ["TIERD_FATBINS_FOLDER"] = str(build_fatbins())
    engine = Engine(0)
    assert "cuMemAlloc gave CUDA_ERROR_OUT_OF_MEMORY" in only_notice(engine)
    assert engine.copies.gather_bytes == NONE
    closed(engine)


@on_fake_driver(TIERD_FAKE_CUDA_STRIKE="cuLaunchKernel:1:e701")
def test_a_kernel_that_cannot_be_launched_is_not_chosen() -> None:
    """A launch that fails during measurement gives a notice, and the engines copy."""
    engine, slab, host = opened()
    assert "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" in only_notice(engine)
    assert engine.copies.gather_bytes == NONE
    check_engines_alone(engine, slab, host)


@on_fake_driver()
def test_without_kernels_nothing_is_gathered() -> None:
    """When tierd is built without nvcc, a notice says so and the engines copy."""
    os.environ["TIERD_FATBINS_FOLDER"] = "/nonexistent"  # a checkout may have some
    engine = Engine(0)
    slab, host = engine.slabs.make(1, ROOM), memory(ROOM, seed=5)
    engine.hosts.attach(HOST, host, ROOM)
    assert "no fatbins" in only_notice(engine)
    check_engines_alone(engine, slab, host)


@on_fake_driver(TIERD_FAKE_CUDA_PIECE_US=SLOW_US)
def test_memory_that_is_not_registered_is_not_gathered() -> None:
    """A kernel could not reach that memory, so the engines copy."""
    os.environ["TIERD_FATBINS_FOLDER"] = str(build_fatbins())
    engine = Engine(0)
    assert engine.copies.gather_bytes == {True: SIZES[-1], False: SIZES[-1]}
    slab, host = engine.slabs.make(1, ROOM), memory(ROOM, seed=5)
    strike("cuMemHostRegister:0:e801")
    engine.hosts.attach(HOST, host, ROOM)
    check_engines_alone(engine, slab, host)


# -- failures


@on_fake_driver()
def test_a_launch_that_fails_fails_its_call_and_leaves_nothing() -> None:
    """Any driver error raises TierFailed; nothing is pending, the run list is free, later calls work."""
    engine, slab, host = opened(gather_bytes=ALL)
    pieces, before = many(4096), images(slab, host)
    for error in ("e1", "e2", "e400", "e701", "e719"):
        for to_device in (True, False):
            strike(f"cuLaunchKernel:0:{error}")
            with pytest.raises(TierFailed, match="small pages cannot be gathered"):
                engine.copy(pack_pieces(pieces), to_device=to_device)
            del os.environ["TIERD_FAKE_CUDA_STRIKE"]
            assert "pending" not in counts()
    assert images(slab, host) == before
    check_copies(engine, slab, host, pieces)
    closed(engine, slab, host)


@on_fake_driver()
def test_a_kernel_that_faults_fails_its_call() -> None:
    """At an unmapped address the event reports the fault: the call fails and the context is lost."""
    engine, *_ = opened(gather_bytes=ALL)
    places = np.arange(RUNS_MIN, dtype=np.uint64) << np.uint64(12)
    runs = Runs(places + np.uint64(1 << 46), places + np.uint64(1 << 45), np.full(RUNS_MIN, 4096, np.uint64))
    with pytest.raises(TierFailed, match="ILLEGAL_ADDRESS"):
        engine.copies.run(runs, to_device=True, is_direct=True)
    assert not engine.lane.is_alive()


# -- the process


async def test_the_process_tells_its_limits_and_gathers(driver: pytest.MonkeyPatch) -> None:
    """The whole process: facts, then loads and stores of enough pages to gather."""
    driver.setenv("TIERD_FATBINS_FOLDER", str(build_fatbins()))
    driver.setenv("TIERD_FAKE_CUDA_PIECE_US", SLOW_US)
    gpu = Owner().process(patience_s=PATIENCE_S)
    facts = await gpu.start()
    assert (facts.gather_load_bytes, facts.gather_store_bytes) == (SIZES[-1], SIZES[-1])
    assert facts.copying == "pages up to 64 KiB to it and 64 KiB from it copied by a kernel"
    assert GpuFacts(gather_store_bytes=4096).copying == "pages up to 4 KiB from it copied by a kernel"
    slab, host = await gpu.make(1, ROOM), memory(ROOM, seed=6)
    await gpu.attach(HOST, host, ROOM)
    pieces = many(4096)
    assert lists(await gpu.load(pieces)) == sums_of(host, pieces, "host")
    assert bytes_at(slab, pieces, "slab") == bytes_at(host, pieces, "host")
    back = pieces.copy()
    back["host_offset"] += ROOM // 2
    await gpu.store(back)
    assert bytes_at(host, back, "host") == bytes_at(host, pieces, "host")
    await gpu.stop()
    for fd in (slab, host):
        os.close(fd)
