"""Copies between pages and arrays on a GPU, in the caller's stream.

    mapped pages, registered once for each segment ◀── copies in the stream, one event ──▶ arrays
                                                                    │
    pins, mappings and arrays are kept ◀── a Flight ◀───────────────┘ until the event has passed

A flight keeps all that its copies touch. Neither a deadline nor the end of a lease ends it, so a
hanging GPU never writes to a page that another block has. A thread watches flights while there are
any. If the GPU fails, its flights are kept until this process ends. If the driver refuses to
register a segment, copies go through pinned memory, a part at a time, and wait for each part.

Do not call it while the stream is captured into a graph.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.client.blocks.gpu_work import pauses
from tierd.client.connect import cancellation
from tierd.client.session.device import DeviceSegment, Gpu, GpuPlace, driver, gpu_at
from tierd.client.session.gpu_arrays import DEFAULT_STREAM, GpuBytes
from tierd.client.session.mapping import MappedSegment
from tierd.errors import DeadlineExceeded, InvalidArgument, TierdError

REGISTERED_BYTES = 64 << 30
"""Of one segment. Drivers refuse half a tebibyte, and repeat the refusal to the next caller."""
PART_BYTES = 64 << 20
"""Pinned memory of a call whose pages are not registered, or one block if that is longer."""
PER_THREAD_STREAM = 2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.02
"""Between two looks at flights."""

Numbers = NDArray[np.uint64]
_log = logging.getLogger("tierd.client")


class Side(NamedTuple):
    """The arrays' side of copies. stream: None: the arrays name none."""

    gpu: Gpu
    stream: int | None


class Pages(NamedTuple):
    """The pages' side: addresses in this process, u64 [n], and what keeps them: a pin and segments."""

    addresses: Numbers
    kept: Sequence[object]


def side_of(arrays: Sequence[GpuBytes]) -> Side:
    """The GPU and the stream of arrays. Raises InvalidArgument, Unsupported."""
    driver("arrays on a GPU", "pass copies in host memory")
    streams, devices = {array.stream for array in arrays}, {_device_of(array) for array in arrays}
    if len(streams) > 1 or len(devices) > 1:
        raise InvalidArgument(
            f"arrays on a GPU: on GPUs {sorted(devices)}, in streams {sorted(map(str, streams))}; pass arrays of one GPU and one stream"
        )
    side = Side(_gpu(devices.pop()), streams.pop())
    if side.stream == PER_THREAD_STREAM:
        raise InvalidArgument("arrays on a GPU: stream 2 is another one in each thread; make a stream and use that")
    with side.gpu.entered():
        if side.gpu.ask("cuStreamIsCapturing", side.stream or DEFAULT_STREAM):
            raise InvalidArgument(f"stream {side.stream}: a graph is being captured; end the capture first")
    return side


def load(side: Side, arrays: Sequence[GpuBytes], pages: Pages, deadline: float) -> Flight:
    """Copies pages to arrays of the same lengths. Returns before the copies are done, unless the
    arrays name no stream. Raises DeadlineExceeded, TierFailed, InvalidArgument for another GPU's."""
    for each in pages.kept:
        if isinstance(each, DeviceSegment) and each.memory.gpu.id != side.gpu.id:
            raise InvalidArgument(
                f"arrays on a GPU: on GPU {side.gpu.id}, their pages on {each.memory.gpu.id}; pass arrays of that GPU"
            )
    if not _are_registered(side.gpu, pages):
        return _in_parts(side, arrays, pages, deadline, is_load=True)
    targets, lengths = _addresses(arrays), _lengths(arrays)
    flight = _launched(side, (targets, pages.addresses, lengths), (pages.kept, arrays))
    if side.stream is None:
        flight.wait(deadline)
    return flight


def store(side: Side, arrays: Sequence[GpuBytes], pages: Pages, deadline: float) -> None:
    """Copies arrays to pages, and waits. Raises DeadlineExceeded, TierFailed."""
    if not _are_registered(side.gpu, pages):
        _in_parts(side, arrays, pages, deadline, is_load=False)
        return
    runs = pages.addresses, _addresses(arrays), _lengths(arrays)
    _launched(side, runs, (pages.kept, arrays)).wait(deadline)


