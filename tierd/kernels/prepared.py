"""Launches that are kept from one call to the next; only addresses change.

`Kept` holds a bounded number of `Prepared`, by the layout of their arguments. Checks happen when a
launch is prepared. Calls whose arrays and numbers have a known layout reuse it, since only the
arrays' addresses may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import Structure, c_uint64, sizeof
from dataclasses import dataclass

from tierd.kernels.library import Library
from tierd.kernels.params import word_of

KEPT = 256
"""Layouts: a decode has one per number of sequences and length of tables; the oldest is dropped."""


@dataclass(frozen=True, slots=True)
class Launch:
    """As `Library.launch` takes it. arrays: the fields of its parameters that hold a caller's
    address, and the array's name."""

    kernel: str
    grid: tuple[int, int, int]
    params: Structure
    arrays: Mapping[str, str]
    shared_bytes: int = 0


class Prepared:
    """Launches in sequence, for one caller at a time. names: arrays in order of addresses."""

    def __init__(self, launches: Sequence[Launch], names: Sequence[str]) -> None:
        self._launches = launches
        self._places = []
        for launch in launches:
            words = (c_uint64 * (sizeof(launch.params) // 8)).from_buffer(launch.params)
            for field, name in launch.arrays.items():
                self._places.append((words, word_of(type(launch.params), field), names.index(name)))

    def launch(self, library: Library, addresses: Sequence[int]) -> None:
        """Launches with these addresses; 0 for arrays not given. Raises the library's errors."""
        for words, at, which in self._places:
            words[at] = addresses[which]
        for one in self._launches:
            library.launch(one.kernel, one.grid, one.params, shared_bytes=one.shared_bytes)


class Kept:
    """Of `Prepared`, by layout."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Prepared] = {}

    def find_or_make(self, layout: Hashable, make: Callable[[], Prepared]) -> Prepared:
        """The one of this layout, made if there is none. An error of `make` is not kept."""
        found = self._known.get(layout)
        if found is None:
            found = make()
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]
            self._known[layout] = found
        return found
