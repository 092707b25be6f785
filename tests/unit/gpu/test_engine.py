"""The GPU process's use of the driver, within one process: every byte, and every release."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest

from tests.unit.gpu.processes import HOST, LENGTH, RAGGED, SLAB, bytes_at, lists, memory, pieces_of, sums_of
from tests.unit.kernels.fake_driver import counts, on_fake_driver
from tierd.errors import InvalidArgument, Overloaded, TierFailed
from tierd.gpu import sums
from tierd.gpu.child import Engine
from tierd.gpu.protocol import pack_pieces, unpack_sums
from tools.fake_cuda import build_fatbins


def opened(*, seed: int = 5) -> tuple[Engine, int, int]:
    """An engine with slab 1 and host memory, and the descriptors of both."""
    engine = Engine(0)
    slab = engine.slabs.make(1, 2 * SLAB)
    host = memory(2 * LENGTH, seed=seed)
    assert engine.hosts.attach(HOST, host, 2 * LENGTH) == []
    return engine, slab, host


def closed(engine: Engine, *descriptors: int) -> None:
    """The driver and the system have everything back."""
    for fd in descriptors:
        os.close(fd)
    engine.close()
    assert counts() == {}


@on_fake_driver()
def test_bytes_go_both_ways() -> None:
    """Pages of every length arrive whole on the device and back, and no byte beside them changes."""
    engine, slab, host = opened()
    there, back = pieces_of(), pieces_of()
    back["host_offset"] += LENGTH
    image = bytearray(os.pread(host, 2 * LENGTH, 0))
    engine.copy(pack_pieces(there), to_device=True)
    assert bytes_at(slab, there, "slab") == bytes_at(host, there, "host")
    on_device = bytearray(2 * SLAB)
    for piece, data in zip(there, bytes_at(host, there, "host"), strict=True):
        on_device[int(piece["slab_offset"]) : int(piece["slab_offset"]) + len(data)] = data
        image[int(piece["host_offset"]) + LENGTH : int(piece["host_offset"]) + LENGTH + len(data)] = data
    assert os.pread(slab, 2 * SLAB, 0) == on_device
    assert engine.copy(pack_pieces(back), to_device=False) == {}
    assert os.pread(host, 2 * LENGTH, 0) == image
    closed(engine, slab, host)


@on_fake_driver()
def test_copies_in_one_call_may_adjoin_and_number_thousands() -> None:
    """Pages without gaps, in any order, up to the maximum of a call: each arrives."""
    engine, slab, host = opened()
    for lengths in ([4096] * 64, [3, 5] * 2048):
        pieces = pieces_of(lengths, gap=0)
        pieces["host_offset"] = pieces["slab_offset"]
        pieces[::3]["host_offset"] += LENGTH
        pieces = pieces[random.Random(1).sample(range(len(pieces)), len(pieces))]
        engine.copy(pack_pieces(pieces), to_device=True)
        assert bytes_at(slab, pieces, "slab") == bytes_at(host, pieces, "host")
    closed(engine, slab, host)


@on_fake_driver()
def test_sums_are_those_of_the_bytes_on_the_device() -> None:
    """A load and a request give the same slice sums; a changed device byte changes only its slice's sum."""
    engine, slab, host = opened()
    for layers in (1, 2, 36):
        pieces = pieces_of([9 * 36 * 4096, *RAGGED], layers=layers)
        loaded = unpack_sums(engine.copy(pack_pieces(pieces), to_device=True))
        asked = unpack_sums(engine.sums_of(pack_pieces(pieces)))
        assert lists(loaded) == lists(asked) == sums_of(host, pieces, "host")
    os.pwrite(slab, bytes([os.pread(slab, 1, 5000)[0] ^ 1]), 5000)
    changed = unpack_sums(engine.sums_of(pack_pieces(pieces)))
    assert np.flatnonzero(changed[0] != asked[0]).tolist() == [0]
    assert lists(changed[1:]) == lists(asked[1:])
    assert unpack_sums(engine.sums_of(b"")) == []
    twice = pieces_of([4096, 4096])
    twice["slab_offset"] = 0  # one of the two stays there, over any host bytes
    loaded = unpack_sums(engine.copy(pack_pieces(twice), to_device=True))
    assert lists(loaded) == sums_of(slab, twice, "slab")
    closed(engine, slab, host)


