"""Untidy calls: blocks twice in one call, several ranks and chains, circular parents, priorities.

Purpose: rules of the core's machine. Non-purpose: rules of the daemon and operators. With any
stated parents keys name bytes, and the model's promises hold.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from core_clients import Clients, Entry, Lease, chains, depths, kinds, picks
from core_world import DEPTH, Chain
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tierd.core.formats.model import PRIORITY_LIMIT, TierKind
from tierd.core.plan import PutQuery

words = st.one_of(st.none(), st.tuples(st.integers(0, PRIORITY_LIMIT), st.integers(0, 20)))
"""Priority and retention in seconds, or nothing."""
parts = st.lists(st.tuples(chains, depths, depths, st.booleans(), words), min_size=1, max_size=3)
"""Of a put: chain, first block, further blocks, whether the chain is circular, words."""


class Tangles(Clients):
    """See the module."""

    def ranks(self, session: int, which: int) -> list[Chain]:
        """One chain in both namespaces of the session's domain: two ranks."""
        first, second = self.namespaces[self.model.sessions[session]]
        tidy = self.any_chain(session, 0, which)
        assert tidy.namespace == first
        return [tidy, tidy.of_rank(second)]

    @rule(who=picks, what=parts, is_doubled=st.booleans(), kind=kinds, lease=st.booleans())
    def put_tangled(
        self,
        who: int,
        what: list[tuple[int, int, int, bool, tuple[int, int] | None]],
        is_doubled: bool,
        kind: TierKind,
        lease: bool,
    ) -> None:
        """As `reserve_tangled`, with a commit of all blocks at once."""
        older = set(self.reservations)
        self.reserve_tangled(who, what, private=False, is_doubled=is_doubled, kind=kind)
        for number in self.reservations.keys() - older:
            able = [i for i, made in self.reservations.items() if made.idle]
            self.begin_commit(able.index(number), (1 << 20) - 1)
            self.finish_commit(len(self.commits) - 1, good=True, lease=lease, keep_open=False)

    @rule(who=picks, what=parts, private=st.booleans(), is_doubled=st.booleans(), kind=kinds)
    def reserve_tangled(
        self,
        who: int,
        what: list[tuple[int, int, int, bool, tuple[int, int] | None]],
        private: bool,
        is_doubled: bool,
        kind: TierKind,
    ) -> None:
        """Reserves both ranks of some parts of chains; blocks may repeat, within one group too."""
        session, kind = self.any_session(who), self.kind_here(kind, who)
        queries, groups = list[PutQuery](), list[list[Entry]]()
        for which, begin, more, is_circle, said in what:
            first = min(begin, DEPTH - 1)
            numbers = list(range(first, min(DEPTH, first + 1 + more))) * (2 if is_doubled else 1)
            for rank in self.ranks(session, which):
                entries = [Entry(rank, number, rank.parent(number)) for number in numbers]
                if is_circle:
                    entries[0].parent = rank.hashes[numbers[-1]]
                for entry, before in zip(entries[1:], entries[:-1], strict=True):
                    entry.parent = before.key[1]  # a put that reserves by name implies this parent
                queries.append(self.put_query(entries, private=private, said=said))
                groups.append(entries)
        answer = self.core.reserve(session, groups=queries, kind=kind, now=self.tick())
        self.apply(answer.plan)
        self.take_reserved(session, groups, answer, private=private, kind=kind)

    def put_query(self, entries: list[Entry], *, private: bool, said: tuple[int, int] | None) -> PutQuery:
        rank, rows = entries[0].chain, [entry.number for entry in entries]
        whole = rank.put(0, DEPTH, private=private)
        query = replace(whole, parent=entries[0].parent, position=rows[0], blocks=whole.blocks[rows])
        if said is None:
            return query
        priority, seconds = said
        return replace(
            query,
            priorities=np.full(len(rows), priority, np.uint8),
            retention_s=np.full(len(rows), seconds, np.uint32),
        )

    @rule(who=picks, asked=st.lists(chains, min_size=1, max_size=3), are_ranks=st.booleans(), kind=kinds)
    def acquire_tangled(self, who: int, asked: list[int], are_ranks: bool, kind: TierKind) -> None:
        """Acquires several chains in one call, each of one rank or two; chains may repeat."""
        session = self.any_session(who)
        wanted = [self.ranks(session, which)[: 1 + are_ranks] for which in asked]
        groups = [replace(ranks[0].group(), namespaces=tuple(rank.namespace for rank in ranks)) for ranks in wanted]
        most = self.core.lookup(groups, self.now).tokens
        answer = self.core.acquire(session, groups=groups, kind=self.kind_here(kind, who), now=self.tick())
        assert answer.tokens <= most
        assert answer.tokens == most or not answer.whole
        self.apply(answer.plan)
        assert bool(answer.lease) == bool(answer.tokens)
        if answer.lease:
            self.leases[answer.lease] = Lease(session, wanted, answer.tokens)
