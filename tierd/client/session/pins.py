"""Holds on the daemon's memory that last as long as this process may touch it.

    handle (Lease, Reservation) ──┐
                                  ├─▶ Hold: a lease or reservation; released when both are gone
    arrays ─▶ Exposed ─▶ Pin ─────┘

A hold ties the life of a lease to the life of arrays. It is released once, by the end that comes
last. Finalisers may release it from any thread, so this takes no lock and never waits. A forked
child sends nothing.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tierd.client.connect.forks import Bound
from tierd.client.connect.link import Link
from tierd.client.session.mapping import MappedSegment
from tierd.client.session.segments import Place
from tierd.errors import ForkedClient, StaleHandle

if TYPE_CHECKING:
    from tierd.client.session.device import DeviceSegment

Bytes = NDArray[np.uint8]


class Pin:
    """Lives as long as any array of one call; numpy keeps it through the exposed object."""

    __slots__ = ("__weakref__",)


class Exposed:
    """A mapped segment as numpy takes memory: by interface, from an object that it keeps alive."""

    __slots__ = ("__array_interface__", "_owners")

    def __init__(self, segment: MappedSegment, pin: Pin, *, writable: bool) -> None:
        self._owners = (segment.data, pin)
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": segment.data.shape,
            "data": (segment.address, not writable),
        }


class Hold(Bound):
    """One lease or one reservation of the daemon; the other number is 0."""

    def __init__(self, link: Link, *, lease: int = 0, reservation: int = 0) -> None:
        self.link = link
        self.lease = lease
        self.reservation = reservation
        self.is_done = not (lease or reservation)
        self._has_handle = True
        self._pins: set[object] = set()

    @property
    def has_views(self) -> bool:
        """Whether arrays made from it are alive."""
        return bool(self._pins)

    def check(self) -> None:
        """Raises ForkedClient or StaleHandle if its pages must not be touched."""
        self.check_process()
        if self.is_done or not self._has_handle:
            raise StaleHandle(f"{self}: it has ended; acquire or reserve again")
        if not self.link.is_usable:
            raise StaleHandle(f"{self}: its daemon has gone; acquire or reserve again")

    def check_process(self) -> None:
        """Raises ForkedClient."""
        if self.link.pid != os.getpid():
            raise ForkedClient(
                f"{self}: belongs to process {self.link.pid}, this is its child; acquire again in the child"
            )

    def __str__(self) -> str:
        return f"lease {self.lease}" if self.lease else f"reservation {self.reservation}"

    def pin(self) -> Pin:
        """Makes a pin; the hold lasts while the pin lives. Raises StaleHandle."""
        pin, key = Pin(), object()
        self._pins.add(key)
        self.link.pins.add(key)
        weakref.finalize(pin, self._unpin, key).atexit = False
        # Checked after the pin exists. If another thread closes the link or drops the handle now,
        # either it sees the pin, or this code sees its change.
        if self.link.is_lost:
            raise StaleHandle(f"{self}: its client was closed; acquire or reserve again")
        if not self._has_handle:
            raise StaleHandle(f"{self}: it was released during the call; acquire or reserve again")
        return pin

    def expose(self, place: Place, pin: Pin, *, writable: bool = False) -> Any:
        """A segment's bytes, which keep the pin: uint8 [n], or a DevicePage on a GPU. Raises StaleHandle."""
        segment = self.segment(place)
        if segment is None:
            raise StaleHandle(f"segment {place[1]} of tier {place[0]}: not mapped any more; acquire again")
        if isinstance(segment, MappedSegment):
            return np.asarray(Exposed(segment, pin, writable=writable and segment.is_writable))
        return segment.exposed(pin, writable=writable)

    def segment(self, place: Place) -> MappedSegment | DeviceSegment | None:
        """A segment of its link, if it is mapped."""
        return self.link.session.segments.at(place) if self.link.session else None

    def watch(self, handle: object) -> None:
        """Drops the hold if the handle is collected without being closed."""
        weakref.finalize(handle, self.drop).atexit = False

    def drop(self) -> None:
        """The handle is gone. Views keep the hold until the last one is collected."""
        self._has_handle = False
        if not self._pins:
            self._let_go()

    def settle(self) -> None:
        """Notes that the daemon has ended the hold already."""
        self.is_done = True

    def _unpin(self, key: object) -> None:
        self._pins.discard(key)
        self.link.unpin(key)
        if not self._has_handle and not self._pins:
            self._let_go()

    def _let_go(self) -> None:
        if self.is_done:
            return
        self.is_done = True
        link = self.link
        if link.session and link.pid == os.getpid():
            link.session.let_go(
                leases=[self.lease] if self.lease else (), reservations=[self.reservation] if self.reservation else ()
            )
