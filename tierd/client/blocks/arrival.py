"""Pages of a lease that the daemon is still filling: how many of their layers are there.

The daemon writes the number of verified slices of a page into its catalogue, as
`tierd/loads_by_layer.py` loads it. A count is valid while the catalogue has the page's generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.client.session.pins import Hold
from tierd.client.session.segments import by_place
from tierd.client.transport.replies import LeasedGroup
from tierd.core.formats.block import slice_cut
from tierd.core.formats.layout import GENERATION
from tierd.core.formats.meta import META
from tierd.core.formats.model import BlockStatus, StructArray
from tierd.core.formats.words import barrier

PAUSES_S = (0.00005, 0.001)
"""The first and the longest pause between two looks."""
LOST = -1
"""Instead of a number of slices."""


class Arrival:
    """The pages of a lease that were PENDING when it was given."""

    def __init__(self, groups: Sequence[LeasedGroup], hold: Hold) -> None:
        self._hold = hold
        parts = [group.handles.reshape(-1) for group in groups]
        is_pending = [part["status"] == BlockStatus.PENDING for part in parts]
        self.handles: StructArray = np.concatenate([part[rows] for part, rows in zip(parts, is_pending, strict=True)])
        layers = np.concatenate([np.full(rows.sum(), g.layers) for g, rows in zip(groups, is_pending, strict=True)])
        shapes = zip(self.handles["length"].tolist(), layers.tolist(), strict=True)
        cuts = [slice_cut(length, of) for length, of in shapes]
        self._layers = np.array([cut.layers for cut in cuts], np.int64)
        self._pieces = np.array([cut.pieces for cut in cuts], np.int64)
        self._full = self._layers * self._pieces
        self._is_cut = self._layers == layers
        self._parts = by_place(self.handles)
        self._done = 0  # layers that all pages are known to have

    def __len__(self) -> int:
        return len(self.handles)

    def good(self) -> NDArray[np.bool_]:
        """Which pages have all layers: bool [n]."""
        return self._counts() >= self._full

    def wait(self, layer: int | None, *, timeout_s: float) -> bool:
        """As `Lease.await_layer`."""
        if layer is not None and layer < self._done:
            return True
        wanted, deadline, pause_s = self._wanted(layer), time.monotonic() + timeout_s, PAUSES_S[0]
        while not ((counts := self._counts()) >= wanted).all():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (counts == LOST).any() or not self._hold.link.is_usable:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, PAUSES_S[1])
        self._done = max(self._done, 0 if layer is None else layer + 1)
        return True

    def _wanted(self, layer: int | None) -> NDArray[np.int64]:
        """Slices of each page up to the end of this layer; all of a page whose slices are no layers."""
        layers = self._layers if layer is None else np.where(self._is_cut, layer + 1, self._layers)
        return np.minimum(layers, self._layers) * self._pieces

    def _counts(self) -> NDArray[np.int64]:
        """Verified slices of each page; LOST if the page was taken from the lease."""
        counts = np.full(len(self.handles), LOST, np.int64)
        for place, rows in self._parts:
            segment = self._hold.segment(place)
            if segment is None:
                continue
            metas, handles = np.frombuffer(segment.metas, META), self.handles[rows]
            slices = metas["slices"][handles["slot"]].astype(np.int64)
            barrier()
            is_its = metas["generation"][handles["slot"]] == handles["generation"]
            found = np.where(is_its, slices, 0)
            words = segment.words[handles["slot"]]
            has_left = (words != handles["generation"]) & (found < self._full[rows])
            counts[rows] = np.where(has_left | (words & GENERATION != handles["generation"]), LOST, found)
        return counts
