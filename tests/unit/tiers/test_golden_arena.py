"""All versions of BlockMeta and of the arena's files, as in tests/golden/arena.

`python -m tests.unit.tiers.test_golden_arena` rewrites the fixtures; do so only with a new version
number.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.hexed import from_text, to_text
from tests.unit.tiers.store_world import table_digest
from tierd.checksum import record_checksum, slice_sums
from tierd.core.formats.meta import META, intact, new_meta, seal
from tierd.core.formats.model import EXTENT, SegmentAssignment, StructArray
from tierd.tiers.arena import holds
from tierd.tiers.arena.catalogue import Catalogue, CatalogueHead
from tierd.tiers.arena.holds import Holder, HoldKind, HoldTable
from tierd.tiers.arena.marks import Marks, append_record, read_records

GOLDEN = Path(__file__).parents[2] / "golden" / "arena"
STORE = bytes(range(16))
BOOT = bytes(range(16, 32))
HOLDER = Holder(session=5, pid=4321, start_time=987654, boot=BOOT, uid=1000, domain=2, tenant="default")
HEAD = CatalogueHead(STORE, 1 << 20, SegmentAssignment(1, 6, 9, 2, 16384, 5, 77, None, False))
TABLES = [slice_sums(b"tierd", [2, 3]), slice_sums(bytes(8192), [4096, 4096])]


def meta() -> StructArray:
    """Two records, every field set except the reserved ones."""
    rows = new_meta(2)
    rows["hash"], rows["parent"] = np.arange(32), np.arange(32, 64)
    rows["codec"], rows["codec_version"], rows["namespace"], rows["domain"] = 0, 1, 3, 2
    rows["position"], rows["tokens"], rows["epoch"], rows["layers"] = (10, 11), (16, 7), 4, 2
    rows["logical_length"], rows["stored_length"] = (5, 8192), (5, 8192)
    rows["generation"], rows["time_ms"] = (1001, 1002), 1_700_000_000_000
    return rows


def extents() -> StructArray:
    rows = np.zeros(3, dtype=EXTENT)
    rows["tier"], rows["segment"], rows["slot"], rows["length"] = 1, 9, (0, 3, 4), (5, 8192, 100)
    rows["offset"], rows["generation"] = (0, 49152, 65536), (1001, 1002, 1003)
    return rows


# -- writing


def sealed_meta(directory: Path) -> bytes:
    rows = meta()
    rows["store"], rows["segment"], rows["offset"] = np.frombuffer(STORE, dtype=np.uint8), 9, (0, 49152)
    rows["slices"] = [len(t) for t in TABLES]
    rows["digest"] = [np.frombuffer(table_digest(t), dtype=np.uint8) for t in TABLES]
    return seal(rows, record_checksum).tobytes()


def catalogue(directory: Path) -> bytes:
    written = Catalogue.create(directory / "9.cat", head=HEAD)
    written.allocate(directory / "9.cat")
    slots = extents()["slot"]
    written.stamp(slots, extents()["generation"])
    written.publish(slots[:2], metas=meta(), slices=TABLES)
    return (directory / "9.cat").read_bytes()


def arena_table(directory: Path) -> bytes:
    with mock.patch.object(secrets, "token_bytes", return_value=STORE):
        marks = Marks(directory / "arena.tbl")
    marks.use_segment(9)
    marks.use_generation(1003)
    return (directory / "arena.tbl").read_bytes()


def namespace_log(directory: Path) -> bytes:
    for record in (b"first", b"the second"):
        append_record(directory / "namespaces.log", record)
    return (directory / "namespaces.log").read_bytes()


def session_table(directory: Path) -> bytes:
    table = HoldTable(directory / "sessions.tbl")
    table.open()
    table.add_holder(HOLDER)
    table.append(5, extents()[:2], kind=HoldKind.LEASE)
    table.append(5, extents()[2:], kind=HoldKind.RESERVATION)
    return (directory / "sessions.tbl").read_bytes()


WRITERS = {
    "meta-v2": sealed_meta,
    "catalogue-v2": catalogue,
    "arena-v1": arena_table,
    "namespaces-v1": namespace_log,
    "sessions-v1": session_table,
}


# -- fixtures


def golden(name: str) -> bytes:
    return from_text((GOLDEN / f"{name}.hex").read_text())


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file with the golden bytes named by the test's parameter."""
    path = tmp_path / "file"
    path.write_bytes(golden(request.param))
    return path


# -- promises


@pytest.mark.parametrize("name", WRITERS)
def test_the_newest_version_is_written_as_ever(tmp_path: Path, name: str) -> None:
    """Today's code writes the golden bytes; a difference is a new format and needs a new version number."""
    assert to_text(WRITERS[name](tmp_path)) == (GOLDEN / f"{name}.hex").read_text()


@pytest.mark.parametrize("name", ["meta-v1", "meta-v2"])
def test_meta_of_any_version_is_read(name: str) -> None:
    """A sealed record of each version is intact and keeps its fields."""
    rows = np.frombuffer(golden(name), dtype=META)
    assert intact(rows, record_checksum).all()
    for field in (
        "hash",
        "parent",
        "namespace",
        "domain",
        "position",
        "tokens",
        "epoch",
        "generation",
        "time_ms",
        "stored_length",
    ):
        assert np.array_equal(rows[field], meta()[field]), field
    assert not rows["error"].any()


@pytest.mark.parametrize("file", ["catalogue-v1", "catalogue-v2"], indirect=True)
def test_catalogue_of_any_version_is_read(file: Path) -> None:
    """A catalogue of each version gives its header, its blocks and their tables."""
    read = Catalogue.open(file)
    found = read.survivors()
    assert read.head == HEAD and found.slots.tolist() == [0, 3] and found.highest == 1003
    assert found.metas["generation"].tolist() == [1001, 1002]
    tables = read.find_tables(found.slots, found.metas["generation"])
    assert [t.tolist() for t in tables if t is not None] == [t.tolist() for t in TABLES]


@pytest.mark.parametrize("file", ["arena-v1"], indirect=True)
def test_arena_table_of_version_1_is_read(file: Path) -> None:
    """An arena table of version 1 gives the arena's id and marks."""
    marks = Marks(file)
    assert (marks.store, marks.next_segment, marks.next_generation) == (STORE, 10, 1004)


@pytest.mark.parametrize("file", ["namespaces-v1"], indirect=True)
def test_namespace_log_of_version_1_is_read(file: Path) -> None:
    """A namespace log of version 1 gives its records in order."""
    assert read_records(file) == [b"first", b"the second"]


@pytest.mark.parametrize("file", ["sessions-v1"], indirect=True)
def test_session_table_of_version_1_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session table of version 1 gives the holder and its leased and reserved pages."""
    monkeypatch.setattr(holds, "read_boot_id", lambda: BOOT)
    (former,) = HoldTable(file).open()
    assert former.holder == HOLDER
    assert sorted(former.leased["generation"].tolist()) == [1001, 1002] and former.reserved["slot"].tolist() == [4]


if __name__ == "__main__":
    os.umask(0o022)
    for name, write in WRITERS.items():
        with tempfile.TemporaryDirectory() as scratch:
            (GOLDEN / f"{name}.hex").write_text(to_text(write(Path(scratch))))
