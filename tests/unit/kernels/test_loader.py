"""The kernels loaded from fatbins by NVIDIA's bindings, on the fake driver; missing parts are named."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.depth import report
from tests.unit.kernels.fake_driver import (
    SLAB,
    DeviceArray,
    counts,
    entered,
    mapped,
    ok,
    on_fake_driver,
    shareable,
)
from tests.unit.kernels.kernel_cases import Case, Narrow, Shape, allocate, decoded, made
from tierd.errors import ConfigError, InvalidArgument, TierFailed, Unsupported
from tierd.kernels import Attended, params
from tierd.kernels.library import Emulated, open_library
from tierd.kernels.loaded import Loaded
from tierd.kernels.paged import DecodeShape, PagedDecode, decode_blocks, merge_parts
from tools.fake_cuda import build_fatbins
from tools.kernels import build_emulator

HEADS, DIM, PARTS, ROWS = 2, 64, 3, 4
BLOCKS = 5
"""Blocks of a decode, so that both add in the same order."""


def moved(cuda: Any, told: Any) -> Any:
    """A dataclass of arrays and numbers with its arrays copied to the device."""
    arrays = {f.name: getattr(told, f.name) for f in fields(told) if isinstance(getattr(told, f.name), np.ndarray)}
    return replace(told, **{name: DeviceArray(cuda, array) for name, array in arrays.items()})


def parts() -> tuple[Any, Any]:
    """Outputs and log-sum-exps to merge; one of them has seen no token."""
    rng = np.random.default_rng(1)
    lses = rng.standard_normal((PARTS, ROWS, HEADS)).astype(np.float32)
    lses[0, 0] = -np.inf
    return rng.standard_normal((PARTS, ROWS, HEADS, DIM)).astype(np.float32), lses


def merged(library: Any, outs: Any, lses: Any, place: Any) -> Attended:
    """The merge of these, in arrays made by `place`."""
    to = Attended(place(allocate((ROWS, HEADS, DIM), "float32")), place(allocate((ROWS, HEADS), "float32")))
    return merge_parts(library, place(outs), place(lses), to)


def merge_of(address: int = 0) -> params.Merge:
    """Parameters of no rows."""
    return params.Merge(address, address, address, address, 0, 0, 0)


def decoded_on_device(cuda: Any, loaded: Loaded, case: Case) -> Attended:
    """The result of the decode kernels, in arrays on the device."""
    n, heads, dim = case.q.shape
    decode = PagedDecode(
        loaded,
        DecodeShape(n + 1, heads, case.shape.kv_heads, dim),
        blocks=BLOCKS,
        allocate=lambda shape, dtype: DeviceArray(cuda, allocate(shape, dtype)),
    )
    mass = allocate((n, heads, case.device.tables.shape[1]), "float32")
    to = Attended(np.full_like(case.q, np.nan), allocate((n, heads), "float32"), mass)
    pages = replace(case.pages, k=DeviceArray(cuda, case.pages.k), v=DeviceArray(cuda, case.pages.v))
    return decode(DeviceArray(cuda, case.q), pages, moved(cuda, case.device), moved(cuda, to))


@on_fake_driver()
def test_decode_gives_the_bits_of_the_emulator() -> None:
    """Plan, decode, merge and page masses on the device equal the emulator's direct results to the bit."""
    cuda, case = entered(), made(Shape(((1, 133), (1, 0), (1, 300))))
    want = decoded(Emulated(build_emulator()), case, blocks=BLOCKS)
    got = decoded_on_device(cuda, Loaded(build_fatbins()), case)
    for name in ("out", "lse", "mass"):
        assert getattr(got, name).numpy().tobytes() == getattr(want, name).tobytes(), name


@on_fake_driver()
def test_merge_gives_the_bits_of_the_emulator() -> None:
    """The merge of parts on the device equals the emulator's to the bit, also for an empty part."""
    cuda, (outs, lses) = entered(), parts()
    got = merged(Loaded(build_fatbins()), outs, lses, lambda array: DeviceArray(cuda, array))
    want = merged(Emulated(build_emulator()), outs, lses, lambda array: array)
    assert got.out.numpy().tobytes() == want.out.tobytes()
    assert got.lse.numpy().tobytes() == want.lse.tobytes()


