"""Streams, events and copies on the fake driver: work runs only when waited for, as a test of waits."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.unit.kernels.fake_driver import counts, entered, ok, on_fake_driver, peek, refused

LENGTH = 64
NON_BLOCKING = 1


def filled(cuda: Any, value: int) -> Any:
    """Device memory that holds this byte."""
    place = ok(cuda.cuMemAlloc(LENGTH))
    ok(cuda.cuMemsetD8Async(place, value, LENGTH, 0))
    ok(cuda.cuCtxSynchronize())
    return place


def held(place: Any) -> int:
    """Its first byte, past all streams: the value that a reader without any wait sees."""
    return peek(int(place), 1)[0]


def pinned(cuda: Any, value: int) -> int:
    """Host memory that copies access directly."""
    place = int(ok(cuda.cuMemHostAlloc(LENGTH, 0)))
    ctypes.memset(place, value, LENGTH)
    return place


def stream_of(cuda: Any, *, is_blocking: bool = False) -> Any:
    return ok(cuda.cuStreamCreate(0 if is_blocking else NON_BLOCKING))


@on_fake_driver()
def test_work_runs_when_it_is_waited_for() -> None:
    """A copy runs only when its own stream is waited for, not another stream."""
    cuda = entered()
    place, stream, other = filled(cuda, 1), stream_of(cuda), stream_of(cuda)
    ok(cuda.cuMemcpyAsync(place, pinned(cuda, 5), LENGTH, stream))
    ok(cuda.cuStreamSynchronize(other))
    assert held(place) == 1
    assert counts()["pending"] == 1
    ok(cuda.cuStreamSynchronize(stream))
    assert held(place) == 5
    assert "pending" not in counts()


@on_fake_driver()
def test_a_missing_wait_between_streams_is_seen() -> None:
    """A consumer reads old bytes without a wait for the producer's event, and new bytes with it."""
    cuda = entered()
    for is_waiting, seen in ((False, 1), (True, 5)):
        place, copied, event = filled(cuda, 1), filled(cuda, 0), ok(cuda.cuEventCreate(2))
        producer, consumer = stream_of(cuda), stream_of(cuda)
        ok(cuda.cuMemcpyAsync(place, pinned(cuda, 5), LENGTH, producer))
        ok(cuda.cuEventRecord(event, producer))
        if is_waiting:
            ok(cuda.cuStreamWaitEvent(consumer, event, 0))
        ok(cuda.cuMemcpyAsync(copied, place, LENGTH, consumer))
        ok(cuda.cuStreamSynchronize(consumer))
        assert held(copied) == seen
        ok(cuda.cuCtxSynchronize())


@on_fake_driver()
def test_an_event_is_of_the_moment_of_its_record() -> None:
    """An event covers its stream's work before the record; later records change no earlier wait."""
    cuda = entered()
    stream, other, event = stream_of(cuda), stream_of(cuda), ok(cuda.cuEventCreate(0))
    before, after = filled(cuda, 0), filled(cuda, 0)
    assert not ok(cuda.cuEventQuery(event)), "an event that was never recorded is over"
    ok(cuda.cuMemsetD8Async(before, 1, LENGTH, stream))
    ok(cuda.cuEventRecord(event, stream))
    ok(cuda.cuStreamWaitEvent(other, event, 0))
    ok(cuda.cuMemsetD8Async(after, 1, LENGTH, stream))
    ok(cuda.cuEventRecord(event, stream))
    ok(cuda.cuStreamSynchronize(other))
    assert (held(before), held(after)) == (1, 0)
    ok(cuda.cuEventSynchronize(event))
    assert held(after) == 1


@on_fake_driver()
def test_who_asks_is_told_no_once() -> None:
    """A query of a stream or an event does not wait: it reports pending work first, and its end later."""
    cuda = entered()
    place, stream, event = filled(cuda, 0), stream_of(cuda), ok(cuda.cuEventCreate(0))
    start = ok(cuda.cuEventCreate(0))
    ok(cuda.cuEventRecord(start, stream))
    for ask in (lambda: cuda.cuStreamQuery(stream), lambda: cuda.cuEventQuery(event)):
        ok(cuda.cuMemsetD8Async(place, held(place) + 1, LENGTH, stream))
        ok(cuda.cuEventRecord(event, stream))
        before = held(place)
        assert (refused(ask()), held(place)) == ("NOT_READY", before)
        assert refused(cuda.cuEventElapsedTime(start, event)) == "NOT_READY"
        ok(ask())
        assert held(place) == before + 1
    assert ok(cuda.cuEventElapsedTime(start, event)) >= 0


