"""tierd as an engine's own code uses it (`tierd.integrations.store`), against a real daemon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.depth import report
from tests.still import stand_still
from tests.system.blocks import await_true
from tests.system.warm import Daemon
from tierd._proto import admin_pb2
from tierd.cli.admin import connect
from tierd.client import Group, NamespaceSpec, PutGroup, Reservation
from tierd.core.formats.block import KVGeometry
from tierd.core.formats.model import BlockStatus, Need
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.pieces import copy_all_in
from tierd.integrations.store import SAVE_BLOCKS, EngineStore

LAYERS, PIECE, PATIENT_S = 3, 4096, 30.0
SPEC = NamespaceSpec(model="test", tokens_per_block=16, block_bytes=LAYERS * PIECE)
SLICED = replace(SPEC, geometry=KVGeometry(LAYERS))
"""Each piece is a slice, with a checksum of its own."""
FACTS = EngineFacts("test", "1", "store", role="worker")


def memory(blocks: int, *, seed: int = 0) -> np.ndarray:
    """An engine's memory, layer-major: uint8 [layers, blocks, PIECE]."""
    return np.random.default_rng(seed).integers(0, 255, (LAYERS, blocks, PIECE), dtype=np.uint8)


def pieces(kv: np.ndarray) -> list[list[np.ndarray]]:
    return [[kv[layer, block] for layer in range(LAYERS)] for block in range(kv.shape[1])]


def names(blocks: int) -> list[bytes]:
    return [i.to_bytes(4, "big") for i in range(blocks)]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def store(daemon: Daemon) -> Iterator[EngineStore]:
    with EngineStore(Options(target=daemon.target), FACTS) as store:
        yield store


def test_what_one_engine_saves_another_loads(daemon: Daemon, store: EngineStore) -> None:
    """Saved blocks load into another memory layer by layer, in several reservations; a second save
    copies nothing."""
    count = SAVE_BLOCKS + 7
    kv, ns = memory(count), store.open(SPEC)
    hashes = ns.fold(names(count))
    assert store.save(PutGroup(ns, hashes), pieces(kv)) == count
    assert store.save(PutGroup(ns, hashes), pieces(np.zeros_like(kv))) == count
    with EngineStore(Options(target=daemon.target), FACTS) as other:
        space = other.open(SPEC)
        group = Group(space, space.fold(names(count)))
        assert other.lookup([group]).tokens == count * 16
        back = np.zeros_like(kv)
        loaded = other.load([group], [pieces(back)])
        assert loaded.tokens == count * 16 and loaded.good == (count,) and (back == kv).all()


@pytest.mark.parametrize("spec", [SPEC, SLICED])
def test_a_load_ends_at_its_deadline(daemon: Daemon, spec: NamespaceSpec) -> None:
    """While the daemon hangs, a load ends with nothing. When the daemon answers later, no byte changes."""
    store = EngineStore(Options(target=daemon.target, timeout_s=PATIENT_S), FACTS)
    kv, ns = memory(4), store.open(spec)
    group, back = Group(ns, ns.fold(names(4))), np.zeros_like(kv)
    assert store.save(PutGroup(ns, group.hashes[:3]), pieces(kv)) == 3
    stand_still(daemon.pid)
    began = time.monotonic()
    try:  # the fourth is not near, so the daemon is asked
        assert store.load([group], [pieces(back)], timeout_s=0.2).good == (0,)
        assert time.monotonic() - began < PATIENT_S
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    await_true(lambda: store.lookup([group]).tokens == 48, "the daemon's answers")
    assert not back.any()
    store.close()


def test_blocks_near_load_without_a_call(daemon: Daemon, store: EngineStore) -> None:
    """Blocks in memory load while the daemon hangs, with their checksums, into the wanted pieces alone."""
    kv, ns = memory(4), store.open(SLICED)
    group, back = Group(ns, ns.fold(names(4))), np.zeros_like(kv)
    assert store.save(PutGroup(ns, group.hashes), pieces(kv)) == 4
    assert store.load([group], [pieces(back)]).good == (4,), "its segments are mapped"
    back[:] = 0
    stand_still(daemon.pid)
    try:
        loaded = store.load([group], [[None, *pieces(back)[1:]]])
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert (loaded.good, loaded.first, loaded.tokens) == ((4,), (1,), 64)
    assert (back[:, 1:] == kv[:, 1:]).all() and not back[:, 0].any()


