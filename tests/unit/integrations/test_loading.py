"""LayerLoad: layers arrive in order, and a load that is given up writes nothing more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.system.blocks import await_true
from tierd.errors import Unavailable
from tierd.integrations import loading
from tierd.integrations.loading import LayerLoad, Loaded
from tierd.integrations.pieces import rows_out

LAYERS, BLOCKS, PIECE = 4, 5, 256
WAIT_S = 60.0


class Gate:
    """Copies of layers, one by one, each when the test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed, self.begun = threading.Semaphore(0), 0
        inner = loading.copy_rows

        def copy(rows: Any, is_over: Any) -> None:
            self.begun += 1
            assert self.allowed.acquire(timeout=WAIT_S)
            inner(rows, np.zeros(1, np.int32))  # a copy that has begun ends

        monkeypatch.setattr(loading, "copy_rows", copy)


class Case:
    """A load in a thread, from pages to an engine's memory, uint8 [layers, blocks, PIECE]."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.pages = rng.integers(1, 255, (BLOCKS, LAYERS * PIECE), dtype=np.uint8)
        self.memory = np.zeros((LAYERS, BLOCKS, PIECE), np.uint8)
        self.load, self.error = LayerLoad(), None
        self.blocks = [(self.pages[b], [self.memory[at, b] for at in range(LAYERS)]) for b in range(BLOCKS)]
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            self.load.copy(self.blocks)
        except Unavailable as error:
            self.error = error
        self.load.end(Loaded(good=(BLOCKS,)))

    def has(self, layer: int) -> bool:
        """Whether the layer of all blocks is in memory."""
        return bool((self.memory[layer] == self.pages[:, layer * PIECE : (layer + 1) * PIECE]).all())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    if rows_out(Case().blocks) is None:
        pytest.skip("the native library is not built: run python -m tools.native")
    return Gate(monkeypatch)


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    yield case
    if case.thread.ident is not None:
        case.thread.join(WAIT_S)


def test_a_layer_is_waited_for_alone(gate: Gate, case: Case) -> None:
    """A wait ends when its layer is in memory, before later ones are copied; the result needs all."""
    case.thread.start()
    for layer in range(LAYERS):
        assert not case.load.wait(layer, timeout_s=0) and case.load.result(timeout_s=0) is None
        gate.allowed.release()
        assert case.load.wait(layer, timeout_s=WAIT_S) and case.has(layer)
        assert not case.memory[layer + 1 :].any()
    assert case.load.result(timeout_s=WAIT_S) == Loaded(good=(BLOCKS,))
    assert not case.load.give_up() and case.load.result(timeout_s=0) is not None


def test_after_giving_up_nothing_is_written(gate: Gate, case: Case) -> None:
    """Giving up waits for the copy under way; then memory no longer changes, and nothing is good."""
    case.thread.start()
    gate.allowed.release()
    assert case.load.wait(0, timeout_s=WAIT_S)
    await_true(lambda: gate.begun == 2, "a copy under way")
    over = threading.Thread(target=case.load.give_up)
    over.start()
    await_true(lambda: case.load.is_given_up, "a load that is being given up")
    over.join(0.05)
    assert over.is_alive(), "the load was reported while a copy was under way"
    gate.allowed.release(LAYERS)
    over.join(WAIT_S)
    before = case.memory.copy()
    case.thread.join(WAIT_S)
    assert (case.memory == before).all() and not case.memory[2:].any()
    assert isinstance(case.error, Unavailable) and gate.begun == 2
    assert case.load.result(timeout_s=0) is None and not case.load.wait(0, timeout_s=0)
    assert case.load.end(Loaded(good=(BLOCKS,))).good == (0,)


def test_what_was_given_up_before_it_began_copies_nothing(case: Case) -> None:
    """A load that waits for a thread may be given up; the thread then leaves memory alone."""
    assert case.load.give_up()
    case.thread.start()
    case.thread.join(WAIT_S)
    assert not case.memory.any() and case.error is not None


def test_pieces_that_no_single_call_can_copy(case: Case) -> None:
    """Strided pieces, and blocks of several sizes, are copied piece by piece, in the same order."""
    wide = np.zeros((LAYERS, PIECE, 2), np.uint8)
    case.blocks[1] = (case.pages[1], [wide[at, :, 0] for at in range(LAYERS)])
    short = np.zeros((2, PIECE), np.uint8)
    case.blocks.append((case.pages[0, : 2 * PIECE], [*short]))
    assert rows_out(case.blocks) is None
    case.run()
    assert case.load.wait(LAYERS - 1, timeout_s=0)
    assert (wide[:, :, 0].reshape(-1) == case.pages[1]).all() and not wide[:, :, 1].any()
    assert (short.reshape(-1) == case.pages[0, : 2 * PIECE]).all()
    assert (case.memory[:, 2].reshape(-1) == case.pages[2]).all()


def test_layers_with_more_to_come_are_not_told(case: Case) -> None:
    """While encoded blocks are still to be decoded, no layer counts as loaded."""
    case.load.copy(case.blocks, are_all=False)
    assert not case.load.wait(0, timeout_s=0)
    case.load.end(Loaded(good=(BLOCKS,)))
    assert case.load.wait(LAYERS - 1, timeout_s=0)


def test_a_page_of_another_length_is_not_copied_by_rows(case: Case) -> None:
    """Pieces that do not add up to their page never become rows."""
    case.blocks[0] = (case.pages[0][:-1], case.blocks[0][1])
    assert rows_out(case.blocks) is None
