"""Encoded blocks in the core: reserved lengths, errors, demands, digests of decoded blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import count
from tests.unit.core.kit import DEVICE, HOST, NVME, PAGE, TOKENS, Kit, chain, tier
from tierd.core.formats.model import CODED, BlockStatus, StructArray
from tierd.core.plan import GroupQuery, Ids, Lengths

BYTES, ROOM = 8 * PAGE, 2 * PAGE
"""Of a block, and of its encoding at most."""
LIMIT = 1.0
READY, FAILED, CORRUPT, NO_ROOM = BlockStatus.READY, BlockStatus.FAILED, BlockStatus.CORRUPT, BlockStatus.NO_ROOM


class Halved:
    """Stores keep all blocks but the first of a sequence encoded. accepted: by every namespace.
    coded: those stores; empty: all."""

    def __init__(self) -> None:
        self.accepted, self.coded = LIMIT, set[int]()

    def lengths(self, tier: int, blocks: StructArray) -> Lengths:
        if self.coded and tier not in self.coded:
            return blocks["length"]
        is_first = (blocks["position"] == 0) | (blocks["length"] < BYTES)
        return np.where(is_first, blocks["length"], ROOM).astype(np.uint32)

    def error_limits(self, namespaces: Ids) -> np.ndarray:
        return np.full(len(namespaces), self.accepted, np.float32)


class Coded(Kit):
    """A kit that encodes and decodes: the digest of a page's bytes is known by its generation."""

    def __init__(self, *tiers: object) -> None:
        self.forms = Halved()
        super().__init__(*tiers, forms=self.forms)  # type: ignore[arg-type]
        self.holds: dict[int, int] = {}

    def write(self, hashes: StructArray, digest: int = 7) -> None:
        """Puts the missing blocks of a chain, with this digest."""
        reserved = self.reserve(hashes, length=BYTES)
        if reserved.reservation:
            committed = self.commit(reserved, digest=digest)
            for extent, status in zip(committed.extents, committed.statuses, strict=True):
                if status == READY:
                    self.holds[int(extent["generation"])] = digest

    def end(self, statuses: list[int], *, length: int = PAGE + 100, error: float = 0.25) -> None:
        """Ends the first transfers in flight that wait for no other."""
        able = [flight for flight in self.flying if int(flight["after"]) not in {int(f["id"]) for f in self.flying}]
        able = able[: len(statuses)]
        self.flying = [flight for flight in self.flying if all(int(flight["id"]) != int(a["id"]) for a in able)]
        if not able:
            return
        batch = np.array(able)
        metas, codes = self.core.metas(batch["block"]), np.array(statuses[: len(able)], np.uint16)
        metas["error"] = batch["error"]
        for row, flight in enumerate(batch):
            digest = self.holds.get(int(flight["source"]["generation"]), 0)
            if flight["target"]["flags"] & CODED:
                metas[row]["stored_length"], metas[row]["error"] = length, metas[row]["error"] + error
                digest += error > 0  # of the bytes that it decodes to
            elif codes[row] == NO_ROOM:
                codes[row] = FAILED
            if flight["source"]["flags"] & CODED:
                metas[row]["digest"] = digest
            self.holds[int(flight["target"]["generation"])] = digest
        self.took(self.core.finish(batch["id"], statuses=codes, now=self.tick(), metas=metas))

    def end_all(self) -> None:
        while self.flying:
            self.end([READY] * 64)

    def asked(self, hashes: StructArray, limit: float) -> GroupQuery:
        return GroupQuery((1,), hashes, TOKENS, TOKENS * len(hashes), error_limit=limit)

    def check_served(self, hashes: StructArray, limit: float) -> int:
        """Gets a chain. Its pages are within the limit, and hold what the core's digests say."""
        acquired = self.acquire(self.asked(hashes, limit))
        self.end_all()
        served = self.settle(acquired) if acquired.lease else None
        if served is None or not served.tokens:
            return 0
        assert (self.core.errors(served.extents) <= limit).all()
        digests = self.core.metas(served.blocks)["digest"][:, 0]
        assert [self.holds[int(e["generation"])] for e in served.extents] == digests.tolist()
        assert (served.extents["flags"] & CODED == 0).all() and (served.extents["length"] == BYTES).all()
        self.release(acquired.lease)
        return served.tokens // TOKENS


