"""Holdings over a real table of holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tierd.cache import holdings
from tierd.cache.holdings import Holdings
from tierd.core.formats.model import EXTENT
from tierd.errors import Overloaded
from tierd.tiers.arena.holds import HoldKind, HoldTable


def pages(count: int, *, first: int) -> np.ndarray:
    out = np.zeros(count, EXTENT)
    out["generation"] = np.arange(first, first + count)
    return out


def test_what_is_recorded_together_is_dropped_apart(tmp_path: Path) -> None:
    """Reservations that are recorded in one call have rows of their own, and are dropped one by one."""
    table = HoldTable(tmp_path / "holds")
    table.open()
    held = Holdings(table)
    held.add(1 << 20, HoldKind.RESERVATION, {7: pages(3, first=1), 8: pages(2, first=4)})
    assert table.count == 5
    held.drop((1 << 20, HoldKind.RESERVATION, 7))
    assert table.count == 2
    held.drop((1 << 20, HoldKind.RESERVATION, 8), only=np.asarray([1]))
    assert table.count == 1
    held.drop((1 << 20, HoldKind.RESERVATION, 8))
    assert table.count == 0


def test_all_or_none_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If several leases would exceed the limit, none is recorded."""
    monkeypatch.setattr(holdings, "HOLDS_LIMIT", 3)
    table = HoldTable(tmp_path / "holds")
    table.open()
    held = Holdings(table)
    held.add(1 << 20, HoldKind.LEASE, {1: pages(1, first=1), 2: pages(1, first=2)})
    with pytest.raises(Overloaded, match="session"):
        held.add(1 << 20, HoldKind.LEASE, {3: pages(1, first=3), 4: pages(1, first=4)})
    assert table.count == 2
    held.add(1 << 20, HoldKind.LEASE, {5: pages(1, first=5)})
    assert held.is_full(1 << 20)


def test_pages_of_what_is_held_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds count by their pages until they are dropped. A single lease is never too long."""
    monkeypatch.setattr(holdings, "HELD_PAGES_LIMIT", 8)
    table = HoldTable(tmp_path / "holds")
    table.open()
    held, session = Holdings(table), 1 << 20
    held.add(session, HoldKind.LEASE, {1: pages(20, first=1)})
    with pytest.raises(Overloaded, match="with 20 pages"):
        held.add(session, HoldKind.LEASE, {2: pages(1, first=21)})
    held.drop_leases(session, [1])
    held.add(session, HoldKind.RESERVATION, {3: pages(6, first=1)})
    assert held.is_full(session, pages=3) and not held.is_full(session, pages=2)
    held.drop((session, HoldKind.RESERVATION, 3), only=np.arange(4))
    assert held.is_full(session, pages=7) and not held.is_full(session, pages=6)
    held.drop((session, HoldKind.RESERVATION, 3))
    assert not held.is_full(session, pages=9)
    assert table.count == 0