def test_a_save_of_what_is_partly_there(store: EngineStore) -> None:
    """A save counts blocks that are stored already, at any place among new ones."""
    ns, kv = store.open(SPEC), memory(6)
    hashes = ns.fold(names(6))
    for one in (0, 3):
        assert store.save(PutGroup(ns, hashes[one : one + 1]), pieces(kv)[one : one + 1]) == 1
    assert store.save(PutGroup(ns, hashes), pieces(kv)) == 6


def test_blocks_that_do_not_follow_each_other(store: EngineStore) -> None:
    """One call saves unrelated blocks, each with its length, and reports each."""
    ns, kv, lengths = store.open(SPEC), memory(3).reshape(3, -1), [64, LAYERS * PIECE, 640]
    hashes = ns.fold(names(3))
    sources = [[kv[i, :length]] for i, length in enumerate(lengths)]
    groups = [PutGroup(ns, hashes[i : i + 1], lengths=[length]) for i, length in enumerate(lengths)]
    assert store.save_each(groups[:2], sources[:2]) == [True, True]
    assert store.save_each(groups, [*sources[:2], [kv[2][:1]]]) == [False] * 3
    assert store.save_each(groups, sources) == [True] * 3
    for i, length in enumerate(lengths):
        out = np.zeros(length, dtype=np.uint8)
        assert store.load([Group(ns, hashes[i : i + 1])], [[[out]]]).good == (1,)
        assert (out == sources[i][0]).all()


