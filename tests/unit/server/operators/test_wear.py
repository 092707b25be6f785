"""Counts of written bytes: saved, read again, and converted to days of life."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierd.config import NvmeConfig
from tierd.server.instance import sealed
from tierd.server.operators.wear import Count, life_of, read_counts, records_of
from tierd.tiers.drives.drives import Drive
from tierd.tiers.drives.smart import Smart

DAY_S = 86400


def drive(used: int, hours: int | None = 24_000) -> Drive:
    return Drive("/dev/nvme0n1", smart=Smart(used, power_on_hours=hours))


def test_counts_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Saved counts are read back by the store's directory."""
    counts = {"/a b": Count(10, 20_000, 3, -7.5), "/c": Count(1 << 60)}
    path = tmp_path / "wear.jsonl"
    path.write_bytes(b"".join(sealed(record) + b"\n" for record in records_of(counts)))
    assert read_counts(path) == counts
    assert read_counts(tmp_path / "none") == {}


@pytest.mark.parametrize("damage", [b"{}", b"nonsense", b'{"path":"/a"}', b"[1]", b"", b"\xff\xfe"])
def test_a_damaged_line_costs_its_own_count_alone(tmp_path: Path, damage: bytes) -> None:
    """A damaged line loses only its own count."""
    path = tmp_path / "wear.jsonl"
    good = [sealed(record) for record in records_of({"/a": Count(10), "/b": Count(20)})]
    path.write_bytes(b"\n".join((good[0], damage, good[1])))
    assert {place: count.written_bytes for place, count in read_counts(path).items()} == {"/a": 10, "/b": 20}


def test_a_changed_number_is_not_believed(tmp_path: Path) -> None:
    """A count with a wrong checksum is dropped."""
    path = tmp_path / "wear.jsonl"
    path.write_bytes(sealed(next(records_of({"/a": Count(10)}))).replace(b":10,", b":11,"))
    assert read_counts(path) == {}


def test_life_is_the_drives_own_word_where_it_gives_one() -> None:
    """25 % used in 1,000 days give 3,000 more; the shortest life counts; a worn-out drive has 0."""
    life = life_of([drive(25), drive(10)], NvmeConfig(endurance_tbw=1.0), written_bytes=0, rate_bytes_per_s=1.0)
    assert life.days == pytest.approx(3000) and "25 %" in life.basis
    assert life_of([drive(120)], NvmeConfig(), written_bytes=0, rate_bytes_per_s=0.0).days == 0


@pytest.mark.parametrize("silent", [[], [Drive("/dev/sda")], [drive(0)], [drive(3, None)]])
def test_life_is_else_the_rating_and_our_rate(silent: list[Drive]) -> None:
    """Without the drive's own figure, life is the rest of the rating at the present rate, at least 0."""
    rated = NvmeConfig(endurance_tbw=10.0)
    life = life_of(silent, rated, written_bytes=4 * 10**12, rate_bytes_per_s=1e6)
    assert life.days == pytest.approx(6e12 / 1e6 / DAY_S) and "rated" in life.basis
    assert life_of(silent, rated, written_bytes=11 * 10**12, rate_bytes_per_s=1e6).days == 0
    assert life_of(silent, rated, written_bytes=0, rate_bytes_per_s=0.0).days is None
    unknown = life_of(silent, NvmeConfig(), written_bytes=0, rate_bytes_per_s=1e6)
    assert unknown.days is None and "endurance_dwpd" in unknown.basis
