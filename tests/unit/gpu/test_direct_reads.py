"""Direct reads in a GPU process, on the fake driver and the fake cuFile. The fake cuFile aborts a
process that releases resources in a wrong order."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.still import stand_still
from tests.system.blocks import await_true
from tests.unit.gpu.processes import SLAB, Owner, descriptors, lists, running
from tests.unit.kernels.fake_driver import counts, on_fake_driver
from tierd.checksum import slice_sums
from tierd.core.formats.block import slice_lengths
from tierd.errors import InvalidArgument, TierFailed, Unsupported
from tierd.gpu import process
from tierd.gpu.child import Engine
from tierd.gpu.probe_file import probe_file
from tierd.gpu.process import GpuProcess
from tierd.gpu.protocol import READ

FILE = 5
BYTES = 1 << 20
LENGTHS = (4096, 1, 4095, 300_001, 0)


@pytest.fixture
def orders(driver: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that gives the fake cuFile its orders; reads are direct unless a test says otherwise."""
    path = tmp_path / "orders"
    driver.setenv("TIERD_FAKE_CUFILE", "nvfs")
    driver.setenv("TIERD_FAKE_CUFILE_ORDERS", str(path))
    return path


def order(orders: Path, word: str) -> None:
    """Sets the fault of all reads from now on."""
    orders.write_text(word)


@asynccontextmanager
async def reading(folder: Path, by: str = "auto") -> AsyncIterator[tuple[GpuProcess, int, bytes]]:
    """A process with slab 1 and an open file: yields it, the slab's descriptor and the file's bytes."""
    content, path = np.random.default_rng(3).bytes(BYTES), folder / "file"
    path.write_bytes(content)
    async with running() as (gpu, _):
        slab = await gpu.make(1, SLAB)
        with probe_file(folder) as probed:
            assert await gpu.probe(probed, by) == "nvidia-fs"
        await opened(gpu, path)
        yield gpu, slab, content
    os.close(slab)


async def opened(gpu: GpuProcess, path: Path, *, number: int = FILE, flags: int = os.O_DIRECT) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        await gpu.open_file(number, fd)
    finally:
        os.close(fd)


def reads_of(lengths: tuple[int, ...] = LENGTHS) -> np.ndarray:
    """READ: in this order in the file, in reverse order on the slab."""
    reads = np.zeros(len(lengths), READ)
    reads["file"], reads["slab"], reads["layers"], reads["length"] = FILE, 1, 1, lengths
    reads["room"] = -(-np.array(lengths) // 4096) * 4096
    reads["file_offset"] = np.cumsum(reads["room"]) - reads["room"]
    reads["slab_offset"] = reads["file_offset"][::-1] + 8192
    return reads


def sums_of(content: bytes, reads: np.ndarray) -> list[list[int]]:
    spans = [(int(read["file_offset"]), int(read["length"])) for read in reads]
    return [slice_sums(content[at : at + size], slice_lengths(size, 1)).tolist() for at, size in spans]


@pytest.mark.parametrize("by", ["auto", "kvikio"])
async def test_files_come_into_slabs(orders: Path, tmp_path: Path, by: str) -> None:
    """Blocks of every length arrive at their offsets with right sums; no byte outside their rooms changes.
    kvikio does the same, if it is installed."""
    if by == "kvikio" and find_spec(by) is None:
        pytest.skip("kvikio is not installed here: pip install kvikio-cu13")
    async with reading(tmp_path, by) as (gpu, slab, content):
        reads = reads_of((4096, 1, 4095, 300_001))
        reads["slab_offset"] = reads["file_offset"] + 8192
        slices, faults = await gpu.read(reads)
        assert (lists(slices), faults) == (sums_of(content, reads), {})
        end = int(reads["room"].sum())
        assert os.pread(slab, SLAB, 0) == bytes(8192) + content[:end] + bytes(SLAB - 8192 - end)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("file_offset", 512, "file_offset 512 is no multiple"),
        ("slab_offset", 512, "slab_offset 512 is no multiple"),
        ("room", 4097, "room 4097 is no multiple"),
        ("room", 0, "round up"),
        ("file_offset", BYTES, "of file 5, which has"),
        ("slab_offset", SLAB, "of slab 1, which has"),
        ("slab", 2, "slab 2: not there"),
        ("file", 6, "file 6: not there"),
    ],
)
async def test_a_wrong_piece_moves_nothing(orders: Path, tmp_path: Path, name: str, value: int, words: str) -> None:
    """One read that is misaligned, out of range or names an unknown object: the call moves no byte."""
    async with reading(tmp_path) as (gpu, slab, _):
        reads = reads_of((4096, 4096))
        reads[name][1] = value
        with pytest.raises(InvalidArgument, match=words):
            await gpu.read(reads)
        assert not any(os.pread(slab, SLAB, 0))


