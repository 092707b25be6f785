"""Decode steps whose arrays stay on the device: the same tokens as passes, captured and replayed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.compilers import skip_without
from tests.system.lone_worker import SPEC, random_model
from tests.unit.worker.conftest import StoringPages
from tierd.errors import TierFailed
from tierd.kernels.attention import KernelAttention
from tierd.kernels.e4m3 import E4M3
from tierd.kernels.library import Emulated
from tierd.worker import decoding
from tierd.worker.backend import Backend
from tierd.worker.decoding import Decoding
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.far import FarChoice
from tierd.worker.pages import Held, LocalPages, Page, PageShape, PageSource, page_shape
from tierd.worker.report import Request
from tierd.worker.tokens.choice import TokenChoice
from tools.kernels import MissingTool, build_emulator

PROMPTS = [tuple((n * i * i + 3) % 64 for i in range(20 + 7 * n)) for n in range(1, 5)]
REQUESTS = [Request(PROMPTS[i % 4], 4 + 7 * i % 17) for i in range(6)]
"""Two prompts twice, lengths that end anywhere: sequences join, leave and commit the same blocks."""
DRAWN = Request(PROMPTS[0], 6, temperature=1.3, samples=2, seed=5)


@pytest.fixture(scope="module")
def library() -> Emulated:
    """The kernels' library, built for the CPU."""
    try:
        return Emulated(build_emulator())
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")


def engine_of(source: PageSource, library: Any, **options: Any) -> Engine:
    """An engine with kernels."""
    model = random_model(source.shape.backend)
    return Engine(model, source, attention=KernelAttention(library), options=EngineOptions(**options))


def storing(dtype: str = "float16") -> StoringPages:
    """Pages of numpy that store."""
    return StoringPages(page_shape(random_model(), kv_dtype=dtype))


def local() -> LocalPages:
    """Pages of numpy that store nothing."""
    return LocalPages(page_shape(random_model(), kv_dtype="float16"))


@pytest.fixture
def on_torch() -> Iterator[PageShape]:
    """The shape of pages of torch, which computes in one thread: small products in several are slow."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tierd[worker]'")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield page_shape(random_model(Backend("torch", "float32")), kv_dtype="float16")
    torch.set_num_threads(threads)


def captures(library: Emulated, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library whose launches are captured with torch's operations."""
    from tests.unit.worker.cpu_graph import Recorded

    recorded = Recorded(library)
    monkeypatch.setattr(Backend, "captured", recorded.captured)
    return recorded


def begun(engine: Engine, requests: list[Request]) -> list[Any]:
    """Sequences that decode."""
    sequences = [engine.begin(request) for request in requests]
    engine.pick(sequences)
    return sequences


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """The calls of a method of Decoding, by their arguments."""
    calls, plain = list[Any](), getattr(Decoding, name)

    def noted(self: Decoding, *given: Any) -> Any:
        calls.append(given)
        return plain(self, *given)

    monkeypatch.setattr(Decoding, name, noted)
    return calls