def kit() -> Coded:
    return Coded(
        tier(HOST, 64, segment=16),
        tier(NVME, 64, segment=16),
    )


def stored(k: Coded, hashes: StructArray) -> StructArray:
    return k.core.extents(k.ids(hashes), tier=1)


def test_a_store_reserves_and_keeps_the_encoded_length() -> None:
    """An encoded block gets a page of the reserved length, then the length of its copy."""
    k, names = kit(), chain("a", 3)
    k.write(names)
    plan = k.took(k.core.persist(k.ids(names), now=k.tick()))
    assert plan.transfers["target"]["length"].tolist() == [BYTES, ROOM, ROOM]
    assert (plan.transfers["target"]["flags"] & CODED > 0).tolist() == [False, True, True]
    k.end_all()
    assert stored(k, names)["length"].tolist() == [BYTES, PAGE + 100, PAGE + 100]
    assert k.core.errors(stored(k, names)).tolist() == [0.0, 0.25, 0.25]
    assert k.core.errors(k.core.extents(k.ids(names), tier=0)).tolist() == [0.0] * 3


def test_demands_and_sums_of_errors() -> None:
    """Far and near, a block is served within its error only; encoding again adds the errors up."""
    k, names = kit(), chain("a", 3)
    k.write(names)
    for error in (0.25, 0.5):
        k.took(k.core.persist(k.ids(names), now=k.tick()))
        k.end_all()
        k.took(k.core.evict(k.ids(names), tier=0, now=k.tick()))
        assert k.check_served(names, error - 0.01) == 1
        assert k.check_served(names, error) == 3
        k.took(k.core.evict(k.ids(names), tier=1, now=k.tick()))
        assert k.check_served(names, error - 0.01) == 1


def test_without_room_a_block_is_stored_as_it_is() -> None:
    """After NO_ROOM a block's next copy is reserved in full."""
    k, names = kit(), chain("a", 2)
    k.write(names)
    k.took(k.core.persist(k.ids(names), now=k.tick()))
    k.end([NO_ROOM, NO_ROOM])
    assert k.core.are_plain(k.ids(names)).tolist() == [False, True]
    plan = k.took(k.core.persist(k.ids(names), now=k.tick()))
    assert plan.transfers["target"]["length"].tolist() == [BYTES, BYTES]
    k.end_all()
    assert k.core.errors(stored(k, names)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("accepted", "left"), [(LIMIT, 9), (0.0, 7)])
def test_coarse_blocks_count_as_held_within_their_namespaces_limit(accepted: float, left: int) -> None:
    """A put over coarse blocks copies nothing if the namespace accepts them, else it replaces them."""
    k, names = kit(), chain("a", 3)
    k.write(names)
    k.took(k.core.persist(k.ids(names), now=k.tick()))
    k.end_all()
    k.took(k.core.evict(k.ids(names), tier=0, now=k.tick()))
    k.check_served(names, LIMIT)
    k.forms.accepted = accepted
    k.write(names, digest=left)
    assert k.check_served(names, 0.0) == (1 if accepted else 3)


