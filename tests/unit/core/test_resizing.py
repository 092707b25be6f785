"""A tier of the core gets more places, or fewer: what is held stays, and the books stay right."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from tests.depth import count
from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.formats.model import BlockStatus
from tierd.core.plan import Ids

SEGMENT = 4
"""Pages of a segment."""


def resized(kit: Kit, places: int) -> None:
    """Sets the spec of the first tier after its places were changed."""
    spec = kit.core._index.tiers[0].spec
    kit.core.tuning.set_spec(0, dataclasses.replace(spec, capacity_bytes=places * spec.segment_bytes), kit.tick())
    kit.core.check()


def close(kit: Kit, places: int) -> None:
    """Closes places, the best first."""
    tuning = kit.core.tuning
    tuning.close_places(0, places, sorted(tuning.used_places(0), key=lambda place: tuning.rank(0, place)))


def leaving(kit: Kit) -> Ids:
    """The blocks of closing segments."""
    return np.concatenate(
        [np.zeros(0, np.int64), *(kit.core.tuning.blocks_at(0, p) for p in kit.core.tuning.closing(0))]
    )


def empty(kit: Kit) -> None:
    """Evicts from closing segments."""
    kit.took(kit.core.evict(leaving(kit), tier=0, now=kit.tick()))


def near(kit: Kit, names: str) -> str:
    """The chains that are in the first tier, whole."""
    return "".join(name for name in names if set(kit.tiers_of(chain(name, SEGMENT))) == {0})


def filled(names: str = "abcd", places: int = 4) -> Kit:
    """A kit whose chains fill a segment each."""
    kit = Kit(tier(HOST, places * SEGMENT), tier(NVME, 32))
    for name in names:
        kit.put(chain(name, SEGMENT))
    return kit


def test_more_places_hold_more_blocks() -> None:
    """A tier that grew holds its blocks and as many new ones, in places of their own."""
    kit = filled()
    kit.core.tuning.open_places(0, 2)
    resized(kit, 6)
    for name in "ef":
        kit.put(chain(name, SEGMENT))
    assert near(kit, "abcdef") == "abcdef" and kit.core.tier_stats()[0].capacity_bytes == 6 * SEGMENT * PAGE
    assert sorted(segment.slot for segment in kit.core.segments(0)) == list(range(6))


def test_a_session_gets_its_share_of_the_new_size() -> None:
    """A session may hold its share of the tier as it is now."""
    kit = Kit(tier(HOST, 2 * SEGMENT), share=0.5)
    assert kit.reserve(chain("a", 6)).statuses[0].tolist().count(BlockStatus.RESERVED) == 4
    kit.core.tuning.open_places(0, 2)
    resized(kit, 4)
    assert kit.reserve(chain("b", 6)).statuses[0].tolist().count(BlockStatus.RESERVED) == 4


def test_a_bad_page_does_not_keep_its_place() -> None:
    """A quarantined page in a closing segment is freed with it."""
    kit = Kit(tier(HOST, 2 * SEGMENT, quarantine_share=0.5))
    kit.put(chain("a", SEGMENT))
    kit.took(kit.core.condemn(kit.core.extents(kit.ids(chain("a", 1)), tier=0), now=kit.tick()))
    assert len(kit.core.quarantined(0)) == 1
    close(kit, 2)
    empty(kit)
    assert (len(kit.core.tuning.closing(0)), len(kit.core.quarantined(0))) == (0, 0)


def test_a_smaller_tier_has_a_smaller_quarantine() -> None:
    """Bad pages beyond the share of the new size are used again, the oldest first."""
    kit = Kit(tier(HOST, 8 * SEGMENT, quarantine_share=1 / 16))
    for name in "ab":
        kit.put(chain(name, SEGMENT))
        kit.took(kit.core.condemn(kit.core.extents(kit.ids(chain(name, 1)), tier=0), now=kit.tick()))
    newest = kit.core.quarantined(0)["extent"]["segment"][1]
    close(kit, 4)
    resized(kit, 4)
    assert kit.core.quarantined(0)["extent"]["segment"].tolist() == [newest]


def test_the_coldest_segments_go() -> None:
    """Without vacant places the least recently used segments close; the others keep their pages."""
    kit = filled()
    acquired = kit.acquire(group(chain("a", SEGMENT)))
    kit.settle(acquired)
    kit.release(acquired.lease)
    close(kit, 2)
    assert len(kit.core.tuning.closing(0)) == 2
    empty(kit)
    assert (len(kit.core.tuning.closing(0)), len(kit.core.tuning.end_closed(0))) == (0, 2)
    resized(kit, 2)
    assert near(kit, "abcd") == "ad" and kit.core.tuning.end_closed(0) == []


def test_vacant_places_go_first() -> None:
    """A tier with enough vacant places loses no block, and its segments stay."""
    kit = filled("ab")
    close(kit, 2)
    assert (len(kit.core.tuning.closing(0)), kit.core.tuning.end_closed(0)) == (0, [])
    resized(kit, 2)
    assert near(kit, "ab") == "ab"


def test_a_closing_segment_gives_no_page() -> None:
    """A put takes pages of other segments, though the closing one has free pages."""
    kit = filled("ab", places=2)
    for name in "ab":
        kit.settle(kit.acquire(group(chain(name, 2))))
    close(kit, 1)
    empty(kit)
    assert kit.tiers_of(chain("a", SEGMENT)) == [0, 0, -1, -1]
    stays = kit.core.extents(kit.ids(chain("b", 1)), tier=0)["segment"]
    kit.put(chain("e", 2))
    assert set(kit.core.extents(kit.ids(chain("e", 2)), tier=0)["segment"]) == set(stays)


def test_pinned_segments_stay_until_they_are_released() -> None:
    """A pinned segment keeps its place; its session is named; after the release it closes."""
    kit = filled("ab", places=2)
    leases = [kit.acquire(group(chain(name, SEGMENT))) for name in "ab"]
    for lease in leases:
        kit.settle(lease)
    close(kit, 1)
    empty(kit)
    assert (len(kit.core.tuning.closing(0)), kit.core.tuning.holders(0)) == (1, [1])
    assert near(kit, "ab") == "ab"
    kit.release(*(lease.lease for lease in leases))
    empty(kit)
    assert (len(kit.core.tuning.closing(0)), kit.core.tuning.holders(0)) == (0, [])


def test_a_segment_that_is_kept_works_on() -> None:
    """A shrink that was given up leaves the segment as it was: it takes blocks again."""
    kit = Kit(tier(HOST, 2 * SEGMENT))
    reserved = kit.reserve(chain("a", 2))
    kit.put(chain("b", SEGMENT))
    close(kit, 2)
    assert kit.core.tuning.keep_places(0) == 2
    kit.commit(reserved)
    kit.put(chain("c", 2))
    assert set(kit.tiers_of(chain("a", 2)) + kit.tiers_of(chain("c", 2))) == {0}


def test_blocks_are_saved_for_the_next_tier() -> None:
    """The blocks of closing segments that no store has are written to it, and are then found there."""
    kit = filled()
    close(kit, 2)
    kit.took(kit.core.tuning.save(0, leaving(kit), kit.tick()))
    assert len(kit.flying) == 2 * SEGMENT
    kit.land()
    empty(kit)
    assert len(kit.core.tuning.closing(0)) == 0 and kit.tiers_of(chain("a", SEGMENT)) == [1] * SEGMENT


@pytest.mark.parametrize("seed", range(count(test=15, nightly=300, weekly=2000)))
def test_any_sizes_in_any_order(seed: int) -> None:
    """Puts, gets, faults and changes of size in any order keep every invariant, and leases their blocks."""
    rng, kit, size = random.Random(seed), filled(places=6), 6
    kit.core.tuning.open_places(0, 0)
    leases = []
    for _ in range(40):
        name = str(rng.randrange(12))
        match rng.randrange(7):
            case 0:
                acquired = kit.acquire(group(chain(name, rng.randint(1, 6))))
                kit.land()
                kit.settle(acquired)
                leases.append(acquired.lease)
            case 1 if leases:
                kit.release(leases.pop(rng.randrange(len(leases))))
            case 2:
                wanted = rng.randint(1, 10)
                if wanted > size:
                    kit.core.tuning.open_places(0, wanted - size)
                    resized(kit, size := wanted)
                elif wanted < size:
                    close(kit, size - wanted)
                    kit.core.check()
                    kit.put(chain(name, 3))
                    kit.took(kit.core.tuning.save(0, leaving(kit), kit.tick()))
                    kit.land()
                    empty(kit)
                    kit.core.tuning.end_closed(0)
                    resized(kit, size := wanted + kit.core.tuning.keep_places(0))
            case 3:
                extents = kit.core.extents(kit.ids(chain(name, 1)), tier=0)
                kit.took(kit.core.condemn(extents[extents["page"] >= 0], now=kit.tick()))
            case _:
                kit.put(chain(name, rng.randint(1, 6)))
        kit.demote()
        kit.land()
    kit.release(*leases)
    places = kit.core._index.tiers[0]
    assert size == len(places.segments) - len(places.closed)