class Flight:
    """Copies in a stream, and all that they touch until they are done."""

    def __init__(self, gpu: Gpu, nbytes: int, kept: object) -> None:
        self.nbytes = nbytes
        self._gpu, self._kept = gpu, kept
        self._event: Any = None
        self._turn = threading.Lock()
        self._is_done = False

    def begin(self, event: Any) -> None:
        """Notes the event behind its copies. A flight without one is never done."""
        self._event = event

    def query(self) -> bool:
        """Whether it is done; then it keeps nothing any more. Raises TierFailed if it never will be."""
        with self._turn:
            if self._is_done:
                return True
            if self._event is None or not self._gpu.is_past(self._event):
                return False
            self._is_done = True
            with self._gpu.entered():
                self._gpu.ask("cuEventDestroy", self._event)
        self._kept = None
        return True

    def wait(self, deadline: float) -> None:
        """Waits until it is done. Raises DeadlineExceeded, Cancelled, and as `query`."""
        try:
            for pause_s in pauses([self], deadline):
                cancellation.pause(pause_s)
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"cuda:{self._gpu.id}: copies of {self.nbytes} bytes are not done in time, and their pages stay held until they are;"
                " end the work that hangs in their stream, or allow more with timeout_s"
            ) from None


class Flights:
    """The flights of this process. Threads may share it."""

    def __init__(self) -> None:
        self._flying: list[Flight] = []
        self._turn = threading.Lock()
        self._is_watched = False

    def add(self, flight: Flight) -> None:
        """Keeps a flight until it is done."""
        with self._turn:
            self._flying.append(flight)
            if not self._is_watched:
                threading.Thread(target=self._watch, name="tierd-gpu-flights", daemon=True).start()
                self._is_watched = True

    def settle(self, most_bytes: int, deadline: float) -> None:
        """Waits until at most this many bytes are in flight. Raises as `Flight.wait`."""
        flying = [flight for flight in list(self._flying) if not flight.query()]
        left = sum(flight.nbytes for flight in flying)
        for flight in flying:
            if left <= most_bytes:
                break
            flight.wait(deadline)
            left -= flight.nbytes

    def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            done = [flight for flight in list(self._flying) if _is_over(flight)]
            with self._turn:
                self._flying = [flight for flight in self._flying if flight not in done]
                if not self._flying:
                    self._is_watched = False
                    return


def _is_over(flight: Flight) -> bool:
    """Whether to watch a flight no more. One that the GPU lost is kept for ever."""
    try:
        return flight.query()
    except TierdError:
        _lost.append(flight)
        return True


flights = Flights()
_lost: list[Flight] = []
_registered: weakref.WeakKeyDictionary[MappedSegment, bool] = weakref.WeakKeyDictionary()
_registering = threading.Lock()


def _device_of(array: GpuBytes) -> int:
    """The number of an array's GPU. Raises InvalidArgument if its memory is not on one."""
    if array.device is not None:
        return array.device
    gpu = _gpu(0)
    attribute = gpu.cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    try:
        with gpu.entered():
            return int(gpu.ask("cuPointerGetAttribute", attribute, array.address))
    except InvalidArgument as error:
        raise InvalidArgument(
            f"buffer: {array.address:#x} is no GPU memory of this process; pass an array on a GPU that still lives"
        ) from error


def _gpu(number: int) -> Gpu:
    return gpu_at(GpuPlace("", number))


def _launched(side: Side, runs: tuple[Numbers, Numbers, Numbers], kept: object) -> Flight:
    """Launches copies: targets, sources, lengths. Raises what the driver refuses; copies before that
    are in flight."""
    gpu, stream = side.gpu, side.stream or DEFAULT_STREAM
    flight = Flight(gpu, int(runs[2].sum()), kept)
    with gpu.entered():
        event = gpu.ask("cuEventCreate", 2)  # without timing
        flights.add(flight)
        try:
            for target, source, length in zip(*(column.tolist() for column in _joined(*runs)), strict=True):
                gpu.ask("cuMemcpyAsync", target, source, length, stream)
        finally:
            gpu.ask("cuEventRecord", event, stream)
            flight.begin(event)
    return flight


