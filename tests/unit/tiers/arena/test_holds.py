"""The session table."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierd.checksum import record_checksum
from tierd.core.formats.model import EXTENT, StructArray
from tierd.core.formats.versions import SESSIONS
from tierd.errors import InvalidArgument, Overloaded, TierFailed, VersionMismatch
from tierd.server.session.peers import find_start_time
from tierd.tiers.arena import holds
from tierd.tiers.arena.holds import Holder, HoldKind, HoldTable, read_boot_id


def holder(session: int, **changes: object) -> Holder:
    start = find_start_time(os.getpid())
    assert start is not None
    given = Holder(session, os.getpid(), start, read_boot_id(), 1000, 3, "tenant-ä")
    return replace(given, **changes)  # type: ignore[arg-type]


def extents(*generations: int) -> StructArray:
    rows = np.zeros(len(generations), dtype=EXTENT)
    rows["generation"] = generations
    rows["tier"], rows["segment"], rows["length"], rows["page"] = 1, 7, 9000, -1
    rows["slot"] = np.arange(len(rows))
    rows["offset"] = np.arange(len(rows)) * 16384
    return rows


def opened(path: Path, *sessions: int) -> HoldTable:
    table = HoldTable(path)
    table.open()
    for session in sessions:
        table.add_holder(holder(session))
    return table


def held(path: Path, *, is_damaged: bool = False) -> dict[int, tuple[list[int], list[int]]]:
    """A new daemon's view: session -> generations leased and reserved. is_damaged: it must get one
    warning that rows may be missing."""
    faults: list[str] = []
    found = {
        f.holder.session: (sorted(f.leased["generation"].tolist()), sorted(f.reserved["generation"].tolist()))
        for f in HoldTable(path).open(distrust=faults.append)
    }
    assert len(faults) == is_damaged, faults
    assert HoldTable(path).open(distrust=faults.append) is not None
    assert len(faults) == is_damaged, "said once"
    return found


def test_new_daemon_learns_who_holds_what(tmp_path: Path) -> None:
    """Holders come back with every field, and their pages as extents, separated by kind."""
    table = opened(tmp_path / "s.tbl", 5, 6)
    table.append(5, extents(10, 11), kind=HoldKind.LEASE)
    table.append(5, extents(12), kind=HoldKind.RESERVATION)
    five, six = HoldTable(tmp_path / "s.tbl").open()
    assert five.holder == holder(5) and six.holder == holder(6)
    assert np.array_equal(np.sort(five.leased, order="generation"), extents(10, 11))
    assert five.reserved["generation"].tolist() == [12] and not len(six.leased)
    assert (tmp_path / "s.tbl").stat().st_mode & 0o777 == 0o600


def test_erased_rows_are_gone_and_used_again(tmp_path: Path) -> None:
    """A released lease is gone, a second erase is no error, and other holds reuse the rows."""
    table = opened(tmp_path / "s.tbl", 5)
    first = table.append(5, extents(10, 11), kind=HoldKind.LEASE)
    table.append(5, extents(12), kind=HoldKind.LEASE)
    table.erase(first)
    table.erase(first)
    assert table.count == 1 and held(tmp_path / "s.tbl") == {5: ([12], [])}
    assert set(table.append(5, extents(13, 14), kind=HoldKind.LEASE).tolist()) == set(first.tolist())


def test_former_rows_serve_the_new_lease(tmp_path: Path) -> None:
    """A start's rows can be erased like later ones, and new rows do not overwrite them."""
    opened(tmp_path / "s.tbl", 5).append(5, extents(10, 11), kind=HoldKind.LEASE)
    table = HoldTable(tmp_path / "s.tbl")
    (former,) = table.open()
    table.append(5, extents(*range(20, 60)), kind=HoldKind.RESERVATION)
    assert held(tmp_path / "s.tbl") == {5: ([10, 11], list(range(20, 60)))}
    table.erase(former.leased_rows)
    assert held(tmp_path / "s.tbl") == {5: ([], list(range(20, 60)))}