async def test_a_room_beyond_an_end_is_refused(orders: Path, tmp_path: Path) -> None:
    """cuFile reads the whole room, so the room must fit slab and file, not only the block's bytes."""
    async with reading(tmp_path) as (gpu, _, _):
        for name, end in (("slab_offset", SLAB), ("file_offset", BYTES)):
            reads = reads_of((1,))
            reads["room"], reads[name] = 8192, end - 4096
            with pytest.raises(InvalidArgument, match=f"8192 bytes at {end - 4096} of"):
                await gpu.read(reads)


def use_and_close(by: str) -> None:
    """An engine that opens, reads and closes files, and then closes."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "file"
        path.write_bytes(bytes(BYTES))
        engine = Engine(0)
        slab = engine.slabs.make(1, SLAB)
        with probe_file(Path(name)) as probed:
            assert engine.direct.probe(probed, by) == "nvidia-fs"
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for number in range(3):
            engine.direct.open_file(number + FILE, fd)
        engine.direct.read(reads_of().tobytes())
        engine.direct.close_file(FILE)
        os.close(fd)
        os.close(slab)
        engine.close()


@on_fake_driver(TIERD_FAKE_CUFILE="nvfs")
def test_an_engine_gives_cufile_back() -> None:
    """After files were opened and closed, the closing engine releases all of cuFile and the driver."""
    use_and_close("auto")
    assert counts() == {}


@pytest.mark.skipif(find_spec("kvikio") is None, reason="kvikio is not installed here: pip install kvikio-cu13")
@on_fake_driver(TIERD_FAKE_CUFILE="nvfs")
def test_an_engine_gives_kvikios_files_back() -> None:
    """The same of files that kvikio opened: cuFile refuses to close while one is registered."""
    use_and_close("kvikio")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("error", "cuFile: NVFS_DRIVER_ERROR (5010)"),
        ("eio", "the system refused the read"),
        ("short", "cuFile read 0 of 4096 bytes"),
    ],
)
async def test_what_failed_has_no_sums(orders: Path, tmp_path: Path, word: str, said: str) -> None:
    """Each read that fails or comes short is named with its reason and has no sums; the process lives."""
    async with reading(tmp_path) as (gpu, _, content):
        reads = reads_of((4096, 8192, 0))
        order(orders, word)
        slices, faults = await gpu.read(reads)
        assert [len(table) for table in slices] == [0, 0, 0]
        assert faults.keys() == {0, 1}
        order(orders, "")
        assert said in faults[0]
        slices, faults = await gpu.read(reads)
        assert (lists(slices), faults) == (sums_of(content, reads), {})


async def test_wrong_bytes_have_their_own_sums(orders: Path, tmp_path: Path) -> None:
    """Sums describe the bytes on the device, so a caller that knows the block detects wrong bytes."""
    async with reading(tmp_path) as (gpu, slab, content):
        reads = reads_of((4096,))
        order(orders, "wrong")
        ((table,), _) = await gpu.read(reads)
        lies = os.pread(slab, 4096, 8192)
        assert lies != content[:4096] and table.tolist() == slice_sums(lies, [4096]).tolist()


async def test_everything_is_given_back_in_order(orders: Path, tmp_path: Path) -> None:
    """Rounds of read, close, drop and reuse leak no descriptor, and a closed file is refused."""
    async with reading(tmp_path) as (gpu, _, _):
        before = len(descriptors(gpu.pid))
        for _ in range(5):
            await gpu.read(reads_of())
            await gpu.close_file(FILE)
            with pytest.raises(InvalidArgument, match="file 5: not there"):
                await gpu.read(reads_of())
            await opened(gpu, tmp_path / "file")
            with pytest.raises(InvalidArgument, match="exists already"):
                await opened(gpu, tmp_path / "file")
            await gpu.drop(1)
            os.close(await gpu.make(1, SLAB))
        await asyncio.to_thread(await_true, lambda: len(descriptors(gpu.pid)) == before, "as many descriptors")


async def test_a_slab_goes_when_its_reads_have_ended(orders: Path, tmp_path: Path) -> None:
    """A drop and the close of a file wait for the read in progress."""
    async with reading(tmp_path) as (gpu, _, content):
        order(orders, "hang")
        reads = reads_of((4096,))
        read = asyncio.create_task(gpu.read(reads))
        await asyncio.to_thread(await_true, orders.with_name("orders.held").exists, "a read that hangs")
        ends = [asyncio.create_task(gpu.drop(1)), asyncio.create_task(gpu.close_file(FILE))]
        await asyncio.wait(ends, timeout=0.2)
        assert not any(end.done() for end in ends)
        order(orders, "")
        assert lists((await read)[0]) == sums_of(content, reads)
        await asyncio.gather(*ends)


@pytest.mark.parametrize(
    ("way", "without", "said"),
    [
        ("", "", "DRIVER_NOT_INITIALIZED"),
        ("posix", "", "cuFile read it through host memory"),
        ("nvfs", "rdma", "CUDA_MEMORY_TYPE_INVALID"),
    ],
)
async def test_what_is_not_direct_is_unsupported(
    driver: pytest.MonkeyPatch, orders: Path, tmp_path: Path, way: str, without: str, said: str
) -> None:
    """A probe of an indirect way raises Unsupported with the reason, and leaks nothing."""
    driver.setenv("TIERD_FAKE_CUFILE", way)
    driver.setenv("TIERD_FAKE_CUDA_WITHOUT", without)
    async with running() as (gpu, _):
        for _ in range(3):
            with probe_file(tmp_path) as probed, pytest.raises(Unsupported, match=said):
                await gpu.probe(probed)
        os.close(await gpu.make(1, SLAB))


async def test_wrong_bytes_fail_a_probe(driver: pytest.MonkeyPatch, orders: Path, tmp_path: Path) -> None:
    """A way that returns other bytes than the file's fails the probe, whichever way it was."""
    driver.setenv("TIERD_FAKE_CUFILE", "wrong")
    async with running() as (gpu, _):
        with probe_file(tmp_path) as probed, pytest.raises(TierFailed, match="other bytes"):
            await gpu.probe(probed)


