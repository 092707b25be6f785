"""The common parts of all integrations: versions, options, matches, pieces, couriers."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.checksum import slice_sums
from tierd.client.match import Match, claim
from tierd.core.formats.block import slice_lengths
from tierd.errors import ConfigError, InvalidArgument, Unsupported
from tierd.integrations.coding import refuse_codec
from tierd.integrations.courier import Courier
from tierd.integrations.facts import WORD_CHARS, EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.pieces import copy_all_in, copy_in, copy_out
from tierd.integrations.versions import check_version, has_run, release_of

SOON_S = 30.0
KIB = 1 << 10


@pytest.mark.parametrize("found", ["0.30.9", "0.34.0", "dev", "1", "0.40.1+cpu"])
def test_versions_outside_the_window(found: str) -> None:
    """An engine outside its window is refused with the window, the version and the remedy."""
    with pytest.raises(Unsupported, match=r"vllm .*vllm>=0\.31,<0\.34 .*install"):
        check_version("vllm", found)


def test_versions_inside_the_window() -> None:
    """Every version inside the window is accepted, and `has_run` names the tested ones."""
    for found in ("0.31.0", "0.32.0+cpu", "0.33.1"):
        check_version("vllm", found)
    assert has_run("vllm", "0.32.0+cpu") and has_run("sglang", "0.5.23") and not has_run("vllm", "0.33.0")
    assert release_of("5.19.0") == (5, 19) and release_of("main") == (0, 0)


@pytest.mark.parametrize("words", [{"sokcet": "x"}, {"threads": 0}, {"timeout_s": "soon"}, {"queue_limit": -1}])
def test_options_are_checked(words: dict[str, object]) -> None:
    """An unknown name or an impossible value is an error with its place and the known names."""
    with pytest.raises(ConfigError, match=rf"extra\.{next(iter(words))}: .*known are .*least_load_tokens"):
        Options.read(words, where="extra")
    assert Options.read({"threads": 3}, where="extra").threads == 3


@pytest.mark.parametrize("words", [{"codec": "int8"}, {"calibration": "x"}])
def test_an_integration_without_codecs_refuses_them(words: dict[str, str]) -> None:
    """The error names the option, the integration and the remedy; without the option there is none."""
    with pytest.raises(ConfigError, match=r"^codec: .* TierdTier stores blocks as they are; use TierdConnector, or"):
        refuse_codec(Options(**words), "TierdTier", "use TierdConnector")
    refuse_codec(Options(), "TierdTier", "use TierdConnector")


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 300), st.integers(0, 64))
def test_claims(found: int, computed: int, prompt: int, least: int) -> None:
    """A claim covers whole hit blocks, leaves a token to compute, and is 0 below its least."""
    gain = claim(Match(found, computed - computed % 16, prompt), tokens_per_block=16, least_tokens=least)
    end = computed - computed % 16 + gain
    assert gain == 0 or (end <= found and end < prompt and end % 16 == 0 and gain >= least)
    assert gain or min(found, prompt - 1) // 16 * 16 - (computed - computed % 16) < max(1, least)


def test_pieces_keep_their_order() -> None:
    """Pieces of any strides and types go into a page in the order of their axes, and come back equal."""
    rng = np.random.default_rng(7)
    kv = rng.integers(0, 255, (2, 3, 8, 4), dtype=np.uint8)
    pieces = [kv[0].transpose(1, 0, 2), kv[1, :, ::2], np.arange(5, dtype=np.float32)]
    page = np.zeros(sum(p.nbytes for p in pieces), dtype=np.uint8)
    copy_in(pieces, page)
    assert page.tobytes() == b"".join(np.ascontiguousarray(p).tobytes() for p in pieces)
    back = [np.zeros_like(p) for p in pieces]
    page.flags.writeable = False
    copy_out(page, back)
    assert all((a == b).all() for a, b in zip(pieces, back, strict=True))
    with pytest.raises(InvalidArgument, match="block_bytes is wrong"):
        copy_in(pieces[:2], page)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("lengths", [[5], [5, 4], [4096] * 4, [256 * KIB] * 3, [300 * KIB, 212 * KIB], [640 * KIB] * 2])
def test_what_is_copied_in_is_summed(lengths: list[int], layers: int) -> None:
    """Pages hold the pieces, contiguous or not, and the sums are those of the blocks' slices."""
    rng = np.random.default_rng(7)
    memory = [rng.integers(0, 255, (length, 2), dtype=np.uint8) for length in lengths]
    rows, strided = [np.ascontiguousarray(both[:, 0]) for both in memory], [both[:, 1] for both in memory]
    for blocks in ([rows, rows], [strided, rows], [[*rows[:-1], strided[-1]]]):
        pages, its_layers = [np.zeros(sum(lengths), np.uint8) for _ in blocks], [layers, 0][: len(blocks)]
        sums = copy_all_in(blocks, pages, its_layers)
        assert [page.tobytes() for page in pages] == [np.concatenate(block).tobytes() for block in blocks]
        tables = [slice_sums(page, slice_lengths(len(page), its)) for page, its in zip(pages, its_layers, strict=True)]
        assert sums.tolist() == np.concatenate(tables).tolist()