@on_fake_driver()
def test_the_kernel_sums_as_the_host_does() -> None:
    """The facts name the kernel and give no notice. Its tables equal the host's, also for more
    slices than one launch takes."""
    os.environ["TIERD_FATBINS_FOLDER"] = str(build_fatbins())
    sums.SLICES_MAX = 4
    engine, slab, host = opened()
    assert engine.facts()["hashes"] == "kernel"
    assert engine.facts()["notices"] == ()
    pieces = pieces_of(RAGGED, layers=3)
    assert lists(unpack_sums(engine.copy(pack_pieces(pieces), to_device=True))) == sums_of(host, pieces, "host")
    assert unpack_sums(engine.sums_of(b"")) == []
    many = pieces_of([*RAGGED, 9 * 4096, 262_144 * 3 + 5])
    assert lists(unpack_sums(engine.sums_of(pack_pieces(many)))) == sums_of(slab, many, "slab")
    closed(engine, slab, host)


@on_fake_driver()
def test_more_is_summed_than_is_staged_at_once() -> None:
    """Tables of blocks larger than the staging buffer are right."""
    engine = Engine(0)
    length = 20 << 20
    slab = engine.slabs.make(1, length)
    os.pwrite(slab, np.random.default_rng(3).bytes(length), 0)
    pieces = pieces_of([length // 2 + 1, length // 2 - 1, length], gap=0)
    pieces["slab_offset"][2] = 0
    assert lists(unpack_sums(engine.sums_of(pack_pieces(pieces)))) == sums_of(slab, pieces, "slab")
    closed(engine, slab)


@on_fake_driver()
def test_a_slab_is_zero_when_its_descriptor_leaves() -> None:
    """A new slab is zero though the driver's memory is not, and its descriptor is close-on-exec."""
    engine = Engine(0)
    slab = engine.slabs.make(1, 3 * SLAB)
    assert os.pread(slab, 3 * SLAB + 1, 0) == bytes(3 * SLAB)
    assert not os.get_inheritable(slab)
    closed(engine, slab)


@on_fake_driver(TIERD_FAKE_CUDA_BYTES=str(4 * SLAB))
def test_what_the_gpu_has_no_room_for_is_refused_and_leaves_nothing() -> None:
    """A slab beyond the GPU's memory is Overloaded, however often. Impossible sizes and used
    numbers are InvalidArgument. Nothing leaks, and a drop makes room."""
    engine, slab, host = opened()
    before, descriptors = counts(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(Overloaded, match="cuMemCreate gave CUDA_ERROR_OUT_OF_MEMORY"):
            engine.slabs.make(2, 3 * SLAB)
        for length in (0, SLAB - 4096, -SLAB):
            with pytest.raises(InvalidArgument, match="multiple of the GPU's granularity, 2097152"):
                engine.slabs.make(2, length)
        with pytest.raises(InvalidArgument, match="slab 1: exists already"):
            engine.slabs.make(1, SLAB)
        with pytest.raises(InvalidArgument, match="host 7: exists already"):
            engine.hosts.attach(HOST, host, LENGTH)
        for length in (0, 2 * LENGTH + 1):
            with pytest.raises(InvalidArgument, match="of a file that has 2097152"):
                engine.hosts.attach(8, host, length)
    assert (counts(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)
    engine.slabs.drop(1)
    other = engine.slabs.make(2, 4 * SLAB)
    closed(engine, slab, host, other)


@on_fake_driver()
def test_a_slab_is_taken_over_with_what_it_holds() -> None:
    """An engine adopts a slab by a descriptor that the giver keeps. A descriptor of no slab, or a
    wrong length, is refused and leaks nothing."""
    engine, slab, host = opened()
    pieces = pieces_of()
    engine.copy(pack_pieces(pieces), to_device=True)
    engine.slabs.drop(1)
    before, descriptors = counts(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierFailed, match="slab 5: cannot be taken over"):
        engine.slabs.adopt(5, host, SLAB)
    with pytest.raises(InvalidArgument, match="cuMemMap"):
        engine.slabs.adopt(5, slab, SLAB)
    assert (counts(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)
    engine.slabs.adopt(5, slab, 2 * SLAB)
    pieces["slab"] = 5
    assert lists(unpack_sums(engine.sums_of(pack_pieces(pieces)))) == sums_of(host, pieces, "host")
    closed(engine, slab, host)


@on_fake_driver(TIERD_FAKE_CUDA_STRIKE="cuMemHostRegister:0:e801")
def test_a_refusal_to_register_is_said_and_bytes_arrive() -> None:
    """The notice names the driver's error, and copies both ways are right over the driver's own detour."""
    engine = Engine(0)
    slab, host = engine.slabs.make(1, 2 * SLAB), memory(2 * LENGTH, seed=5)
    (notice,) = engine.hosts.attach(HOST, host, 2 * LENGTH)
    assert "not registered for DMA" in notice
    assert "CUDA_ERROR_NOT_SUPPORTED" in notice
    pieces = pieces_of()
    sums = unpack_sums(engine.copy(pack_pieces(pieces), to_device=True))
    assert lists(sums) == sums_of(host, pieces, "host")
    os.pwrite(host, bytes(2 * LENGTH), 0)
    engine.copy(pack_pieces(pieces), to_device=False)
    assert bytes_at(host, pieces, "host") == bytes_at(slab, pieces, "slab")
    assert lists(sums) == sums_of(host, pieces, "host")
    closed(engine, slab, host)


@on_fake_driver(TIERD_FAKE_CUDA_WITHOUT="cuMemcpyBatchAsync")
def test_a_driver_without_batches_is_said_and_bytes_arrive() -> None:
    """The engine copies the pieces one by one."""
    engine, slab, host = opened()
    assert any("no cuMemcpyBatchAsync" in notice for notice in engine.facts()["notices"])
    pieces = pieces_of()
    assert lists(unpack_sums(engine.copy(pack_pieces(pieces), to_device=True))) == sums_of(host, pieces, "host")
    closed(engine, slab, host)


@on_fake_driver(TIERD_FAKE_CUDA_STRIKE="cuMemcpyBatchAsync:1:e2")
def test_a_call_that_fails_leaves_nothing_under_way() -> None:
    """A refused copy raises an error, its lane is empty, and the next copy works."""
    engine, slab, host = opened()
    pieces = pack_pieces(pieces_of())
    with pytest.raises(Overloaded, match="cuMemcpyBatchAsync"):
        engine.copy(pieces, to_device=True)
    assert "pending" not in counts()
    assert counts().get("events", 0) == 0
    assert engine.lane.is_alive()
    engine.copy(pieces, to_device=True)
    assert bytes_at(slab, pieces_of(), "slab") == bytes_at(host, pieces_of(), "host")
    closed(engine, slab, host)


@on_fake_driver()
def test_a_wait_that_the_driver_refuses_leaves_nothing_under_way() -> None:
    """A refused event fails the call, but only after the copies have ended, and the next call works."""
    engine, slab, host = opened()
    pieces = pack_pieces(pieces_of())
    for call in ("cuEventRecord", "cuEventSynchronize"):
        os.pwrite(slab, bytes(2 * SLAB), 0)
        os.environ["TIERD_FAKE_CUDA_STRIKE"] = f"{call}:0:e2"
        with pytest.raises(Overloaded, match=call):
            engine.copy(pieces, to_device=True)
        assert "pending" not in counts(), call
        assert bytes_at(slab, pieces_of(), "slab") == bytes_at(host, pieces_of(), "host")
        del os.environ["TIERD_FAKE_CUDA_STRIKE"]
        engine.copy(pieces, to_device=True)
    assert not engine.is_lost()
    closed(engine, slab, host)


@on_fake_driver()
def test_work_that_nobody_can_wait_for_loses_the_gpu() -> None:
    """If neither the event nor the stream can report the end of copies, the process must exit."""
    engine, _, _ = opened()
    with pytest.raises(Overloaded), engine.lane.turn():
        os.environ["TIERD_FAKE_CUDA_STRIKE"] = "*:0:e2"
    del os.environ["TIERD_FAKE_CUDA_STRIKE"]
    assert engine.lane.is_alive()
    assert engine.is_lost()


@on_fake_driver(TIERD_FAKE_CUDA_STRIKE="cuMemHostAlloc:1:e2")
def test_a_beginning_without_memory_is_refused() -> None:
    """A refusal of pinned staging memory is Overloaded."""
    with pytest.raises(Overloaded, match="cuMemHostAlloc"):
        Engine(0)


def copy_in_threads(rounds: int) -> None:
    """Eight threads copy both ways, each its own pages of one slab and host memory; bytes and sums hold."""
    engine, slab, host = opened()
    faults = []

    def work(number: int) -> None:
        try:
            engine.device.enter()
            pieces = pieces_of([4096 + number, 100, 20000])
            pieces["slab_offset"] += number << 18
            pieces["host_offset"] += number << 18
            for _ in range(rounds):
                data = bytes_at(host, pieces, "host")
                tables = unpack_sums(engine.copy(pack_pieces(pieces), to_device=True))
                assert bytes_at(slab, pieces, "slab") == data
                assert lists(tables) == sums_of(host, pieces, "host")
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


@on_fake_driver()
def test_threads_copy_at_one_time() -> None:
    """Threads copy at once while the host makes the sums."""
    copy_in_threads(20)


@on_fake_driver()
def test_threads_sum_at_one_time() -> None:
    """Threads copy at once while the kernel makes the sums."""
    os.environ["TIERD_FATBINS_FOLDER"] = str(build_fatbins())
    copy_in_threads(5)
