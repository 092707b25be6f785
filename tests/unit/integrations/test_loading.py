"""Copies of a load: by one call, or piece by piece in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierd.integrations.coding import Codings, Target
from tierd.integrations.loading import Filled, _copy, decoded
from tierd.integrations.options import Options
from tierd.integrations.pieces import rows_out

LAYERS, BLOCKS, PIECE = 4, 5, 256


class Case:
    """Pages, and an engine's memory for them, uint8 [layers, blocks, PIECE]."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.pages = rng.integers(1, 255, (BLOCKS, LAYERS * PIECE), dtype=np.uint8)
        self.memory = np.zeros((LAYERS, BLOCKS, PIECE), np.uint8)
        self.blocks: list[Any] = [(self.pages[b], [self.memory[at, b] for at in range(LAYERS)]) for b in range(BLOCKS)]


def test_pieces_in_host_memory_are_copied_by_one_call() -> None:
    """All pieces of all blocks have their bytes."""
    case = Case()
    assert rows_out(case.blocks) is not None
    _copy(case.blocks, None)
    assert (case.memory.transpose(1, 0, 2).reshape(BLOCKS, -1) == case.pages).all()


def test_pieces_that_no_single_call_can_copy() -> None:
    """Strided pieces, and blocks of several sizes, are copied piece by piece, in the same order."""
    case = Case()
    wide = np.zeros((LAYERS, PIECE, 2), np.uint8)
    case.blocks[1] = (case.pages[1], [wide[at, :, 0] for at in range(LAYERS)])
    short = np.zeros((2, PIECE), np.uint8)
    case.blocks.append((case.pages[0, : 2 * PIECE], [*short]))
    assert rows_out(case.blocks) is None
    _copy(case.blocks, None)
    assert (wide[:, :, 0].reshape(-1) == case.pages[1]).all() and not wide[:, :, 1].any()
    assert (short.reshape(-1) == case.pages[0, : 2 * PIECE]).all()
    assert (case.memory[:, 2].reshape(-1) == case.pages[2]).all()


def test_a_page_of_another_length_is_not_copied_by_rows() -> None:
    """Pieces that do not add up to their page never become rows."""
    case = Case()
    case.blocks[0] = (case.pages[0][:-1], case.blocks[0][1])
    assert rows_out(case.blocks) is None


def test_nothing_is_decoded_after_the_deadline() -> None:
    """Blocks that are not decoded in time are missing, and their memory is left alone."""
    never: Any = object()  # decoding would raise
    coded = [(never, Target(i, np.zeros(1, np.uint8), [], 16)) for i in range(3)]
    assert decoded(Filled([3], coded), 2, Codings(Options()), until=0.0) == [0, 1]