@on_fake_driver()
def test_memory_that_is_not_pinned_is_staged() -> None:
    """Copies access pageable memory within the call, and pinned memory only when the work runs."""
    cuda = entered()
    place, stream = filled(cuda, 0), stream_of(cuda)
    pageable = ctypes.create_string_buffer(b"\x03" * LENGTH, LENGTH)
    ok(cuda.cuMemcpyHtoDAsync(place, ctypes.addressof(pageable), LENGTH, stream))
    ctypes.memset(pageable, 9, LENGTH)
    ok(cuda.cuStreamSynchronize(stream))
    assert held(place) == 3
    host = pinned(cuda, 4)
    ok(cuda.cuMemcpyHtoDAsync(place, host, LENGTH, stream))
    ctypes.memset(host, 6, LENGTH)
    ok(cuda.cuMemcpyDtoHAsync(ctypes.addressof(pageable), place, LENGTH, stream))
    assert pageable.raw[0] == 6, "the host changed what the copy had not read yet"
    ok(cuda.cuMemsetD8Async(place, 8, LENGTH, stream))
    ok(cuda.cuMemcpyDtoHAsync(host, place, LENGTH, stream))
    assert ctypes.string_at(host, 1)[0] == 6
    ok(cuda.cuStreamSynchronize(stream))
    assert ctypes.string_at(host, 1)[0] == 8


@on_fake_driver()
def test_the_default_stream_waits_for_blocking_streams_alone() -> None:
    """The default stream and blocking streams wait for each other's earlier work; others do not."""
    cuda = entered()
    for is_blocking, seen in ((True, 5), (False, 1)):
        place, stream = filled(cuda, 1), stream_of(cuda, is_blocking=is_blocking)
        ok(cuda.cuMemsetD8Async(place, 5, LENGTH, stream))
        got = ctypes.create_string_buffer(LENGTH)
        ok(cuda.cuMemcpyDtoH(ctypes.addressof(got), place, LENGTH))
        assert got.raw[0] == seen
        ok(cuda.cuCtxSynchronize())
    for is_blocking, seen in ((True, 7), (False, 1)):
        place, copied, stream = filled(cuda, 1), filled(cuda, 0), stream_of(cuda, is_blocking=is_blocking)
        ok(cuda.cuMemsetD8Async(place, 7, LENGTH, 0))
        ok(cuda.cuMemcpyAsync(copied, place, LENGTH, stream))
        ok(cuda.cuStreamSynchronize(stream))
        assert held(copied) == seen


def batched(cuda: Any, stream: Any, copies: list[tuple[Any, Any]], order: str = "STREAM") -> tuple[Any, ...]:
    """cuMemcpyBatchAsync of pairs (to, from) with one attribute for all."""
    attributes = cuda.CUmemcpyAttributes()
    attributes.srcAccessOrder = getattr(cuda.CUmemcpySrcAccessOrder, f"CU_MEMCPY_SRC_ACCESS_ORDER_{order}")
    to, source = [cuda.CUdeviceptr(int(c[0])) for c in copies], [cuda.CUdeviceptr(int(c[1])) for c in copies]
    answer: tuple[Any, ...] = cuda.cuMemcpyBatchAsync(
        to, source, [LENGTH] * len(copies), len(copies), [attributes], [0], 1, stream
    )
    return answer