def test_dropped_holder_takes_its_rows_along(tmp_path: Path) -> None:
    """When a process is gone, its session and all its rows are dropped, and no other."""
    table = opened(tmp_path / "s.tbl", 5, 6)
    rows = table.append(5, extents(10, 11), kind=HoldKind.LEASE)
    table.append(6, extents(12), kind=HoldKind.LEASE)
    table.drop_holder(5)
    table.drop_holder(5)
    table.erase(rows)
    assert table.count == 1 and held(tmp_path / "s.tbl") == {6: ([12], [])}


def test_table_grows_and_keeps_its_rows(tmp_path: Path) -> None:
    """The table holds any number of pages, and a grown table is read back whole."""
    table = opened(tmp_path / "s.tbl", 5)
    table.append(5, extents(*range(1, 10_001)), kind=HoldKind.LEASE)
    table.append(5, extents(*range(10_001, 60_001)), kind=HoldKind.LEASE)
    assert held(tmp_path / "s.tbl")[5][0] == list(range(1, 60_001))


def test_table_that_cannot_grow_refuses_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for another row the call fails, and earlier rows stay."""
    table = opened(tmp_path / "s.tbl", 5)
    table.append(5, extents(1), kind=HoldKind.LEASE)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierFailed, match="No space left"):
        table.append(5, extents(*range(2, 20_000)), kind=HoldKind.LEASE)
    monkeypatch.undo()
    assert table.count == 1 and held(tmp_path / "s.tbl") == {5: ([1], [])}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["lease", "reserve", "erase", "end", "restart"]), st.integers(0, 2)), max_size=25
    )
)
def test_table_is_what_a_dict_would_be(tmp_path: Path, steps: list[tuple[str, int]]) -> None:
    """After any history, restarts included, the table holds exactly the rows appended and not erased."""
    path = tmp_path / "s.tbl"
    path.unlink(missing_ok=True)
    table, model, rows, number = opened(path, 0, 1, 2), {s: (set[int](), set[int]()) for s in range(3)}, {}, 1
    for step, session in steps:
        if step in ("lease", "reserve") and session in model:
            kind = HoldKind.LEASE if step == "lease" else HoldKind.RESERVATION
            rows[number] = (session, kind, table.append(session, extents(number, number + 1), kind=kind))
            model[session][kind - 1].update((number, number + 1))
            number += 2
        elif step == "erase" and rows:
            first = min(rows)
            owner, kind, numbers = rows.pop(first)
            table.erase(numbers)
            model[owner][kind - 1].difference_update((first, first + 1))
        elif step == "end" and session in model:
            table.drop_holder(session)
            del model[session]
            rows = {n: r for n, r in rows.items() if r[0] != session}
        elif step == "restart":
            table = HoldTable(path)
            table.open()
    assert held(path) == {s: (sorted(a), sorted(b)) for s, (a, b) in model.items()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 48 * 8 - 1))
def test_damaged_row_is_dropped_alone(tmp_path: Path, bit: int) -> None:
    """A row with any bit flipped is dropped alone, with a warning that rows may be missing."""
    path = tmp_path / "s.tbl"
    path.unlink(missing_ok=True)
    rows = opened(path, 5).append(5, extents(10, 11, 12), kind=HoldKind.LEASE)
    raw = bytearray(path.read_bytes())
    raw[holds._ROWS_AT + int(rows[1]) * 48 + bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    assert held(path, is_damaged=True) == {5: ([10, 12], [])}


def test_torn_row_is_absent(tmp_path: Path) -> None:
    """A row whose last word was not yet written, as after a kill, does not count."""
    rows = opened(tmp_path / "s.tbl", 5).append(5, extents(10, 11), kind=HoldKind.LEASE)
    raw = bytearray((tmp_path / "s.tbl").read_bytes())
    at = holds._ROWS_AT + int(rows[0]) * 48
    raw[at + 40 : at + 48] = bytes(8)
    (tmp_path / "s.tbl").write_bytes(raw)
    assert held(tmp_path / "s.tbl") == {5: ([11], [])}


def test_damaged_holder_is_dropped_with_its_rows(tmp_path: Path) -> None:
    """A session with a damaged record is dropped with a warning; others keep their holds."""
    table = opened(tmp_path / "s.tbl", 5, 6)
    table.append(5, extents(10), kind=HoldKind.LEASE)
    table.append(6, extents(11), kind=HoldKind.LEASE)
    raw = bytearray((tmp_path / "s.tbl").read_bytes())
    raw[4096 + 30] ^= 1
    (tmp_path / "s.tbl").write_bytes(raw)
    assert held(tmp_path / "s.tbl", is_damaged=True) == {6: ([11], [])}


def test_lost_holders_are_noticed(tmp_path: Path) -> None:
    """If session records become zeros, their rows have no owner, and a warning says so."""
    opened(tmp_path / "s.tbl", 1 << 40).append(1 << 40, extents(10), kind=HoldKind.LEASE)
    raw = bytearray((tmp_path / "s.tbl").read_bytes())
    raw[4096:8192] = bytes(4096)
    (tmp_path / "s.tbl").write_bytes(raw)
    assert held(tmp_path / "s.tbl", is_damaged=True) == {}


def test_holders_of_another_boot_are_gone(tmp_path: Path) -> None:
    """After a reboot no earlier process can hold a page, even with a reused id."""
    table = opened(tmp_path / "s.tbl", 5)
    table.add_holder(holder(6, boot=bytes(16)))
    table.append(6, extents(10), kind=HoldKind.LEASE)
    assert held(tmp_path / "s.tbl") == {5: ([], [])}


def test_too_many_sessions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table takes sessions up to its limit, and an ended session makes room."""
    monkeypatch.setattr(holds, "HOLDER_LIMIT", 3)
    table = opened(tmp_path / "s.tbl", 1, 2, 3)
    with pytest.raises(Overloaded, match="3"):
        table.add_holder(holder(4))
    table.drop_holder(2)
    table.add_holder(holder(4))
    with pytest.raises(InvalidArgument, match="64"):
        opened(tmp_path / "t.tbl").add_holder(holder(5, tenant="x" * 65))