@on_fake_driver()
def test_a_launch_goes_to_the_current_stream() -> None:
    """A launch runs in the stream that is current then, given or torch's; without a wait no result shows."""
    cuda, (outs, lses) = entered(), parts()
    current = [ok(cuda.cuStreamCreate(1)), ok(cuda.cuStreamCreate(1))]
    own = Loaded(build_fatbins(), stream=lambda: int(current[0]))
    torch_like = SimpleNamespace(_C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: int(current[ordinal])))
    of_torch = Loaded(build_fatbins())
    sys.modules["torch"] = torch_like  # type: ignore[assignment]
    for library in (own, of_torch):
        for i in (0, 1):
            current.reverse()
            got = merged(library, outs, lses, lambda array: DeviceArray(cuda, array))
            ok(cuda.cuStreamSynchronize(current[1]))
            assert np.isnan(got.lse.numpy()).all(), f"launch {i} ran without a wait for its stream"
            ok(cuda.cuStreamSynchronize(current[0]))
            assert not np.isnan(got.lse.numpy()).any()


@on_fake_driver()
def test_a_launch_that_cannot_be_is_refused_by_name() -> None:
    """Unknown kernels, wrong parameter sizes and too much shared memory are refused before a launch."""
    entered()
    loaded = Loaded(build_fatbins())
    grid = (1, 1, 1)
    with pytest.raises(InvalidArgument, match="merge_f64: the fatbins have no such kernel"):
        loaded.launch("merge_f64", grid, merge_of())
    with pytest.raises(InvalidArgument, match=r"merge_f32: takes 48 bytes of parameters, Summary has \d+; rebuild"):
        loaded.launch("merge_f32", grid, params.Summary())
    with pytest.raises(
        InvalidArgument, match="merge_f32: needs 300000 bytes of shared memory, a block of cuda:0 has 232448"
    ):
        loaded.launch("merge_f32", grid, merge_of(), shared_bytes=300_000)
    with pytest.raises(
        InvalidArgument, match=r"merge_f32: a launch of grid \(1, 70000, 1\).* gave CUDA_ERROR_INVALID_VALUE \(1\): "
    ):
        loaded.launch("merge_f32", (1, 70_000, 1), merge_of())
    loaded.launch("merge_f32", (0, 1, 1), merge_of())
    assert "pending" not in counts()


@on_fake_driver()
def test_shared_memory_above_the_plain_limit_is_asked_for() -> None:
    """A kernel with more than 48 KiB of shared memory launches, and its blocks per GPU follow from it."""
    cuda = entered()
    loaded = Loaded(build_fatbins())
    loaded.launch("merge_f32", (1, 1, 1), merge_of_some(cuda), shared_bytes=200_000)
    ok(cuda.cuCtxSynchronize())
    assert loaded.resident_blocks("decode_bf16_bf16_256", shared_bytes=100_000) == 2 * 132
    assert loaded.resident_blocks("decode_bf16_bf16_256", shared_bytes=200_000) == 132


@on_fake_driver(TIERD_FAKE_CUDA_BLOCK_SHARED_BYTES=str(99 << 10))
def test_a_gpu_with_99_kib_decodes_what_llama_asks() -> None:
    """A GPU with 99 KiB blocks decodes Llama-3-8B's heads and the widest with the emulator's bits."""
    cuda, emulated = entered(), Narrow(Emulated(build_emulator()), 99 << 10)
    loaded = Loaded(build_fatbins())
    for head_dim in (128, 256):
        case = made(Shape(((1, 133), (1, 0), (1, 40)), head_dim=head_dim))
        shape = DecodeShape(3, 8, 2, head_dim)
        assert decode_blocks(loaded, shape, q_type="bf16", kv_type="bf16") == 3 * 132
        want, got = decoded(emulated, case, blocks=BLOCKS), decoded_on_device(cuda, loaded, case)
        for name in ("out", "lse", "mass"):
            assert getattr(got, name).numpy().tobytes() == getattr(want, name).tobytes(), name