@pytest.mark.parametrize("kv_dtype", ["float16", E4M3])
def test_steps_give_the_tokens_of_passes(library: Emulated, monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    """Sequences that join, leave, fork, reuse and commit the same blocks get the tokens of passes."""
    steps, told = counted(monkeypatch, "_run"), []
    for by_steps in (False, True):
        source = storing(kv_dtype)
        with engine_of(source, library, decode_graphs=by_steps, batch_limit=5) as engine:
            reports = engine.generate([*REQUESTS, DRAWN]) + engine.generate(REQUESTS[:2])
        told.append([(r.tokens, r.reused_tokens, r.committed_blocks, r.stored_tokens) for r in reports])
        assert bool(steps) == by_steps and source.held == 0
    assert told[0] == told[1]


def test_a_replay_needs_nothing_but_its_arrays(
    library: Emulated, monkeypatch: pytest.MonkeyPatch, on_torch: PageShape
) -> None:
    """Captured steps, replayed without Python and over ruined results, give the tokens of passes."""
    recorded = captures(library, monkeypatch)
    steps, calls = counted(monkeypatch, "_run"), counted(monkeypatch, "_compute")
    got, want = (
        engine_of(LocalPages(on_torch), used, decode_graphs=by_steps, batch_limit=5).generate([*REQUESTS, DRAWN])
        for used, by_steps in ((recorded, True), (library, False))
    )
    assert [report.tokens for report in got] == [report.tokens for report in want]
    assert 1 < len(recorded.captures) < recorded.replays
    assert len(steps) == len(calls) - len(recorded.captures) + recorded.replays


def test_a_step_brings_one_small_array(library: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step copies six numbers a row, and whole tables only when more entries changed than it has rows."""
    filled, plain = list[int](), decoding._fill
    monkeypatch.setattr(decoding, "_fill", lambda to, values: (filled.append(values.nbytes), plain(to, values)))
    engine = engine_of(local(), library, batch_limit=4)
    sequences = begun(engine, [Request(prompt, 40) for prompt in PROMPTS[:3]])
    engine.step(sequences)
    each = 6 * 4 * 8
    assert filled == [3 * SPEC.max_positions // 16 * 4, each], "tables of three sequences came first"
    del filled[:]
    for _ in range(30):
        engine.step(sequences)
    assert filled == [each] * 30
    assert len({len(sequence.table.pages) for sequence in sequences}) > 1


def test_pages_off_the_steps_are_numbered_anew(
    library: Emulated, monkeypatch: pytest.MonkeyPatch, on_torch: PageShape
) -> None:
    """A page between the steps of the others begins numbers and captures anew; one below them does not."""
    shape, recorded = on_torch, captures(library, monkeypatch)
    want = engine_of(LocalPages(shape), library, decode_graphs=False).generate([Request(PROMPTS[0], 40)])
    room = bytearray(64 * shape.block_bytes + 4096)
    start = -np.frombuffer(room, np.uint8).ctypes.data % 64
    places = iter(
        [start + 40 * shape.block_bytes, *(start + i * shape.block_bytes for i in (42, 41, 3)), start + 64 * 5]
    )

    class Odd(LocalPages):
        def _take(self) -> Page:
            at = next(places)
            return Page(self.shape.view(memoryview(room)[at : at + self.shape.block_bytes]))

    calls = counted(monkeypatch, "_renumber")
    got = engine_of(Odd(shape), recorded).generate([Request(PROMPTS[0], 40)])
    assert got[0].tokens == want[0].tokens
    assert len(calls) == len(recorded.captures) == 3


def test_a_step_is_a_pass_while_blocks_arrive(library: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a held prompt waits for each layer of the blocks that still come."""
    awaited, source = list[int | None](), storing()
    engine, request = engine_of(source, library), Request((*PROMPTS[0], *PROMPTS[1])[:33], 5)
    want = engine.generate([request])[0].tokens
    acquire = source.acquire

    def arriving(*given: Any, **more: Any) -> Held:
        return replace(acquire(*given, **more), arriving=lambda layer: awaited.append(layer) or True)

    monkeypatch.setattr(source, "acquire", arriving)
    again = engine.generate([request])[0]
    assert (again.tokens, again.reused_tokens, awaited) == (want, 32, [0, 1])


def test_a_failed_step_leaves_no_stale_table(library: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that failed before its entries arrived is computed again with all of them."""
    engine = engine_of(storing(), library)
    want = engine_of(storing(), library, decode_graphs=False).generate([Request(PROMPTS[2], 30)])
    (sequence,) = begun(engine, [Request(PROMPTS[2], 30)])
    plain = decoding._fill

    def fails(*_: Any) -> None:
        raise TierFailed("the GPU is gone")

    while not sequence.is_done:
        monkeypatch.setattr(decoding, "_fill", fails)
        with pytest.raises(TierFailed):
            engine.step([sequence])
        monkeypatch.setattr(decoding, "_fill", plain)
        engine.step([sequence])
    assert sequence.generated == want[0].tokens


def test_what_cannot_be_captured_runs_all_the_same(
    library: Emulated, monkeypatch: pytest.MonkeyPatch, on_torch: PageShape, caplog: pytest.LogCaptureFixture
) -> None:
    """If torch refuses a capture, the log says so once a size, and steps run without one."""
    shape, recorded = on_torch, captures(library, monkeypatch)
    want = engine_of(LocalPages(shape), library, decode_graphs=False).generate(REQUESTS[:1])
    plain = Decoding._compute

    def reads(self: Decoding, size: int) -> Any:
        scores, likeliest = plain(self, size)
        return scores, likeliest + 0 * int(likeliest[0])

    monkeypatch.setattr(Decoding, "_compute", reads)
    with caplog.at_level(logging.WARNING):
        got = engine_of(LocalPages(shape), recorded).generate(REQUESTS[:1])
    assert got[0].tokens == want[0].tokens and not recorded.captures
    assert [record.message for record in caplog.records] == [
        "decode steps of 1 sequences run without a CUDA graph: operation not permitted when stream is capturing"
    ]


@pytest.fixture
def as_on_gpu(library: Emulated, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[tuple[int, ...]]]:
    """An engine that takes a step's results as from a GPU, and the shapes of the logits that it brings."""
    engine, brought = engine_of(storing(), library), list[tuple[int, ...]]()
    plain = engine._take

    def take(*given: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Backend, "is_on_gpu", True)
            patch.setattr(Backend, "to_numpy", lambda _, array: brought.append(array.shape) or np.asarray(array))
            plain(*given)

    monkeypatch.setattr(engine, "_take", take)
    return engine, brought


def test_a_gpu_gives_only_logits_that_are_needed(as_on_gpu: tuple[Engine, list[tuple[int, ...]]]) -> None:
    """From a GPU, greedy sequences get their token alone; drawn ones get their logits too."""
    engine, brought = as_on_gpu
    requests = [Request(PROMPTS[i], 9, temperature=i) for i in range(3)]
    sequences = begun(engine, requests)
    engine.compute(sequences)
    assert [len(sequence.logits) for sequence in sequences] == [0, SPEC.vocab_size, SPEC.vocab_size]
    assert brought == [(2, SPEC.vocab_size)]
    assert [s.likeliest == int(np.argmax(s.logits)) for s in sequences[1:]] == [True, True]


def test_scores_get_their_logits_from_a_gpu(as_on_gpu: tuple[Engine, list[tuple[int, ...]]]) -> None:
    """Scores behind a prompt of which all but one token is stored equal those of the computed one."""
    engine, brought = as_on_gpu
    request = Request((*PROMPTS[0], *PROMPTS[1])[:33], 1)
    want = engine.score(request, [3, 1, 4])
    engine.generate([request])
    del brought[:]
    np.testing.assert_allclose(engine.score(request, [3, 1, 4]), want, rtol=0, atol=2e-3)
    assert brought == [(1, SPEC.vocab_size)] * 4


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        (Request(PROMPTS[0], 4), {"measure_attention": True}),
        (Request(PROMPTS[0], 4, samples=2), {"batch_limit": 1}),
        (Request(PROMPTS[3], 4, token_policy=TokenChoice("quest", 0.5)), {}),
        (Request((*PROMPTS[2], *PROMPTS[3]), 4, far=FarChoice(2, 64)), {}),
    ],
    ids=["masses", "samples", "policy", "far"],
)
def test_other_steps_are_passes(
    library: Emulated, monkeypatch: pytest.MonkeyPatch, request_: Request, options: dict[str, Any]
) -> None:
    """Steps with page masses, of more samples than the limit, of a token policy, or over a far prompt
    are passes."""
    calls = counted(monkeypatch, "_run")
    engine = engine_of(storing(), library, **options)
    assert len(engine.generate([request_])) == request_.samples
    assert not calls
