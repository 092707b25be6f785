"""Random groups against a plain definition of the tokens that can be served."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.core import Core
from tierd.core.formats.model import PUT_BLOCK, ROOT, Need, TierKind, TierSpec
from tierd.core.plan import GroupQuery, Plan, PutQuery
from tierd.policies.named import NamedPolicies

PAGE_BYTES = 4096
TIERS = [
    TierSpec(TierKind.HOST, 0, 512 * PAGE_BYTES, 64 * PAGE_BYTES),
    TierSpec(TierKind.NVME, 0, 1024 * PAGE_BYTES, 64 * PAGE_BYTES, slot_overhead_bytes=4096),
]
SESSION = 1


@dataclass(frozen=True)
class Group:
    """held: per rank and block, the tiers that must hold it."""

    size: int
    tokens: int
    need: Need
    need_tokens: int
    held: tuple[tuple[frozenset[int], ...], ...]

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.size)

    def end(self, block: int) -> int:
        return min(self.tokens, (block + 1) * self.size)

    def needed(self, tokens: int) -> list[int] | None:
        """Numbers of the blocks needed to serve so many tokens; None if no set of blocks does."""
        spans = [(i, i * self.size, self.end(i)) for i in range(self.blocks)]
        if self.need is Need.LAST_STATE:
            return next(([i] for i, _, stop in spans if stop == tokens), None)
        first = 0 if self.need is Need.PREFIX else max(0, tokens - self.need_tokens)
        return [i for i, start, stop in spans if start < tokens and stop > first]

    def serves(self, tokens: int) -> bool:
        needed = self.needed(tokens)
        return needed is not None and all(rank[i] for rank in self.held for i in needed)


def definition(groups: list[Group]) -> int:
    """The greatest number of tokens that every group and rank can serve."""
    most = min(group.tokens for group in groups)
    return next((n for n in range(most, 0, -1) if all(group.serves(n) for group in groups)), 0)


TIER_CHOICES = [frozenset(), frozenset({0}), frozenset({0}), frozenset({0}), frozenset({1}), frozenset({0, 1})]


@st.composite
def group_lists(draw) -> list[Group]:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
        tokens = draw(st.integers(1, 40))
        blocks = -(-tokens // size)
        tiers = st.sampled_from(TIER_CHOICES[draw(st.sampled_from([0, 1])) :])
        rank = st.lists(tiers, min_size=blocks, max_size=blocks).map(tuple)
        held = tuple(draw(st.lists(rank, min_size=1, max_size=2)))
        made.append(Group(size, tokens, draw(st.sampled_from(list(Need))), draw(st.integers(1, 20)), held))
    return made


def hashes(group: int, blocks: int) -> np.ndarray:
    """The hashes of a group. All its ranks share them, as they share the namespace's digest."""
    raw = b"".join(hashlib.sha256(bytes([group, i])).digest() for i in range(blocks))
    return np.frombuffer(raw, np.uint8).reshape(-1, 32)


def namespace(group: int, rank: int) -> int:
    return 1 + 10 * group + rank


def filled(groups: list[Group]) -> tuple[Core, list[GroupQuery]]:
    """A core that holds exactly the groups' blocks, and the queries for all of them."""
    core = Core(TIERS, policies=NamedPolicies(), session_share=1.0)
    core.open_session(SESSION, domain=1)
    queries = []
    for number, group in enumerate(groups):
        names = hashes(number, group.blocks)
        ranks = tuple(namespace(number, rank) for rank in range(len(group.held)))
        queries.append(GroupQuery(ranks, names, group.size, group.tokens, group.need, group.need_tokens))
        for rank, held in zip(ranks, group.held, strict=True):
            for block, tiers in enumerate(held):
                if tiers:
                    hold(core, rank, names, block, tokens=group.end(block) - block * group.size, tiers=tiers)
    return core, queries


def hold(core: Core, rank: int, names: np.ndarray, block: int, *, tokens: int, tiers: frozenset[int]) -> None:
    """Puts one block, with or without its parent, into exactly these tiers."""
    row = np.zeros(1, PUT_BLOCK)
    row["hash"], row["tokens"], row["length"] = names[block], tokens, PAGE_BYTES
    parent = names[block - 1].tobytes() if block else ROOT
    put = PutQuery(namespace=rank, parent=parent, position=block, blocks=row)
    reserved = core.reserve(SESSION, groups=[put], kind=TierKind.HOST, now=0.0)
    committing = core.begin_commit(SESSION, reservation=reserved.reservation, blocks=None, now=0.0)
    one = np.ones(1, bool)
    digest = np.zeros((1, 16), np.uint8)
    done = core.finish_commit(committing, digests=digest, ok=one, lease=False, keep_open=False, now=0.0)
    if 1 in tiers:
        land(core, core.persist(done.blocks, now=0.0))
    if 0 not in tiers:
        core.evict(done.blocks, tier=0, now=0.0)


def land(core: Core, plan: Plan) -> None:
    """Lets every transfer succeed."""
    if len(plan.transfers):
        core.finish(plan.transfers["id"], statuses=np.ones(len(plan.transfers), np.uint16), now=0.0)


@given(group_lists())
def test_a_lookup_finds_what_the_definition_says(groups):
    """A lookup returns the most tokens for which every group and rank holds all needed blocks."""
    core, queries = filled(groups)
    found = core.lookup(queries, 1.0)
    assert found.tokens == definition(groups)
    for group, tier_of in zip(groups, found.tier_of, strict=True):
        assert tier_of.tolist() == [[min(tiers, default=-1) for tiers in rank] for rank in group.held]


@given(group_lists())
def test_a_lease_holds_what_is_needed_and_no_more(groups):
    """acquire and settle serve lookup's tokens with exactly the needed blocks, in the right
    tier."""
    core, queries = filled(groups)
    tokens = definition(groups)
    acquired = core.acquire(SESSION, groups=queries, kind=TierKind.HOST, now=1.0)
    assert acquired.tokens == tokens
    assert acquired.whole
    assert bool(acquired.lease) == bool(tokens)
    if not tokens:
        return
    land(core, acquired.plan)
    served = core.settle(acquired.lease, now=1.0)
    assert served.tokens == tokens
    for number, (group, given_blocks) in enumerate(zip(groups, served.groups, strict=True)):
        needed = group.needed(tokens)
        assert needed is not None
        assert list(range(given_blocks.first, given_blocks.first + given_blocks.count)) == needed
        assert given_blocks.extents.shape == given_blocks.blocks.shape == (len(group.held), len(needed))
        assert (given_blocks.extents["tier"] == 0).all()
        assert given_blocks.tokens.tolist() == [group.end(i) - i * group.size for i in needed]
        for rank, blocks in enumerate(given_blocks.blocks.tolist()):
            names = hashes(number, group.blocks)
            expected = [core.find_block(namespace(number, rank), names[i].tobytes()) for i in needed]
            assert blocks == expected
    core.check()


@given(group_lists())
def test_asking_for_less_changes_nothing_of_the_rest(groups):
    """All groups together never get more than each alone; a group asked twice gets the same."""
    core, queries = filled(groups)
    together = core.lookup(queries, 1.0).tokens
    assert all(together <= core.lookup([query], 1.0).tokens for query in queries)
    assert core.lookup([queries[0], queries[0]], 1.0).tokens == core.lookup(queries[:1], 1.0).tokens