async def test_without_the_library_it_is_said_what_to_install(
    driver: pytest.MonkeyPatch, orders: Path, tmp_path: Path
) -> None:
    """With a driver but no libcufile, a probe names the remedy."""
    (tmp_path / "libcuda.so.1").symlink_to(f"{os.environ['LD_LIBRARY_PATH']}/libcuda.so.1")
    driver.setenv("LD_LIBRARY_PATH", str(tmp_path))
    async with running() as (gpu, _):
        with probe_file(tmp_path) as probed, pytest.raises(Unsupported, match="pip install nvidia-cufile"):
            await gpu.probe(probed)


async def test_nothing_is_read_before_a_probe(orders: Path, tmp_path: Path) -> None:
    """No file opens before a probe has passed; a file without O_DIRECT never opens."""
    (tmp_path / "file").write_bytes(bytes(4096))
    async with running() as (gpu, _):
        with pytest.raises(InvalidArgument, match="probe first"):
            await opened(gpu, tmp_path / "file")
        with probe_file(tmp_path) as probed:
            await gpu.probe(probed)
        with pytest.raises(Unsupported, match="IO_NOT_SUPPORTED"):
            await opened(gpu, tmp_path / "file", flags=0)


async def test_a_read_that_hangs_ends_its_process(orders: Path, tmp_path: Path) -> None:
    """When its patience ends, the process is killed, the reader gets an error, and `hung` names the verb."""
    (tmp_path / "file").write_bytes(bytes(4096))
    async with running(patience_s=0.5) as (gpu, owner):
        os.close(await gpu.make(1, SLAB))
        with probe_file(tmp_path) as probed:
            await gpu.probe(probed)
        await opened(gpu, tmp_path / "file")
        order(orders, "hang")
        with pytest.raises(TierFailed, match="read was not answered within 0.5 s"):
            await gpu.read(reads_of((4096,)))
        await asyncio.to_thread(await_true, lambda: bool(owner.told), "word of it")
        assert gpu.hung == "read" and not gpu.is_alive


async def test_a_read_of_an_immortal_process_does_not_end(orders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with copies: a reader waits as long as the process may still write into a slab."""
    monkeypatch.setattr(process, "REAP_S", 0.2)
    owner = Owner()
    gpu = owner.process(patience_s=0.5)
    await gpu.start()
    monkeypatch.setattr(gpu._child, "kill", lambda: None)
    stand_still(gpu.pid)
    read = asyncio.create_task(gpu.read(reads_of((4096,))))
    await asyncio.to_thread(await_true, lambda: bool(owner.told), "word of it")
    assert not read.done()
    os.kill(gpu.pid, signal.SIGKILL)
    with pytest.raises(TierFailed, match="does not end"):
        await read
    await gpu.stop()