def test_pieces_of_torch() -> None:
    """Tensors go in and out like arrays, bfloat16 too, from pages that are read-only."""
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: tensors are checked in the engines' environments"
    )
    pieces = [torch.randn(3, 4).to(torch.bfloat16).t(), torch.arange(6, dtype=torch.int64)]
    page = np.zeros(24 + 48, dtype=np.uint8)
    copy_in(pieces, page)
    page.flags.writeable = False
    back = [torch.zeros_like(p) for p in pieces]
    copy_out(page, back)
    assert all(torch.equal(a, b) for a, b in zip(pieces, back, strict=True))
    assert page[:24].tobytes() == pieces[0].contiguous().view(torch.uint8).numpy().tobytes()


def test_tensors_are_summed() -> None:
    """A copy from tensors of any kind returns the sums of their bytes."""
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: tensors are checked in the engines' environments"
    )

    def bytes_of(tensor: Any) -> bytes:
        return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())

    plain = [[torch.randn(8 * KIB).to(torch.bfloat16)], [torch.arange(2 * KIB)]]
    for blocks in (
        plain,
        [*plain, [torch.randn(3, 4).t(), torch.ones(2)]],
        [[torch.ones(4 * KIB, requires_grad=True)]],
    ):
        pages = [np.zeros(sum(piece.nbytes for piece in block), np.uint8) for block in blocks]
        with torch.no_grad():
            sums = copy_all_in(blocks, pages, [0] * len(blocks))
        assert [page.tobytes() for page in pages] == [b"".join(map(bytes_of, block)) for block in blocks]
        assert sums.tolist() == [slice_sums(page, [len(page)])[0] for page in pages]


def test_a_courier_brings_each_job_back_once() -> None:
    """Each value or error comes out once, and the job above the limit is refused."""
    gate = threading.Event()
    courier: Courier[int, str] = Courier("test", threads=1, limit=3)
    assert courier.submit(1, lambda: "one" if gate.wait(SOON_S) else "late")
    assert courier.submit(2, lambda: str(1 // 0))
    assert courier.submit(3, lambda: "three")
    assert not courier.submit(4, lambda: "four") and courier.unfinished == 3 and courier.finished() == []
    gate.set()
    assert courier.drain(timeout_s=SOON_S)
    ended = {outcome.key: outcome for outcome in courier.finished()}
    assert ended[1].value == "one" and isinstance(ended[2].error, ZeroDivisionError) and ended[3].value == "three"
    assert courier.finished() == []
    assert courier.close(timeout_s=SOON_S) and not courier.submit(5, lambda: "five")


def test_a_closed_courier_leaves_nobody_waiting() -> None:
    """Close drops the jobs behind a running one, and they come out as not begun."""
    gate, begun = threading.Event(), threading.Event()
    courier: Courier[int, bool] = Courier("test", threads=1, limit=3)
    assert courier.submit(1, lambda: begun.set() or gate.wait(SOON_S)) and courier.submit(2, lambda: True)
    assert begun.wait(SOON_S) and not courier.close(timeout_s=0.0)
    gate.set()
    assert courier.drain(timeout_s=SOON_S)
    ended = {outcome.key: outcome for outcome in courier.finished()}
    assert ended[1].value is True and ended[2].value is None and not isinstance(ended[2].error, CancelledError)


def test_a_courier_wakes_after_each_outcome() -> None:
    """`wake` sees each outcome, also that of a job that never began, before close returns."""
    seen: list[int] = []
    courier: Courier[int, int] = Courier(
        "test", threads=1, limit=9, wake=lambda: seen.extend(o.key for o in courier.finished())
    )
    for key in range(4):
        assert courier.submit(key, lambda: 0)
    assert courier.close(timeout_s=SOON_S) and sorted(seen) == [0, 1, 2, 3]


def test_facts_fit_a_hello() -> None:
    """A hello contains only known facts, within its limit."""
    words = EngineFacts("vllm", "0.32.0", "TierdConnector", model="m" * 300).words()
    assert words == {"engine": "vllm", "version": "0.32.0", "face": "TierdConnector", "model": "m" * WORD_CHARS}