@on_fake_driver(TIERD_FAKE_CUDA_BLOCK_SHARED_BYTES="60000")
def test_a_gpu_with_too_little_shared_memory_is_told_so() -> None:
    """A shape that fits no block is refused with argument, limit and remedy, before any launch."""
    cuda, loaded, case = entered(), Loaded(build_fatbins()), made(Shape(((1, 40),), head_dim=128))
    said = "^q: head_dim 128 of bf16 with 4 query heads .* takes 74208 bytes .* a block of cuda:0 has 60000; give pages of e4m3"
    with pytest.raises(InvalidArgument, match=said):
        decode_blocks(loaded, DecodeShape(1, 8, 2, 128), q_type="bf16", kv_type="bf16")
    with pytest.raises(InvalidArgument, match=said):
        decoded_on_device(cuda, loaded, case)
    assert "pending" not in counts()


def merge_of_some(cuda: Any) -> params.Merge:
    """Parameters of one row."""
    place = int(ok(cuda.cuMemAlloc(4096)))
    return params.Merge(place, place + 1024, place + 2048, place + 3072, 1, 1, 8)


@on_fake_driver()
def test_any_thread_may_launch() -> None:
    """A thread without a context gets the device's at its first launch."""
    cuda = entered()
    loaded, told, failed = Loaded(build_fatbins()), merge_of_some(cuda), list[BaseException]()

    def launch() -> None:
        try:
            loaded.launch("merge_f32", (1, 1, 1), told)
            loaded.launch("merge_f32", (1, 1, 1), told)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(60)
    assert failed == []
    assert counts()["pending"] == 2


@on_fake_driver(TIERD_FAKE_CUDA_DEVICES="2")
def test_a_launch_goes_to_its_own_gpu() -> None:
    """A launch into stream 0 runs on its own GPU under any current context, which it restores."""
    cuda = entered()
    first, second = int(ok(cuda.cuCtxGetCurrent())), ok(cuda.cuDevicePrimaryCtxRetain(1))
    loaded = Loaded(build_fatbins(), ordinal=1)
    ok(cuda.cuCtxPushCurrent(second))
    told = merge_of_some(cuda)
    ok(cuda.cuCtxPopCurrent())
    loaded.launch("merge_f32", (1, 1, 1), told, shared_bytes=200_000)
    assert int(ok(cuda.cuCtxGetCurrent())) == first
    current = list[int]()

    def launch() -> None:
        loaded.launch("merge_f32", (1, 1, 1), told)
        current.append(int(ok(cuda.cuCtxGetCurrent())))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(60)
    assert current == [0]
    ok(cuda.cuCtxSynchronize())
    assert counts()["pending"] == 2, "the other GPU was given the work"
    ok(cuda.cuCtxPushCurrent(second))
    ok(cuda.cuCtxSynchronize())
    assert "pending" not in counts()


@on_fake_driver()
def test_a_kernel_cannot_write_what_it_may_only_read() -> None:
    """A kernel that writes to a read-only page loses the context; the next launch names the remedy."""
    cuda = entered()
    loaded, told = Loaded(build_fatbins()), merge_of_some(cuda)
    told.out = mapped(cuda, ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0)), rights="READ")
    loaded.launch("merge_f32", (1, 1, 1), told)
    assert ok_or_name(cuda.cuCtxSynchronize()) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(TierFailed, match=r"merge_f32: .* gave CUDA_ERROR_ILLEGAL_ADDRESS \(700\): .* end it"):
        loaded.launch("merge_f32", (1, 1, 1), told)


def ok_or_name(answer: tuple[Any, ...]) -> str:
    return str(answer[0].name)


@on_fake_driver()
def test_closing_gives_everything_back() -> None:
    """After `close` no library is loaded, and only other owners hold the context."""
    entered()
    before = counts()
    loaded = Loaded(build_fatbins())
    assert counts() == before | {"libraries": len(list(build_fatbins().iterdir()))}
    loaded.close()
    loaded.close()
    assert counts() == before
    with pytest.raises(InvalidArgument, match="merge_f32"):
        loaded.launch("merge_f32", (1, 1, 1), merge_of())