def test_a_save_is_what_it_has_copied(store: EngineStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon reads no byte of a save: a page changed after its copy is stored but never served."""
    inner, kv = Reservation.commit, memory(4)
    whole = np.ascontiguousarray(kv.transpose(1, 0, 2)).reshape(4, 1, -1)

    def commit(self: Reservation, **how: Any) -> Any:
        self.buffer(2)[5] ^= 1
        return inner(self, **how)

    monkeypatch.setattr(Reservation, "commit", commit)
    for n, (sources, layers) in enumerate(product((pieces(kv), [*whole]), (0, LAYERS))):
        ns = store.open(replace(SPEC, salt=str(n), geometry=KVGeometry(layers)))
        group, back = Group(ns, ns.fold(names(4))), np.zeros_like(kv)
        assert store.save(PutGroup(ns, group.hashes), sources) == 4
        assert store.load([group], [pieces(back)]).good == (2,)
        assert (back[:, :2] == kv[:, :2]).all()


def test_sums_are_of_one_commit(store: EngineStore) -> None:
    """Checksums given to a commit of some blocks do not apply to the others."""
    ns, kv = store.open(SPEC), memory(4)
    hashes = ns.fold(names(4))
    with store.client.reserve([PutGroup(ns, hashes)]) as pages:
        sums = copy_all_in(pieces(kv), [page for page in pages.buffers() if page is not None], [0] * 4)
        named = ns.naming(hashes, index=range(4))
        first = pages.summed(sums[:2]).commit(named[:2], keep_open=True)
        assert [*first.statuses, *pages.commit(named[2:]).statuses] == [BlockStatus.READY] * 4
    back = np.zeros_like(kv)
    assert store.load([Group(ns, hashes)], [pieces(back)]).good == (4,) and (back == kv).all()


def test_only_wanted_blocks_are_copied(store: EngineStore) -> None:
    """Blocks without destination pieces are leased and checked, not copied."""
    kv, ns = memory(4), store.open(SPEC)
    store.save(PutGroup(ns, ns.fold(names(4))), pieces(kv))
    back = np.zeros_like(kv)
    loaded = store.load([Group(ns, ns.fold(names(4)))], [[None, None, *pieces(back)[2:]]])
    assert loaded.good == (4,) and not back[:, :2].any() and (back[:, 2:] == kv[:, 2:]).all()


@pytest.mark.parametrize("spec", [SPEC, SLICED])
@pytest.mark.parametrize(("need", "window"), [(Need.LAST_TOKENS, 32), (Need.LAST_STATE, 0)])
def test_a_window_loads_into_its_own_blocks(store: EngineStore, spec: NamespaceSpec, need: Need, window: int) -> None:
    """Of a window that ends before the last wanted block, each block comes into its own memory."""
    ns, kv, back = store.open(spec), memory(8), np.zeros_like(memory(8))
    group = Group(ns, ns.fold(names(8)), need=need, need_tokens=window)
    assert store.save(PutGroup(ns, group.hashes[:6]), pieces(kv)[:6]) == 6
    loaded = store.load([group], [pieces(back)])
    blocks = slice(loaded.first[0], loaded.good[0])
    assert (loaded.tokens, blocks.stop) == (96, 6)
    assert (back[:, blocks] == kv[:, blocks]).all() and not back[:, : blocks.start].any() and not back[:, 6:].any()


def test_a_gap_ends_what_is_good(store: EngineStore) -> None:
    """A load counts no block as good at or after a block that was never saved."""
    kv, ns = memory(6), store.open(SPEC)
    hashes = ns.fold(names(6))
    assert store.save(PutGroup(ns, hashes[:3]), pieces(kv)[:3]) == 3
    assert store.save(PutGroup(ns, hashes[4:], parent=hashes[3].tobytes(), position=4), pieces(kv)[4:]) == 2
    loaded = store.load([Group(ns, hashes)], [pieces(np.zeros_like(kv))])
    assert loaded.tokens == 48 and loaded.good == (3,)


def test_wrong_shapes_lose_nothing(store: EngineStore) -> None:
    """Pieces that do not add up to a block are a failed save, counted, and later saves work."""
    kv, ns = memory(2), store.open(SPEC)
    assert store.save(PutGroup(ns, ns.fold(names(2))), [p[:2] for p in pieces(kv)]) == 0
    assert store.counts["failed_saves"] == 1
    assert store.save(PutGroup(ns, ns.fold(names(2))), pieces(kv)) == 2


def test_without_a_daemon_everything_is_a_miss(daemon: Daemon, store: EngineStore) -> None:
    """Without the daemon every call misses and none raises; after its restart the same store hits again."""
    kv, ns = memory(4), store.open(SPEC)
    hashes = ns.fold(names(4))
    store.save(PutGroup(ns, hashes), pieces(kv))
    daemon.kill()
    assert store.lookup([Group(ns, hashes)]).tokens == 0
    assert store.load([Group(ns, hashes)], [pieces(np.zeros_like(kv))]).good == (0,)
    assert store.save(PutGroup(ns, hashes), pieces(kv)) == 0
    daemon.start()
    back = np.zeros_like(kv)

    def served() -> bool:
        return store.load([Group(ns, hashes)], [pieces(back)]).good == (4,)

    await_true(served, "the blocks of the life before")
    assert (back == kv).all()


def test_a_daemon_that_hangs_in_the_middle_of_a_save(daemon: Daemon) -> None:
    """A daemon that hangs during a save costs it one timeout; afterwards the daemon frees the pages."""

    class Stopping(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            stand_still(daemon.pid)
            return super().__iter__()

    kv, timeout_s = memory(4), 1.0
    with EngineStore(Options(target=daemon.target, timeout_s=timeout_s), FACTS) as store:
        ns = store.open(SPEC)
        hashes = ns.fold(names(4))
        first, *others = pieces(kv)
        began = time.monotonic()
        try:
            assert store.save(PutGroup(ns, hashes), [Stopping(first), *others]) == 0
            elapsed = time.monotonic() - began
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        report("engine's save, hung at the commit", save_s=elapsed)
        assert elapsed < 10 * timeout_s and store.counts["dropped_blocks"] == 4
        await_true(lambda: store.save(PutGroup(ns, hashes), pieces(kv)) == 4, "the same blocks saved")
        back = np.zeros_like(kv)
        assert store.load([Group(ns, hashes)], [pieces(back)]).good == (4,) and (back == kv).all()


def engines_seen(daemon: Daemon) -> list[dict[str, str]]:
    """The self-description of each engine with an open session."""
    with connect(daemon.target) as admin:
        sessions = admin.ask(admin_pb2.SessionsRequest()).sessions
    return [dict(one.engine) for one in sessions if one.engine and one.state == "open"]


def test_an_engine_is_seen_before_its_first_request_and_after_each_restart(daemon: Daemon) -> None:
    """Operators see an engine's current description before its first request and after a daemon's restart."""
    with EngineStore(Options(target=daemon.target), FACTS) as store:
        await_true(lambda: engines_seen(daemon) == [FACTS.words()], "the engine is seen")
        more = replace(FACTS, hash_seed="7")
        store.introduce(more)
        await_true(lambda: engines_seen(daemon) == [more.words()], "what it says later is seen")
        daemon.restart()
        await_true(lambda: engines_seen(daemon) == [more.words()], "the engine is seen by the next daemon")
    await_true(lambda: engines_seen(daemon) == [], "an engine that has left is seen no more")


def test_an_engine_without_a_daemon_says_so_at_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a daemon an engine's log names the target once, before its first request misses."""
    with EngineStore(Options(target=str(tmp_path)), FACTS):
        await_true(lambda: any(str(tmp_path) in line for line in caplog.messages), "the target is named")
    assert sum("served as misses" in line for line in caplog.messages) == 1