def test_a_device_reads_no_encoded_slot() -> None:
    """A device that reads a store directly gets encoded blocks through host memory."""
    k = Coded(tier(DEVICE, 64, segment=16), tier(HOST, 64, segment=16), tier(NVME, 64, segment=16))
    names = chain("a", 2)
    k.core.set_direct(0, frozenset({2}))
    k.write(names)
    k.took(k.core.persist(k.ids(names), now=k.tick()))
    k.end_all()
    k.took(k.core.evict(k.ids(names), tier=1, now=k.tick()))
    acquired = k.acquire(k.asked(names, LIMIT), kind=DEVICE)
    links = {(int(f["source"]["tier"]), int(f["target"]["tier"])) for f in k.flying}
    assert links == {(2, 0), (2, 1), (1, 0)}
    k.end_all()
    assert k.settle(acquired).tokens == 2 * TOKENS


STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 5), st.sampled_from([7, 8])),
    st.tuples(st.just("get"), st.integers(0, 5), st.sampled_from([0.0, 0.3, 0.6, 9.0])),
    st.tuples(st.just("persist"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("evict"), st.integers(0, 5), st.integers(0, 2)),
    st.tuples(st.just("serving"), st.integers(0, 1), st.integers(1, 2)),
    st.tuples(st.just("writable"), st.integers(0, 1), st.integers(1, 2)),
    st.tuples(st.just("coded"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("accept"), st.just(0), st.sampled_from([0.0, 0.3, 9.0])),
    st.tuples(st.just("end"), st.integers(1, 4), st.sampled_from([READY, READY, FAILED, CORRUPT, NO_ROOM])),
    st.tuples(st.just("demote"), st.just(0), st.just(0)),
)


@settings(max_examples=count(test=60, nightly=4_000, weekly=40_000), deadline=None)
@given(steps=st.lists(STEPS, max_size=60), levels=st.sampled_from([(1, 1), (0, 1), (1, 3)]))
def test_any_order_of_calls(steps: list[tuple[str, int, float]], levels: tuple[int, int]) -> None:
    """After any puts, gets, ends and faults, served pages are within the demand and hold the bytes of
    their digests."""
    k = Coded(
        tier(HOST, 64, segment=16, high_watermark=0.5, low_watermark=0.3),
        tier(NVME, 32, segment=16, level=levels[0], high_watermark=0.5, low_watermark=0.3),
        tier(NVME, 48, segment=16, index=1, level=levels[1]),
    )
    for what, which, value in steps:
        names = chain(f"{which}", 3)
        if what == "write":
            k.write(names, int(value))
        elif what == "get":
            k.check_served(names, value)
        elif what == "persist":
            k.took(k.core.persist(np.unique(k.ids(names)[k.ids(names) >= 0]), now=k.tick()))
        elif what == "evict":
            ids = k.ids(names)
            k.took(k.core.evict(ids[ids >= 0], tier=int(value), now=k.tick()))
        elif what == "accept":
            k.forms.accepted = value
        elif what == "serving":
            k.core.set_serving(int(value), serving=bool(which))
        elif what == "writable":
            k.core.set_writable(int(value), writable=bool(which))
        elif what == "coded":
            k.forms.coded = [{1}, {2}, {1, 2}, {9}][which]
        elif what == "end":
            k.end([int(value)] + [READY] * (which - 1), error=0.25 if which % 2 else 0.05)
        else:
            k.demote()


def test_an_exact_page_near_outlives_a_coarse_load() -> None:
    """A decoded copy is dropped if the block was put exactly into another tier meanwhile."""
    k = Coded(tier(DEVICE, 64, segment=16), tier(HOST, 64, segment=16), tier(NVME, 64, segment=16))
    names = chain("a", 2)
    k.write(names)
    k.took(k.core.persist(k.ids(names), now=k.tick()))
    k.end_all()
    k.took(k.core.evict(k.ids(names), tier=1, now=k.tick()))
    acquired = k.acquire(k.asked(names, LIMIT))
    k.forms.accepted = 0.0
    k.commit(k.reserve(names, length=BYTES, kind=DEVICE), digest=7)
    k.end_all()
    assert k.settle(acquired).tokens == TOKENS  # the first block alone
    assert k.core.metas(k.ids(names))["digest"][:, 0].tolist() == [7, 7]


def test_an_exact_copy_is_loaded_rather_than_a_coarse_one() -> None:
    """With a coarse copy in one store and an exact one in another, the exact one comes near."""
    k = Coded(tier(HOST, 64, segment=16), tier(NVME, 64, segment=16), tier(NVME, 64, segment=16, index=1))
    k.forms.coded = {1}
    names = chain("a", 3)
    k.write(names)
    for writable in (2, 1):
        for store in (1, 2):
            k.core.set_writable(store, writable=store == writable)
        k.took(k.core.persist(k.ids(names), now=k.tick()))
        k.end_all()
    assert k.core.errors(stored(k, names)).tolist() == [0.0, 0.25, 0.25]
    k.took(k.core.evict(k.ids(names), tier=0, now=k.tick()))
    assert k.check_served(names, 0.0) == 3


def test_a_commit_gives_no_lease_on_a_coarse_block() -> None:
    """If the block exists coarsely by then, the writer gets no lease: it may accept no error."""
    k, names = kit(), chain("a", 3)
    mine = k.reserve(names, length=BYTES)
    k.write(names)
    k.took(k.core.persist(k.ids(names), now=k.tick()))
    k.end_all()
    k.took(k.core.evict(k.ids(names), tier=0, now=k.tick()))
    assert k.check_served(names, LIMIT) == 3
    done = k.commit(mine, lease=True)
    assert done.statuses.tolist() == [BlockStatus.EXISTS] * 3 and done.lease == 0


def test_an_encoded_block_names_its_origin_after_a_restart() -> None:
    """A plain page agrees with an encoded page of the same block, whichever a start finds first."""
    for stored_first in (False, True):
        k, names = kit(), chain("a", 2)
        k.write(names)
        k.took(k.core.persist(k.ids(names), now=k.tick()))
        k.end_all()
        ids, fresh = k.ids(names), kit()
        found = {place: (k.core.extents(ids, tier=place), k.core.metas(ids)) for place in (0, 1)}
        for place, (extents, metas) in found.items():
            coded = extents["flags"] & CODED > 0
            metas["generation"], metas["stored_length"] = extents["generation"], extents["length"]
            metas["origin"][coded], metas["digest"][coded] = metas["digest"][coded], 99
            metas["error"][coded], metas["codec"][coded] = 0.25, 4
            extents["flags"] &= CODED
            assert place == 1 or not coded.any()
        for place in (1, 0) if stored_first else (0, 1):
            segments = k.core.segments(place)
            assert fresh.core.adopt(
                place, segments=segments, extents=found[place][0], metas=found[place][1], now=0.0
            ).all()
        fresh.core.check()
        assert fresh.core.metas(fresh.ids(names))["digest"][:, 0].tolist() == [7, 7]


@pytest.mark.parametrize(("better", "away", "back"), [(0.1, 3, 1), (0.0, 1, 3)])
def test_a_better_copy_far_away_hides_no_coarse_page(better: float, away: int, back: int) -> None:
    """A host page too coarse for a demand that a store meets is a miss. A coarse load is refused if a
    store has the block exactly, though out of service: then the exact one serves when it is back."""
    k = Coded(tier(HOST, 64, segment=16), tier(NVME, 64, segment=16), tier(NVME, 64, segment=16, index=1))
    names = chain("a", 3)
    k.write(names)
    for store, error in ((1, 0.5), (2, better)):
        k.core.set_writable(1, store == 1)
        k.core.set_writable(2, store == 2)
        k.took(k.core.persist(k.ids(names), now=k.tick()))
        k.end([READY] * 3, error=error)
    k.took(k.core.evict(k.ids(names), tier=0, now=k.tick()))
    k.core.set_serving(2, serving=False)
    assert k.check_served(names, LIMIT) == away
    k.core.set_serving(2, serving=True)
    assert k.check_served(names, 0.2) == back