@on_fake_driver()
def test_fatbins_that_are_missing_or_damaged_are_named() -> None:
    """Missing fatbins are an error with the remedy; a damaged one is named with its path."""
    folder = Path("/proc/self/fdinfo")
    with pytest.raises(
        Unsupported, match=f"no fatbins in {folder}: tierd was installed without them; `tierd kernels build`"
    ):
        Loaded(folder)
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "merge.fatbin").write_bytes(b"\x7fELF" + bytes(60))
        with pytest.raises(Unsupported, match=r"merge\.fatbin: cuLibraryLoadData gave CUDA_ERROR_INVALID_IMAGE"):
            Loaded(Path(place))


@on_fake_driver(TIERD_FAKE_CUDA_DEVICES="0")
def test_a_machine_without_a_gpu_is_named() -> None:
    """A machine with the driver but no GPU is Unsupported with NO_DEVICE."""
    with pytest.raises(Unsupported, match="CUDA_ERROR_NO_DEVICE"):
        open_library()


@on_fake_driver()
def test_a_gpu_that_is_not_there_is_named() -> None:
    """A number above that of the GPUs is refused."""
    with pytest.raises(Unsupported, match="cuda:7: cuDeviceGet gave CUDA_ERROR_INVALID_DEVICE"):
        Loaded(build_fatbins(), ordinal=7)


def test_missing_bindings_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVIDIA's bindings the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.delenv("TIERD_KERNELS", raising=False)
    with pytest.raises(Unsupported, match=r"pip install 'tierd\[gpu\]'"):
        open_library()


def test_the_environment_chooses_emulated_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TIERD_KERNELS=emulated uses the named library; without one, or with another value, an error says so."""
    monkeypatch.setenv("TIERD_KERNELS", "emulated")
    monkeypatch.delenv("TIERD_KERNELS_LIBRARY", raising=False)
    with pytest.raises(Unsupported, match=r"TIERD_KERNELS_LIBRARY: is not set.*tools\.kernels emulator"):
        open_library()
    monkeypatch.setenv("TIERD_KERNELS_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(Unsupported, match="none.so is not there"):
        open_library()
    monkeypatch.setenv("TIERD_KERNELS", "cpu")
    with pytest.raises(ConfigError, match="TIERD_KERNELS: is 'cpu'"):
        open_library()


@on_fake_driver()
def test_what_a_decode_costs_is_reported() -> None:
    """A decode with masses, four launches, costs the caller below 5 ms; the cost is reported.
    The fake driver has a part in it."""
    cuda, case = entered(), made(Shape(((1, 133), (1, 300))))
    stream = ok(cuda.cuStreamCreate(1))
    loaded = Loaded(build_fatbins(), stream=lambda: int(stream))
    n, heads, dim = case.q.shape
    place = DecodeShape(n, heads, case.shape.kv_heads, dim)
    decode = PagedDecode(loaded, place, blocks=BLOCKS, allocate=lambda *asked: DeviceArray(cuda, allocate(*asked)))
    mass = allocate((n, heads, case.device.tables.shape[1]), "float32")
    given = (
        DeviceArray(cuda, case.q),
        replace(case.pages, k=DeviceArray(cuda, case.pages.k), v=DeviceArray(cuda, case.pages.v)),
        moved(cuda, case.device),
        moved(cuda, Attended(case.q, allocate((n, heads), "float32"), mass)),
    )
    costs = []
    for _ in range(20):
        begun = time.perf_counter()
        decode(*given)
        costs.append(time.perf_counter() - begun)
    report(
        "decode through the bindings",
        best_us=round(min(costs) * 1e6, 2),
        first_us=round(costs[0] * 1e6, 2),
        of=len(costs),
    )
    assert min(costs) < 5e-3


@on_fake_driver()
def test_what_a_launch_costs_is_reported() -> None:
    """A launch costs the caller less than a millisecond; the cost, with the fake driver's, is reported."""
    cuda = entered()
    loaded, told, stream = Loaded(build_fatbins()), merge_of_some(cuda), ok(cuda.cuStreamCreate(1))
    loaded._stream = lambda: int(stream)
    costs = []
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(100):
            loaded.launch("merge_f32", (1, 1, 1), told)
        costs.append((time.perf_counter() - begun) / 100)
        ok(cuda.cuStreamSynchronize(stream))
    report("launch through the bindings", best_us=round(min(costs) * 1e6, 2), of=len(costs))
    assert min(costs) < 1e-3