def _joined(targets: Numbers, sources: Numbers, lengths: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The same copies, with those joined that are adjacent on both sides."""
    follows = (targets[1:] == targets[:-1] + lengths[:-1]) & (sources[1:] == sources[:-1] + lengths[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return targets[starts], sources[starts], np.add.reduceat(lengths, starts)


def _in_parts(side: Side, arrays: Sequence[GpuBytes], pages: Pages, deadline: float, *, is_load: bool) -> Flight:
    """Copies through pinned memory, and waits. Returns the last flight."""
    lengths = [len(array) for array in arrays]
    pinned = Pinned(side.gpu, min(sum(lengths), max(PART_BYTES, *lengths)))
    for part in _parts(lengths, pinned.nbytes):
        places = np.array([0, *accumulate(lengths[part])][:-1], np.uint64) + np.uint64(pinned.address)
        moves = list(zip(places.tolist(), pages.addresses[part].tolist(), lengths[part], strict=True))
        ends = (_addresses(arrays[part]), places) if is_load else (places, _addresses(arrays[part]))
        for place, page, length in moves if is_load else ():
            ctypes.memmove(place, page, length)
        flight = _launched(side, (*ends, _lengths(arrays[part])), (pinned, pages.kept, arrays))
        flight.wait(deadline)
        for place, page, length in () if is_load else moves:
            ctypes.memmove(page, place, length)
    return flight


def _parts(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Slices whose lengths sum to at most `most`."""
    first = total = 0
    for i, length in enumerate(lengths):
        if total + length > most:
            yield slice(first, i)
            first, total = i, 0
        total += length
    yield slice(first, len(lengths))


class Pinned:
    """Pinned host memory, freed after this object and the GPU's work have ended."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        """Raises Overloaded."""
        gpu.unmap_ended()
        with gpu.entered():
            self.address, self.nbytes = int(gpu.ask("cuMemHostAlloc", nbytes, 0)), nbytes
        weakref.finalize(self, gpu.note_ended, partial(gpu.ask, "cuMemFreeHost", self.address)).atexit = False


def _are_registered(gpu: Gpu, pages: Pages) -> bool:
    """Whether copies reach the pages directly, after registering segments that are new."""
    gpu.unmap_ended()
    segments = [each for each in pages.kept if isinstance(each, MappedSegment)]
    return all(_is_registered(gpu, segment) for segment in segments)


def _is_registered(gpu: Gpu, segment: MappedSegment) -> bool:
    with _registering:
        if segment not in _registered:
            _registered[segment] = _register(gpu, segment)
        return _registered[segment]


def _register(gpu: Gpu, segment: MappedSegment) -> bool:
    """Registers a segment, until it and the GPU's work have ended; whether the driver did."""
    flags = gpu.cuda.CU_MEMHOSTREGISTER_PORTABLE | (0 if segment.is_writable else gpu.cuda.CU_MEMHOSTREGISTER_READ_ONLY)
    try:
        if segment.data.nbytes > REGISTERED_BYTES:
            raise InvalidArgument(f"more than {REGISTERED_BYTES} bytes in one piece; make segments smaller")
        with gpu.entered():
            gpu.ask("cuMemHostRegister", segment.address, segment.data.nbytes, flags)
    except TierdError as error:
        _log.warning("cuda:%d: segment %d is not registered, copies of it are slow (%s)", gpu.id, segment.id, error)
        return False
    weakref.finalize(segment, gpu.note_ended, partial(_unregister, gpu, segment.data)).atexit = False
    return True


def _unregister(gpu: Gpu, data: NDArray[np.uint8]) -> None:
    """Its caller keeps the mapping until now: the driver must forget it before the address is reused."""
    gpu.ask("cuMemHostUnregister", data.ctypes.data)


def _addresses(arrays: Sequence[GpuBytes]) -> Numbers:
    return np.array([array.address for array in arrays], np.uint64)


def _lengths(arrays: Sequence[GpuBytes]) -> Numbers:
    return np.array([array.nbytes for array in arrays], np.uint64)


def _forget() -> None:
    """In a forked child: the parent's copies and registrations are not the child's."""
    global flights, _registered, _registering  # another thread of the parent may have held the locks
    _lost.extend(flights._flying)  # their ends belong to the parent
    flights, _registered, _registering = Flights(), weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget)
