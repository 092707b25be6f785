"""The events for routers: names, media, ranks, bounds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.events.payloads import Cleared, Event, Removed, Stored, short_hash
from tierd.events.router_view import EVENT_TOKENS, Names, RouterView, Space
from tierd.integrations.events import Whereabouts

MEDIA = ("GPU", "CPU", "CPU", "STORAGE")
SPACE = Space(7, 4, adapter="lora", group=1)


def own(*numbers: int) -> bytes:
    """tierd's hashes of blocks."""
    return b"".join(bytes([number]) * 32 for number in numbers)


def engine(number: int) -> bytes:
    return b"engine" + number.to_bytes(4, "big")


def tokens(*numbers: int) -> tuple[int, ...]:
    return tuple(token for number in numbers for token in range(4 * number, 4 * number + 4))


def names(*numbers: int, space: Space = SPACE, parent: bytes = b"") -> Names:
    words = np.array(tokens(*numbers), dtype="<u4").tobytes()
    called = b"".join(engine(number) for number in numbers)
    return Names(space, own(*numbers), 4 * len(numbers), called, 10, 1, parent, words)


def short(*numbers: int) -> tuple[int, ...]:
    return tuple(short_hash(engine(number)) for number in numbers)


@pytest.fixture
def told() -> RouterView:
    return RouterView(MEDIA, 100)


def test_a_run_is_one_event_under_the_engines_names(told: RouterView) -> None:
    """Consecutive blocks make one event with the engine's names, after they are held and not before."""
    assert told.name(names(1, 2, 3, parent=engine(0))) == []
    assert told.stored(SPACE, own(1, 2, 3), tier=1) == [
        Stored(short(1, 2, 3), short_hash(engine(0)), tokens(1, 2, 3), 4, "CPU", "lora", 1)
    ]
    assert told.removed(SPACE, own(2, 3), tier=1) == [Removed(short(2, 3), "CPU", 1)]


def test_blocks_that_do_not_follow_are_told_apart(told: RouterView) -> None:
    """Each event's tokens follow its parent: a gap begins another event."""
    told.name(names(1, 2, 3))
    assert told.stored(SPACE, own(1, 3), tier=1) == [
        Stored(short(1), None, tokens(1), 4, "CPU", "lora", 1),
        Stored(short(3), short_hash(engine(2)), tokens(3), 4, "CPU", "lora", 1),
    ]


def test_copies_are_told_by_medium(told: RouterView) -> None:
    """Each medium gets its own event; two tiers of one medium count as one, until both drop the block."""
    told.name(names(1))
    kinds = [
        told.stored(SPACE, own(1), tier=1)[0],
        *told.stored(SPACE, own(1), tier=2),
        told.stored(SPACE, own(1), tier=3)[0],
        *told.removed(SPACE, own(1), tier=1),
        told.removed(SPACE, own(1), tier=2)[0],
        told.removed(SPACE, own(1), tier=3)[0],
    ]
    assert [(type(k), k.medium) for k in kinds if not isinstance(k, Cleared)] == [
        (Stored, "CPU"),
        (Stored, "STORAGE"),
        (Removed, "CPU"),
        (Removed, "STORAGE"),
    ]
    assert kinds[1] == Stored(short(1), None, tokens(1), 4, "STORAGE", "lora", 1)


def test_without_words_of_the_engine_blocks_have_their_own_names(told: RouterView) -> None:
    """A block without an engine name is published under tierd's hash, with tokens only if a put gave them."""
    assert told.stored(SPACE, own(1, 2), tier=1) == [
        Stored((short_hash(own(1)), short_hash(own(2))), None, (), 0, "CPU", "lora", 1)
    ]
    words = np.array(tokens(5, 6), dtype="<u4").tobytes()
    told.name(Names(SPACE, own(5, 6), 8, tokens=words))
    assert told.stored(SPACE, own(5, 6), tier=1) == [
        Stored((short_hash(own(5)), short_hash(own(6))), None, tokens(5, 6), 4, "CPU", "lora", 1)
    ]


def test_several_blocks_of_the_engine_in_one_of_ours(told: RouterView) -> None:
    """A block that holds two engine blocks is published as two hashes of half the size."""
    words = np.array(tokens(1, 2), dtype="<u4").tobytes()
    told.name(Names(SPACE, own(1, 2), 8, b"aabbccdd", 2, 2, b"", words))
    (event,) = told.stored(SPACE, own(1, 2), tier=1)
    assert isinstance(event, Stored) and event.block_size == 2 and event.tokens == tokens(1, 2)
    assert event.hashes == tuple(short_hash(name) for name in (b"aa", b"bb", b"cc", b"dd"))


def test_a_name_that_comes_later_is_told_anew(told: RouterView) -> None:
    """A late engine name first removes the block under its old name; a put without names changes nothing."""
    told.stored(SPACE, own(1), tier=3)
    renamed = told.name(names(1))
    assert renamed == [
        Removed((short_hash(own(1)),), "STORAGE", 1),
        Stored(short(1), None, tokens(1), 4, "STORAGE", "lora", 1),
    ]
    assert told.name(names(1)) == [] and told.name(Names(SPACE, own(1), 4)) == []
    assert told.removed(SPACE, own(1), tier=3) == [Removed(short(1), "STORAGE", 1)]


