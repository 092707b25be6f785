"""The ring of samples."""

from __future__ import annotations

import json

import pytest

from tierd.metrics import Metrics
from tierd.page import history
from tierd.page.history import History


@pytest.fixture
def counted() -> tuple[Metrics, History]:
    metrics = Metrics()
    return metrics, History(metrics, tiers=["host.0", "nvme.0"], started=0.0)


def rows_of(found: History, number: int) -> list[dict[str, float]]:
    return [dict(zip(found.columns, row, strict=True)) for row in json.loads(found.since(number))]


def test_a_row_has_the_totals_of_the_metrics(counted: tuple[Metrics, History]) -> None:
    """Each column holds its metric's total; all misses are in some column, those of new reasons too."""
    metrics, ring = counted
    metrics.tokens_hit.labels(tier="nvme.0").inc(512)
    metrics.tokens_missed.labels(reason="busy").inc(7)
    metrics.tokens_missed.labels(reason="of tomorrow").inc(5)
    metrics.bytes.labels(link="host.0>nvme.0").inc(100)
    metrics.bytes.labels(link="nvme.0>host.0").inc(40)
    metrics.tier_bytes.labels(tier="host.0", state="used").set(4096)
    metrics.tier_bytes.labels(tier="host.0", state="free").set(9)
    metrics.freed.labels(tier="host.0", reason="demoted").inc(2)
    metrics.freed.labels(tier="host.0", reason="evicted").inc(3)
    metrics.freed.labels(tier="host.0", reason="aborted").inc(90)
    metrics.queue_depth.labels(queue="transfers").set(6)
    metrics.sessions.labels(state="open").set(2)
    ring.sample()
    (row,) = rows_of(ring, 0)
    expected = {
        "hit:host.0": 0,
        "hit:nvme.0": 512,
        "missed:busy": 7,
        "missed:absent": 0,
        "missed:other": 5,
        "read:host.0": 100,
        "written:host.0": 40,
        "read:nvme.0": 40,
        "written:nvme.0": 100,
        "used:host.0": 4096,
        "evicted:host.0": 5,
        "transfers": 6,
        "sessions": 2,
    }
    assert {name: row[name] for name in expected} == expected


def test_a_reader_gets_the_rows_that_it_lacks(counted: tuple[Metrics, History]) -> None:
    """A reader gets the samples after its last one, all that are left if it is far behind, and none
    if it is ahead."""
    metrics, ring = counted
    for _ in range(4):
        metrics.lookups.inc()
        ring.sample()
    assert [row["lookups"] for row in rows_of(ring, 0)] == [1, 2, 3, 4]
    assert [row["lookups"] for row in rows_of(ring, 3)] == [4]
    assert rows_of(ring, 4) == rows_of(ring, 99) == []


def test_the_ring_is_bounded(counted: tuple[Metrics, History], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest row falls out of a full ring, and an hour takes less than the stated memory."""
    monkeypatch.setattr(history, "SAMPLES", 3)
    metrics = counted[0]
    ring = History(metrics, tiers=["host.0", "nvme.0"], started=0.0)
    for _ in range(5):
        metrics.lookups.inc()
        ring.sample()
    assert [row["lookups"] for row in rows_of(ring, 0)] == [3, 4, 5]
    assert [row["lookups"] for row in rows_of(ring, 1)] == [3, 4, 5]
    assert ring.size_bytes < 3 * 220