def test_newer_table_is_refused(tmp_path: Path) -> None:
    """A table of a newer version stops the start and stays unchanged: live clients may hold its pages."""
    opened(tmp_path / "s.tbl", 5).close(release=False)
    raw = bytearray((tmp_path / "s.tbl").read_bytes())
    raw[8] = SESSIONS.current + 1
    raw[16:24] = record_checksum(bytes(raw[:16])).to_bytes(8, "little")
    (tmp_path / "s.tbl").write_bytes(raw)
    with pytest.raises(VersionMismatch):
        HoldTable(tmp_path / "s.tbl").open()
    assert (tmp_path / "s.tbl").read_bytes() == raw


@pytest.mark.parametrize("at", range(24))
def test_damaged_header_is_said_and_replaced(tmp_path: Path, at: int) -> None:
    """With any header byte changed, intact rows are read, a warning appears, the header is rewritten."""
    opened(tmp_path / "s.tbl", 5).append(5, extents(10), kind=HoldKind.LEASE)
    raw = bytearray((tmp_path / "s.tbl").read_bytes())
    raw[at] ^= 0x81
    (tmp_path / "s.tbl").write_bytes(raw)
    assert held(tmp_path / "s.tbl", is_damaged=True) == {5: ([10], [])}


@pytest.mark.parametrize("length", [1, 24, 4096, holds._ROWS_AT - 1])
def test_cut_table_is_said(tmp_path: Path, length: int) -> None:
    """A table that ends before its rows gives a warning that rows may be missing."""
    opened(tmp_path / "s.tbl", 5).append(5, extents(10), kind=HoldKind.LEASE)
    os.truncate(tmp_path / "s.tbl", length)
    held(tmp_path / "s.tbl", is_damaged=True)


def test_released_table_is_removed(tmp_path: Path) -> None:
    """Closing with release removes the file; closing without keeps it."""
    opened(tmp_path / "s.tbl", 5).close(release=False)
    assert held(tmp_path / "s.tbl") == {5: ([], [])}
    opened(tmp_path / "s.tbl").close(release=True)
    assert not (tmp_path / "s.tbl").exists()
