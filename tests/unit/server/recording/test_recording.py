"""Recordings: numbers instead of hashes, one line per request, bounds, and failures."""

from __future__ import annotations

import gzip
import os
import resource
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import count
from tierd.cli.trace import read_trace
from tierd.core.formats.block import NamespaceSpec
from tierd.core.plan import GroupQuery
from tierd.server.recording import recording
from tierd.server.recording.numbering import Numbers
from tierd.server.recording.recording import Bounds, Recording
from tierd.simulator.sequences import Request
from tierd.testing import chain

TOKENS = 16
SOON_S = 20.0
WIDE = Bounds(max_bytes=1 << 20, seconds=3600)
SPEC = NamespaceSpec(model="m", tokens_per_block=TOKENS, block_bytes=8192, rank_count=2)


def namespace_of(number: int) -> Any:
    """Namespaces of two ranks: 10 and 11, 20 and 21, ..."""
    return SimpleNamespace(id=number // 10 * 10, spec=SPEC)


def query(hashes: np.ndarray, *namespaces: int, tokens: int = 0) -> GroupQuery:
    return GroupQuery(namespaces or (10,), hashes, TOKENS, tokens or TOKENS * len(hashes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made.jsonl.gz"


def begun(path: Path, bounds: Bounds = WIDE) -> Recording:
    return Recording(path, bounds, begun_s=100.0, namespace_of=namespace_of)


def read(recorded: Recording) -> list[Request]:
    """The requests in the file after its end."""
    recorded.stop()
    recorded.join(timeout_s=SOON_S)
    assert recorded.reason
    return list(read_trace(recorded.path)) if recorded.counts.requests else []


def test_a_line_says_when_how_long_and_which_blocks(path: Path) -> None:
    """Numbers follow the first appearance across namespaces; times count from the start; sizes are exact."""
    made = begun(path)
    made.note(100.0, query(chain(1, 3), tokens=40), is_lookup=False)
    made.note(101.25, query(chain(1, 2)), is_lookup=False)
    made.note(102.0, query(chain(1, 2), 20, tokens=17), is_lookup=False)
    assert read(made) == [
        Request(0, 40, array("q", [0, 1, 2]), TOKENS, 2 * 8192, 0),
        Request(1250, 32, array("q", [0, 1]), TOKENS, 2 * 8192, 0),
        Request(2000, 17, array("q", [3, 4]), TOKENS, 2 * 8192, 1),
    ]
    assert (made.counts.requests, made.counts.blocks, made.counts.distinct, made.counts.lost) == (3, 7, 5, 0)
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (made.counts.bytes, 0o600)


@settings(max_examples=count(test=40, nightly=2_000, weekly=10_000), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([10, 20]), st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=40))
def test_numbers_agree_exactly_where_the_hashes_do(calls: list[tuple[int, int, int]]) -> None:
    """Two numbers are equal exactly if hash and namespace are; numbers are dense and differ between files."""
    numbers, again, known = Numbers(limit=1000), Numbers(limit=1000), dict[tuple[int, bytes], int]()
    for namespace, seed, length in calls:
        hashes = chain(seed, length)
        ids = numbers.of(hashes, np.full(length, namespace, np.uint32))
        wanted = [known.setdefault((namespace, name.tobytes()), len(known)) for name in hashes]
        assert ids is not None
        assert ids.tolist() == wanted
    assert numbers.count == len(known)
    sample = chain(1, 4), np.full(4, 10, np.uint32)
    assert (numbers._keys(*sample) != again._keys(*sample)).all()


def test_a_lookup_and_what_it_led_to_are_one_request(path: Path) -> None:
    """An acquire within a minute of its lookup has no line, once per lookup; other ranks never have one."""
    made, whole = begun(path), chain(1, 6)
    made.note(100.0, query(whole, 10, 11), is_lookup=True)
    made.note(100.0, query(whole, 10, 11), is_lookup=True)
    for _ in range(3):
        made.note(100.5, query(whole[:4], 10), is_lookup=False)
        made.note(100.5, query(whole[:4], 11), is_lookup=False)
    made.note(101.0, query(whole[:2]), is_lookup=True)
    made.note(162.0, query(whole[:2]), is_lookup=False)
    assert [(r.time_ms, len(r.blocks)) for r in read(made)] == [(0, 6), (0, 6), (500, 4), (1000, 2), (62_000, 2)]


def test_what_the_queue_cannot_take_is_lost_and_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers never wait for the thread: requests beyond the queue's bound are dropped and counted."""
    monkeypatch.setattr(recording, "QUEUE_BLOCKS", 300)
    made = begun(path)
    for _ in range(10):
        made.note(100.0, query(chain(1, 100)), is_lookup=False)
    assert made.counts.lost == 8
    while made.counts.requests < 2:
        os.sched_yield()
    made.note(100.0, query(chain(1, 100)), is_lookup=False)
    assert (len(read(made)), made.counts.lost) == (3, 8)


def test_it_ends_before_its_file_is_too_large(path: Path) -> None:
    """The file stays below its bound and readable; the reason names the bound, and lost requests count."""
    made = begun(path, Bounds(max_bytes=60_000, seconds=3600))
    for seed in range(900):
        made.note(100.0, query(chain(seed, 50)), is_lookup=False)
    found = read(made)
    assert (0 < len(found) < 900, path.stat().st_size <= 60_000) == (True, True)
    assert "60000 bytes" in made.reason
    assert made.counts.lost == 900 - len(found)
    made.note(100.0, query(chain(1, 50)), is_lookup=False)
    assert made.counts.lost == 900 - len(found)


def test_it_ends_after_its_time(path: Path) -> None:
    """A recording whose time is over ends by itself, with all earlier requests in its file."""
    made = begun(path, Bounds(max_bytes=1 << 20, seconds=0.01))
    made.note(100.0, query(chain(1, 3)), is_lookup=False)
    made._thread.join(SOON_S)
    assert (made.reason, len(list(read_trace(path)))) == ("its 0.01 seconds are over", 1)


def test_it_ends_when_there_are_no_numbers_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that runs out of numbers ends, since a second number for a block would be wrong."""
    monkeypatch.setattr(recording, "NUMBER_LIMIT", 100)
    made = begun(path)
    made.note(100.0, query(chain(1, 100)), is_lookup=False)
    while not made.counts.requests:
        os.sched_yield()
    made.note(100.0, query(chain(2, 1)), is_lookup=False)
    assert (len(read(made)), made.counts.lost) == (1, 1)
    assert "100 different blocks" in made.reason


def test_a_full_disk_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too little disk space for the daemon's own state no byte is written."""
    monkeypatch.setattr(recording, "RESERVE_BYTES", 1 << 60)
    made = begun(path)
    made.note(100.0, query(chain(1, 3)), is_lookup=False)
    assert (read(made), path.stat().st_size) == ([], 0)
    assert "would be left" in made.reason


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows above the size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_half_way_leaves_a_whole_file(path: Path) -> None:
    """A gzip member that did not fit is cut off again: the file has whole members, with a reason."""
    made = begun(path)
    made.note(100.0, query(chain(1, 3)), is_lookup=False)
    while not made.counts.requests:
        os.sched_yield()
    with file_limit(made.counts.bytes + 50), structlog.testing.capture_logs():
        for seed in range(200):
            made.note(100.0, query(chain(seed, 3)), is_lookup=False)
        assert len(read(made)) == 1
    assert "File too large" in made.reason
    assert gzip.decompress(path.read_bytes()).count(b"\n") == 1
    assert made.counts.lost == 200


def test_a_fault_of_its_own_ends_it_with_a_reason(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An unforeseen exception in the thread ends the recording and nothing else."""
    made = begun(path)
    made.note(100.0, query(np.zeros((1, 7), np.uint8)), is_lookup=False)
    assert (read(made), "internal fault" in made.reason) == ([], True)
