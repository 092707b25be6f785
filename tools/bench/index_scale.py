"""Cost of ten million blocks in one core: memory of each, time of each operation, the longest call.

    python -m tools.bench.index_scale [--blocks 10000000] [--policy NAME] [--json]

One batch in eight comes as requests do (acquire, reserve, commit, release), the others as a restart
adopts them, both 256 blocks at a time. Every policy fills a separate process, whose growth is its
memory. Times are the processor's, so other load lengthens no call. A time's `limit` is a plain
lookup in the same table and run, per block. A row's meaning states its promise. Policies get chains
of one request, 256 blocks from anywhere, and one at a time. A figure of 1 is the mean of 256 calls.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tierd.core.core import Core
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import EXTENT, PAGE_ALIGN_BYTES, SegmentAssignment, TierKind, TierSpec
from tierd.core.instant_driver import InstantDriver
from tierd.core.instant_driver import Sequence as Asked
from tierd.core.plan import GroupQuery
from tierd.policies.named import NamedPolicies
from tools.bench.rows import Row, row_of

BLOCKS, BATCH, ASKED, TOKENS = 10_000_000, 256, 1000, 16
PUT_EVERY, SEGMENT_PAGES, REPEATS = 8, 1 << 14, 100
POLICIES = {"lru": 0.5, "reuse-index": 2.0}
"""Limits of a use, a choice and an arrival together: microseconds per block, in batches of 256."""
ONE_US = 10.0
"""The same, one block at a time."""
MEANINGS = {"lookup": "a question to the core", "use": "touch", "leave": "victims, forget, track", "turn": "all four"}
Ids = NDArray[np.int64]
_HIGH = 1 << 40


def hashes(first: int, count: int) -> NDArray[np.uint8]:
    """Names first, first + 1, ...: uint8 [count, 32], as even as a digest's (splitmix64, Steele,
    Lea and Flood, 2014)."""
    x = np.arange(4 * first + 1, 4 * (first + count) + 1, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))).view(np.uint8).reshape(count, 32)


def memory_bytes() -> int:
    """Resident memory of this process, after malloc has returned its free pages."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Watched:
    """The core as the filling calls it: notes the time of the longest call."""

    def __init__(self, core: Core, filled: Filled) -> None:
        self._core, self._filled = core, filled

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begun = time.thread_time()
            answer = getattr(self._core, name)(*args, **named)
            self._filled.longest_s = max(self._filled.longest_s, time.thread_time() - begun)
            return answer

        return timed


class Filled:
    """A core with one host tier of small pages. longest_s: processor time of the longest call."""

    def __init__(self, blocks: int, policy: str) -> None:
        places = int(blocks / 0.9 / SEGMENT_PAGES) + 2
        size = SEGMENT_PAGES * PAGE_ALIGN_BYTES
        spec = TierSpec(TierKind.HOST, 0, places * size, size, writer_owned=True, eviction=policy)
        self.core = Core([spec], policies=NamedPolicies())
        self.longest_s, self.now, self.count = 0.0, 0.0, 0
        self._watched = cast("Core", Watched(self.core, self))
        self.driver = InstantDriver(self._watched, tier_count=1)
        self._place, self._slot = places, SEGMENT_PAGES

    def fill(self, blocks: int) -> None:
        """Adds batches up to this many blocks."""
        while self.count < blocks:
            self.now += 0.05
            self._put() if self.count // BATCH % PUT_EVERY == 0 else self._adopt()
            self.count += BATCH

    def _put(self) -> None:
        names = hashes(self.count, BATCH)
        asked = Asked(1, names, BATCH * TOKENS, TOKENS, PAGE_ALIGN_BYTES)
        self.driver.request(asked, now=self.now)

    def _adopt(self) -> None:
        segments = []
        if self._slot == SEGMENT_PAGES:
            self._place, self._slot = self._place - 1, 0
            given = SegmentAssignment(
                0, self._place, self._segment, 1, PAGE_ALIGN_BYTES, SEGMENT_PAGES, 0, replaces=None, fresh=False
            )
            segments.append(given)
        extents, metas = np.zeros(BATCH, EXTENT), new_meta(BATCH)
        extents["segment"], extents["length"] = self._segment, PAGE_ALIGN_BYTES
        extents["slot"] = np.arange(self._slot, self._slot + BATCH)
        extents["generation"] = _HIGH - self.count - np.arange(BATCH)
        metas["namespace"] = metas["domain"] = 1
        metas["hash"] = hashes(self.count, BATCH)
        metas["parent"][1:], metas["digest"] = metas["hash"][:-1], metas["hash"][:, :16]
        metas["tokens"], metas["position"] = TOKENS, np.arange(BATCH)
        metas["stored_length"] = metas["logical_length"] = PAGE_ALIGN_BYTES
        self._slot += BATCH
        self._watched.adopt(0, segments=segments, extents=extents, metas=metas, now=self.now)

    @property
    def _segment(self) -> int:
        return (1 << 30) + self._place


def times_us(
    count: int, given: Sequence[Any], work: Callable[[Any], object], *, before: Callable[[Any], object] = id
) -> list[float]:
    """Processor time of work per block of `count`, in microseconds. `before` runs untimed."""
    out = []
    for one in given:
        before(one)
        begun = time.thread_time()
        work(one)
        out.append((time.thread_time() - begun) / count * 1e6)
    return out