def test_a_short_block_is_not_told(told: RouterView) -> None:
    """Routers count whole blocks, so a sequence's short last block is never published."""
    told.name(Names(SPACE, own(1, 2), 6, tokens=np.arange(6, dtype="<u4").tobytes()))
    (event,) = told.stored(SPACE, own(1, 2), tier=1)
    assert isinstance(event, Stored) and event.hashes == (short_hash(own(1)),)
    assert told.removed(SPACE, own(2), tier=1) == []


def test_a_block_counts_when_every_rank_holds_it() -> None:
    """Of several ranks, the last to store makes a block held, and the first to lose it makes it gone."""
    told, space = RouterView(MEDIA, 100), Space(1, 4, ranks=2)
    told.name(names(1, space=space))
    assert told.stored(space, own(1), tier=3, rank=0) == told.removed(space, own(1), tier=3, rank=0) == []
    assert told.stored(space, own(1), tier=1, rank=1) == []
    assert [type(e) for e in told.stored(space, own(1), tier=2, rank=0)] == [Stored]
    assert told.removed(space, own(1), tier=2, rank=0) == [Removed(short(1), "CPU")]
    assert told.removed(space, own(1), tier=1, rank=1) == []


def test_whole_hashes() -> None:
    """With whole hashes the engine's bytes are published unchanged."""
    told = RouterView(MEDIA, 100, has_whole_hashes=True)
    told.name(names(2, parent=engine(1)))
    (event,) = told.stored(SPACE, own(2), tier=0)
    assert isinstance(event, Stored) and (event.hashes, event.parent) == ((engine(2),), engine(1))


def test_the_books_are_bounded() -> None:
    """Beyond the limit the view removes the oldest blocks, first those that no tier holds."""
    told = RouterView(MEDIA, 3)
    told.name(names(1, 2, 3))
    told.stored(SPACE, own(1, 2, 3), tier=1)
    told.removed(SPACE, own(3), tier=1)
    assert told.name(names(4)) == []
    assert Removed(short(1), "CPU", 1) in told.stored(SPACE, own(4, 5), tier=1) and len(told) == 3
    assert told.removed(SPACE, own(1), tier=1) == []


def test_clear_takes_everything_back_and_keeps_names(told: RouterView) -> None:
    """After "cleared" a removal publishes nothing, and a block stored again keeps its engine's name."""
    told.name(names(1, 2))
    told.stored(SPACE, own(1, 2), tier=1)
    assert told.clear() == [Cleared()]
    assert told.removed(SPACE, own(1), tier=1) == []
    assert told.stored(SPACE, own(2), tier=1) == [
        Stored(short(2), short_hash(engine(1)), tokens(2), 4, "CPU", "lora", 1)
    ]


def test_one_event_is_bounded(told: RouterView) -> None:
    """A long sequence is split into several events, each within the bound."""
    count, told = EVENT_TOKENS // 16, RouterView(MEDIA, 10**6)
    hashes = np.random.default_rng(0).bytes(32 * count)
    words = np.arange(count * 64, dtype="<u4").tobytes()
    space = Space(1, 64)
    told.name(Names(space, hashes, 64 * count, tokens=words))
    events = told.stored(space, hashes, tier=1)
    stored = [event for event in events if isinstance(event, Stored)]
    assert len(stored) == len(events) > 3
    assert max(len(e.tokens) + len(e.hashes) for e in stored) <= EVENT_TOKENS
    assert b"".join(np.array(e.tokens, dtype="<u4").tobytes() for e in stored) == words


steps = st.tuples(st.sampled_from(["name", "store", "remove", "clear"]), st.integers(1, 12), st.integers(0, 3))


@given(st.lists(steps, max_size=60), st.integers(1, 8))
def test_routers_never_believe_in_more_than_is_held(run: list[tuple[str, int, int]], limit: int) -> None:
    """A router never assumes more than a medium holds, and without a bound it assumes exactly that."""
    small, large = RouterView(MEDIA, limit), RouterView(MEDIA, 1000)
    beliefs = Whereabouts(), Whereabouts()
    held: set[tuple[int, int]] = set()
    for what, number, tier in run:
        for told, belief in zip((small, large), beliefs, strict=True):
            belief.apply(_step(told, what, number, tier))
        held = _after(held, what, (number, tier))
        truth = {(number, MEDIA[tier]) for number, tier in held}
        assert _believed(beliefs[0]) <= truth and _believed(beliefs[1]) == truth
        assert len(small) <= limit
    for number, tier in sorted(held):
        for told, belief in zip((small, large), beliefs, strict=True):
            belief.apply(told.removed(SPACE, own(number), tier=tier))
    assert _believed(beliefs[0]) == _believed(beliefs[1]) == set()


def _step(told: RouterView, what: str, number: int, tier: int) -> Iterable[Event]:
    if what == "name":
        return told.name(names(number, number % 12 + 1))
    if what == "clear":
        return told.clear()
    return (told.stored if what == "store" else told.removed)(SPACE, own(number), tier=tier)


def _after(held: set[tuple[int, int]], what: str, which: tuple[int, int]) -> set[tuple[int, int]]:
    if what == "clear":
        return set()
    return held | {which} if what == "store" else held - {which} if what == "remove" else held


def _believed(belief: Whereabouts) -> set[tuple[int, str]]:
    numbers = {short_hash(name): n for n in range(1, 14) for name in (engine(n), own(n))}
    return {(numbers[int(block)], medium) for block, media in belief.media.items() for medium in media}  # type: ignore[arg-type]
