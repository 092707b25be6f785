"""Counts of pages that the daemon fills, as a client sees them in the catalogue."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from tierd.checksum import slice_sums
from tierd.client.blocks.arrival import Arrival
from tierd.client.session import mapping
from tierd.client.session.pins import Hold
from tierd.client.transport.replies import LeasedGroup
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import HANDLE, BlockStatus, SegmentAssignment
from tierd.tiers.arena.catalogue import Catalogue, CatalogueHead

LAYERS, LENGTH, CLASS_BYTES = 4, 4 * 8192, 32 << 10
SLOTS, GENERATIONS = np.array([0, 2], np.uint32), np.array([8, 9], np.uint64)


class Page:
    """Two pages of a catalogue that a client maps, and a lease on them while they are filled."""

    def __init__(self, path: Path, *, layers: int = LAYERS) -> None:
        given = SegmentAssignment(0, 0, 1, 1, CLASS_BYTES, 4, 0, None, False)
        self.catalogue = Catalogue.create(path, head=CatalogueHead(b"0" * 16, 4 * CLASS_BYTES, given))
        self.catalogue.allocate(path)
        self.layers = layers
        self.publish(GENERATIONS - 5)  # former blocks, whose entries are complete
        self.catalogue.stamp(SLOTS, GENERATIONS)
        found = mapping.catalogue_of(1, np.memmap(path, np.uint8, "r"))
        segment = mapping.MappedSegment(1, 0, np.zeros(0, np.uint8), *found, is_writable=False)
        self.link = SimpleNamespace(is_usable=True)
        handles = np.zeros((1, 2), HANDLE)
        handles["segment"], handles["slot"], handles["generation"] = 1, SLOTS, GENERATIONS
        handles["length"], handles["status"] = LENGTH, BlockStatus.PENDING
        hold = SimpleNamespace(segment=lambda place: segment if place == (0, 1) else None, link=self.link)
        self.arrival = Arrival([LeasedGroup(0, handles, layers)], cast("Hold", hold))

    def publish(self, generations: np.ndarray) -> None:
        """Enters whole blocks."""
        self.catalogue.stamp(SLOTS, generations)
        metas = new_meta(2)
        metas["generation"], metas["stored_length"], metas["layers"] = generations, LENGTH, self.layers
        table = slice_sums(bytes(LENGTH), slice_lengths(LENGTH, self.layers))
        self.catalogue.publish(SLOTS, metas=metas, slices=[table, table])

    def note(self, *counts: int) -> None:
        """The daemon tells of slices."""
        self.catalogue.note_arrived(SLOTS, GENERATIONS, np.array(counts))

    def looks(self) -> list[bool | None]:
        """Whether each layer is there, and then all."""
        return [self.arrival.look(layer) for layer in (*range(self.layers), None)]


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path / "1.cat")


def test_a_layer_is_there_when_every_page_has_it(page: Page) -> None:
    """The page with the fewest slices counts; a complete entry has all layers."""
    assert page.looks() == [False] * 5
    page.note(3, 1)
    assert page.looks() == [True, False, False, False, False]
    assert page.arrival.good().tolist() == [False, False]
    page.note(4, 3)
    assert page.looks() == [True, True, True, False, False]
    assert page.arrival.good().tolist() == [True, False]
    page.publish(GENERATIONS)
    assert page.looks() == [True] * 5
    assert page.arrival.good().all()


def test_a_layer_beyond_the_last_is_the_last(page: Page) -> None:
    """Layer 99 of 4 is there with all slices."""
    page.note(3, 4)
    assert page.arrival.look(99) is False
    page.note(4, 4)
    assert page.arrival.look(99) is True


def test_blocks_without_layers_come_whole(tmp_path: Path) -> None:
    """The first layer of a block that is one slice needs the whole block, and so does any other."""
    page = Page(tmp_path / "1.cat", layers=3)  # 3 does not divide the length
    page.note(0, 0)
    assert page.looks() == [False] * 4
    page.note(1, 1)
    assert page.looks() == [True] * 4


def test_a_page_that_is_taken_away_is_lost(page: Page) -> None:
    """A freed page, or one with a later use, is lost, also if all of it had come."""
    page.note(4, 4)
    page.catalogue.retract(SLOTS[1:])
    assert page.looks() == [None] * 5
    page.catalogue.stamp(SLOTS[1:], GENERATIONS[1:] + 3)
    page.catalogue.note_arrived(SLOTS[1:], GENERATIONS[1:] + 3, np.array([4]))
    assert page.looks() == [None] * 5
    assert page.arrival.good().tolist() == [True, False]


def test_a_retired_page_is_lost_unless_it_is_whole(page: Page) -> None:
    """After the end of its epoch a page gets no more layers; a whole one is still the lease's."""
    page.note(4, 2)
    page.catalogue.retire(SLOTS, GENERATIONS)
    assert page.looks() == [None] * 5
    assert page.arrival.good().tolist() == [True, False]


def test_the_count_of_another_use_does_not_count(page: Page) -> None:
    """A count beside another generation's entry is none of this lease's, whatever it is."""
    page.catalogue._metas["slices"][SLOTS] = LAYERS
    assert page.looks() == [False] * 5


def test_nobody_is_told_of_a_page_in_another_use(page: Page) -> None:
    """A late note for a former use of a page changes nothing of its entry."""
    page.publish(GENERATIONS + 3)
    before = page.catalogue._metas[SLOTS].tobytes()
    page.note(1, 1)
    assert page.catalogue._metas[SLOTS].tobytes() == before


def test_an_entry_is_no_block_while_its_page_is_filled(page: Page) -> None:
    """A note breaks the entry's checksum first: a start and one-sided gets pass over the page."""
    page.publish(GENERATIONS)
    page.note(4, 4)
    assert not page.catalogue._metas["checksum"][SLOTS].any()
    assert not len(page.catalogue.survivors().slots)


def test_waiting_ends_when_the_daemon_has_gone(page: Page) -> None:
    """Without a daemon, a layer that is there is told, and one that is not ends the wait at once."""
    page.note(2, 2)
    page.link.is_usable = False
    assert page.arrival.wait(1, timeout_s=0.0)
    assert not page.arrival.wait(2, timeout_s=60.0)


def test_waiting_ends_with_its_time_or_a_lost_page(page: Page) -> None:
    """A wait ends at its deadline, and at once when a page is lost."""
    assert not page.arrival.wait(0, timeout_s=0.01)
    page.catalogue.retract(SLOTS)
    assert not page.arrival.wait(0, timeout_s=60.0)