class Full:
    """Operations on a full core, each on other blocks, at random."""

    def __init__(self, filled: Filled) -> None:
        self._noise, self._filled, self._index = np.random.default_rng(1), filled, filled.core._index
        self._policy, self._held = self._index.policies[0], self._index.held[0]

    def figures(self) -> dict[str, list[float]]:
        """Times per block, by the operation and the number of blocks at a time."""
        core, table = self._filled.core, self._index.blocks.table
        keys = [self._index.blocks.keys(ids) for ids in self._ids(ASKED)]
        out = {"plain": times_us(ASKED, keys, lambda k: table.find(k, lambda _, ids: ids >= 0))}
        for name, beyond in (("hit", 0), ("miss", _HIGH)):
            asked = [question(ids + beyond) for ids in self._ids(ASKED)]
            out[f"lookup_{name}_{ASKED}"] = times_us(ASKED, asked, lambda group: core.lookup([group], now=0.0))
        for name, count in (("chain", BATCH), (str(BATCH), BATCH), ("1", 1)):
            for what, work in (("use", self._use), ("leave", self._leave), ("turn", self._turn)):
                given = [self._parts(name, count) for _ in range(REPEATS)]
                out[f"{what}_{name}"] = times_us(BATCH, given, work, before=self._tell)
        return out

    def _ids(self, count: int) -> Iterator[Ids]:
        for _ in range(REPEATS):
            yield self._noise.choice(self._filled.count, count, replace=False)

    def _parts(self, name: str, count: int) -> list[Ids]:
        """BATCH blocks, `count` to each call: of one request, or from anywhere."""
        ids = self._noise.choice(self._filled.count, BATCH, replace=False)
        ids = ids[0] // BATCH * BATCH + np.arange(BATCH)[::-1] if name == "chain" else ids
        return [ids[start : start + count] for start in range(0, BATCH, count)]

    def _tell(self, parts: Sequence[Ids]) -> None:
        """The core notes a use before the policy does."""
        self._filled.now += 0.05
        for ids in parts:
            self._index.blocks.touch(ids, self._filled.now)

    def _use(self, parts: Sequence[Ids]) -> None:
        for ids in parts:
            self._policy.touch(ids, self._filled.now)

    def _leave(self, parts: Sequence[Ids]) -> None:
        """The policy names the coldest and forgets them; then it tracks them as new."""
        for ids in parts:
            gone = self._policy.victims(len(ids), self._held)
            assert gone is not None
            self._policy.forget(gone)
            self._index.blocks.last_used[gone] = self._filled.now
            self._policy.track(gone, self._filled.now)

    def _turn(self, parts: Sequence[Ids]) -> None:
        """Both in turn: a use, then a choice and an arrival."""
        for ids in parts:
            self._policy.touch(ids, self._filled.now)
            self._leave((ids,))


def question(numbers: Ids) -> GroupQuery:
    """For blocks from anywhere."""
    names = np.concatenate([hashes(number, 1) for number in numbers.tolist()])
    return GroupQuery((1,), names, TOKENS, TOKENS * len(names))


def figures(blocks: int, policy: str) -> dict[str, Any]:
    """Of one policy, measured in this process."""
    Filled(2 * PUT_EVERY * BATCH, policy).fill(2 * PUT_EVERY * BATCH)  # loads modules and makes one-time objects
    filled, before, begun = Filled(blocks, policy), memory_bytes(), time.perf_counter()
    filled.fill(blocks)
    taken_s = time.perf_counter() - begun
    memory = (memory_bytes() - before) / filled.count
    longest_ms = filled.longest_s * 1e3
    return {"bytes": memory, "longest_ms": longest_ms, "fill_s": taken_s, "times": Full(filled).figures()}


def rows(blocks: int = BLOCKS) -> list[Row]:
    """Per policy: bytes a block, longest call, fill time, and the operations."""
    out = []
    for policy in POLICIES:
        command = [sys.executable, "-m", "tools.bench.index_scale", "--json", "--policy", policy]
        told = subprocess.run([*command, "--blocks", str(blocks)], check=True, capture_output=True, text=True)
        out += rows_of(policy, json.loads(told.stdout))
    return out


def rows_of(policy: str, found: dict[str, Any]) -> list[Row]:
    """The figures of one policy as rows."""
    bounds = {"turn_chain": POLICIES[policy], f"turn_{BATCH}": POLICIES[policy], "turn_1": ONE_US}
    memory = "resident memory, columns and policy together; promised 256, goal 128"
    out = [
        row_of(f"index_{policy}_bytes", [found["bytes"]], unit="B/block", limits=[256], meaning=memory),
        row_of(f"index_{policy}_longest_call", [found["longest_ms"]], unit="ms", limits=[10], meaning="while filling"),
        row_of(f"index_{policy}_fill", [found["fill_s"]], unit="s", limits=[600], meaning="wall time, all of it"),
    ]
    plain = found["times"].pop("plain")
    for name, values in found["times"].items():
        most = f"; promised {bounds[name]:g}" if name in bounds else ""
        meaning = f"{MEANINGS[name.split('_')[0]]}, a block, against a plain lookup in the table{most}"
        out.append(row_of(f"index_{policy}_{name}", values, unit="us/block", limits=plain, meaning=meaning))
    return out


def main() -> None:
    """Reads the arguments, prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="lru")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = figures(given.blocks, given.policy)
    if given.json:
        print(json.dumps(found))
        return
    for row in rows_of(given.policy, found):
        print(f"{row.name:34} {row.value:9.3f} {row.unit:9} {row.ratio:7.2f}  {row.meaning}")


if __name__ == "__main__":
    main()