@on_fake_driver()
def test_a_batch_has_no_order_of_its_own() -> None:
    """A batch's copies run after the stream's earlier work, and in no order among themselves."""
    cuda = entered()
    a, b, c, stream = filled(cuda, 1), filled(cuda, 2), filled(cuda, 3), stream_of(cuda)
    ok(cuda.cuMemsetD8Async(a, 9, LENGTH, stream))
    ok(batched(cuda, stream, [(b, a), (c, b)]))
    assert (held(b), held(c)) == (2, 3)
    ok(cuda.cuStreamSynchronize(stream))
    assert (held(b), held(c)) == (9, 2), "the second copy went first"
    assert refused(batched(cuda, 0, [(b, a)])) == "INVALID_VALUE", "the default stream takes no batches"
    assert refused(batched(cuda, stream, [(b, a)], "INVALID")) == "INVALID_VALUE"


@on_fake_driver()
def test_a_source_of_any_order_is_read_when_that_is_wrong() -> None:
    """With order ANY, device sources are read before earlier work, and host sources after the call."""
    cuda = entered()
    for order, seen in (("ANY", 1), ("STREAM", 9)):
        made, host, stream = filled(cuda, 1), pinned(cuda, 0), stream_of(cuda)
        ok(cuda.cuMemsetD8Async(made, 9, LENGTH, stream))
        ok(batched(cuda, stream, [(host, made)], order))
        ok(cuda.cuStreamSynchronize(stream))
        assert ctypes.string_at(host, 1)[0] == seen
    for order, seen in (("ANY", 6), ("DURING_API_CALL", 4)):
        to, host, stream = filled(cuda, 1), pinned(cuda, 4), stream_of(cuda)
        ok(batched(cuda, stream, [(to, host)], order))
        ctypes.memset(host, 6, LENGTH)
        ok(cuda.cuStreamSynchronize(stream))
        assert held(to) == seen


@on_fake_driver()
def test_streams_are_long_and_outlive_their_handles() -> None:
    """A stream takes tens of thousands of tasks, and pending work survives the stream's end."""
    cuda = entered()
    place, stream = filled(cuda, 0), stream_of(cuda)
    for i in range(20_000):
        ok(cuda.cuMemsetD8Async(place, i % 251, LENGTH, stream))
    ok(cuda.cuStreamSynchronize(stream))
    assert held(place) == 19_999 % 251
    ok(cuda.cuMemsetD8Async(place, 255, LENGTH, stream))
    ok(cuda.cuStreamDestroy(stream))
    assert refused(cuda.cuStreamSynchronize(stream)) == "INVALID_HANDLE"
    assert held(place) == 19_999 % 251
    ok(cuda.cuCtxSynchronize())
    assert held(place) == 255


@on_fake_driver()
def test_captured_work_runs_at_each_launch() -> None:
    """Captured work does not run at capture; each launch of the graph runs it in the stream's order."""
    cuda = entered()
    a, b, stream = filled(cuda, 1), filled(cuda, 2), stream_of(cuda)
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    ok(cuda.cuStreamBeginCapture(stream, mode))
    ok(cuda.cuMemcpyDtoDAsync(b, a, LENGTH, stream))
    ok(cuda.cuMemsetD8Async(a, 7, LENGTH, stream))
    assert refused(cuda.cuStreamSynchronize(stream)) == refused(cuda.cuCtxSynchronize()) == "STREAM_CAPTURE_UNSUPPORTED"
    assert refused(batched(cuda, stream, [(b, a)])) == "STREAM_CAPTURE_UNSUPPORTED"
    assert refused(cuda.cuStreamBeginCapture(stream, mode)) == "ILLEGAL_STATE"
    graph = ok(cuda.cuStreamEndCapture(stream))
    assert refused(cuda.cuStreamEndCapture(stream)) == "ILLEGAL_STATE"
    made = ok(cuda.cuGraphInstantiate(graph, 0))
    ok(cuda.cuGraphDestroy(graph))
    ok(cuda.cuCtxSynchronize())
    assert (held(a), held(b)) == (1, 2)
    for seen in (1, 7):
        ok(cuda.cuGraphLaunch(made, stream))
        ok(cuda.cuStreamSynchronize(stream))
        assert (held(a), held(b)) == (7, seen)
    ok(cuda.cuGraphExecDestroy(made))
    assert refused(cuda.cuGraphLaunch(made, stream)) == "INVALID_HANDLE"
    assert refused(cuda.cuStreamBeginCapture(0, mode)) == "STREAM_CAPTURE_UNSUPPORTED"
