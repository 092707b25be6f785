"""Core against a plain model, as in `test_core_machine`, with a device that reads stores directly.

The set of such stores changes. Promise: a block from a store skips the host page exactly if the
device has a direct way at that moment.
"""

from __future__ import annotations

import numpy as np
import pytest
from core_clients import FAILED, chains, picks
from core_world import DEPTH, chain
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from test_core_machine import CoreMachine

from tierd.core.formats.model import TierKind

DEVICE = 0


class DirectMachine(CoreMachine):
    """Clients put blocks, the core moves them to stores, and clients acquire them on the device."""

    @initialize()
    def begin(self) -> None:  # type: ignore[override]
        self.build("all kinds")

    @rule(where=picks, which=chains, stores=st.integers(0, 3), failing=st.booleans())
    def come_from_afar(self, where: int, which: int, stores: int, failing: bool) -> None:
        """Acquires on the device a chain that only stores hold; its transfers then land or fail."""
        who, older = where, set(self.leases)
        self.put(who, where, which, TierKind.HOST)
        self.let_go(older)
        self.send_far(who, where, which)
        self.set_direct(DEVICE, stores)
        before = set(self.model.flights)
        self.acquire(who, where, which, TierKind.DEVICE)
        self.check_ways(before)
        if failing and self.model.flights:
            self.finish(1, which, FAILED)
        self.land_all()
        for number in [i for i in self.leases if i not in older]:
            self.settle([i for i, lease in self.leases.items() if not lease.settled].index(number))
        self.let_go(older)

    def let_go(self, older: set[int]) -> None:
        """Releases every lease but the older ones."""
        for number in [i for i in self.leases if i not in older]:
            self.release(list(self.leases).index(number))

    def send_far(self, who: int, where: int, which: int) -> None:
        """Moves every block of the chain to stores alone, if possible."""
        session = self.any_session(who)
        namespace = self.namespaces[self.model.sessions[session]][where % 2]
        ids = [self.core.find_block(namespace, h) for h in chain(self.world, namespace, which).hashes[:DEPTH]]
        blocks = np.array([block for block in ids if block is not None], np.int64)
        self.apply(self.core.persist(blocks, now=self.tick()))
        self.land_all()
        for tier, spec in enumerate(self.specs):
            if spec.kind < TierKind.NVME:
                self.apply(self.core.evict(blocks, tier=tier, now=self.tick()))

    def check_ways(self, before: set[int]) -> None:
        """Checks that no transfer to the host starts at a store with a direct way to the device."""
        for flight in [f for i, f in self.model.flights.items() if i not in before and f.started]:
            source, target = (self.model.pages[g].tier for g in (flight.source, flight.target))
            if self.specs[source].kind is TierKind.NVME and self.specs[target].kind is TierKind.HOST:
                assert source not in self.model.direct.get(DEVICE, ()), "a detour where there is a direct way"


TestDirect = pytest.mark.timeout(3600)(DirectMachine.TestCase)
