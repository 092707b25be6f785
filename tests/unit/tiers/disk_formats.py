"""One small file of every format that the daemon reads back, its decoder and its fields.

Tests damage these files. `decode` reads bytes as a start of the daemon does, and its results can be
compared. It may raise a TierdError; any other error is a bug.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import numpy as np
import pytest

from tests.system.mutation import Mutator
from tests.unit.tiers.store_world import LENGTH, extents_of, metas_of, segment, spec, tables_of
from tierd.config import read_config, resolve
from tierd.core.formats.block import NamespaceSpec
from tierd.core.formats.layout import CATALOGUE_HEADER, HEADER_BYTES
from tierd.core.formats.meta import META
from tierd.core.index import namespaces as core_namespaces
from tierd.core.index.namespaces import NamespaceRegistry, namespace_from_record
from tierd.server.instance import Instance
from tierd.server.session.identity import load_rules
from tierd.tiers.arena import catalogue, holds, marks
from tierd.tiers.io import format_check
from tierd.tiers.io.files import OS
from tierd.tiers.store import journal, slots, snapshot, store_files
from tierd.tiers.store.journal import BlocksRemoved, BlocksStored, Journal, NamespaceKept, SegmentBegun, journal_path
from tierd.tiers.store.recovery import load_index
from tierd.tiers.store.snapshot import snapshot_path, write_snapshot
from tierd.tiers.store.stored_index import StoredIndex, replay, select

STORE = bytes(range(16))
KEYS = (5, 6, 7)
EXTENTS = extents_of(1, [0, 2, 5], generation=9)
Region = tuple[str, int, np.dtype[Any]]
"""Name, offset and fields of a record within a file."""


@dataclass(frozen=True)
class Format:
    """data: a good file. change: another way to damage it than by regions; fields: the changes to cover."""

    name: str
    data: bytes
    decode: Callable[[bytes], object]
    regions: list[Region] = field(default_factory=list)
    change: Callable[[Mutator, bytes], bytes] | None = None
    fields: frozenset[str] = frozenset()

    def expected(self) -> set[str]:
        """The keys of `Mutator.mutated` once every field was changed."""
        columns = {f"{name}.{column}" for name, _, dtype in self.regions for column in dtype.names or ()}
        return columns | self.fields

    def damage(self, mutator: Mutator) -> bytes:
        """The file with something changed."""
        chance = mutator.random.random()
        if self.change is not None and chance < 0.85:
            return self.change(mutator, self.data)
        if self.regions and chance < 0.85:
            return _column_changed(self, mutator)
        return mutator.data(self.data)


def _column_changed(given: Format, mutator: Mutator) -> bytes:
    pairs = [(region, column) for region in given.regions for column in region[2].names or ()]
    (name, offset, dtype), column = mutator.rarest(pairs, key=lambda pair: f"{pair[0][0]}.{pair[1]}")
    mutator.mutated[f"{name}.{column}"] += 1
    data = bytearray(given.data)
    records = np.frombuffer(data, dtype=dtype, count=1, offset=offset)
    mutator.column(records, column)
    return bytes(data)


def checksums_off(patch: pytest.MonkeyPatch) -> None:
    """From now on every checksum matches, on writes and on reads."""
    for module in (journal, snapshot, slots, catalogue, marks, holds, format_check):
        patch.setattr(module, "record_checksum", lambda _data: 7)
    patch.setattr(slots, "table_digests", lambda tables: np.full((len(tables), 16), 7, np.uint8))
    patch.setattr(catalogue, "table_digests", lambda tables: np.full((len(tables), 16), 7, dtype=np.uint8))
    patch.setattr(holds, "_check", lambda words: np.full(len(words), 7, dtype=np.uint64))
    patch.setattr(core_namespaces, "namespace_digest", lambda _spec, *, tenant, epoch: bytes(32))


def placed() -> np.ndarray:
    """META of the blocks of KEYS in their slots, sealed."""
    return slots.stamp(metas_of(KEYS), EXTENTS, tables_of(KEYS), store=STORE)


def index() -> StoredIndex:
    """Two segments, the blocks of KEYS, two namespaces."""
    segments = {0: SegmentBegun(0, 1, 1, 64 << 10, 8), 2: SegmentBegun(2, 4, 1, 64 << 10, 8)}
    return StoredIndex(segments, placed(), [b"one", b"two"], 77, 1 << 50)


def formats(directory: Path) -> list[Format]:
    """Every format; the makers write files below `directory`."""
    return [make(directory) for make in MAKERS.values()]


# -- the store


def _records() -> list[Any]:
    removed = np.array([(1, 0, 2 * (64 << 10))], dtype=journal.REMOVED)
    begun = [SegmentBegun(0, 1, 1, 64 << 10, 8), SegmentBegun(1, 2, 1, 64 << 10, 8)]
    return [journal.Marks(5, 1 << 40), *begun, BlocksStored(placed()), NamespaceKept(b"ns"), BlocksRemoved(removed)]


def _fits(begun: SegmentBegun) -> bool:
    return begun.place < 4 and begun.pages * begun.class_bytes <= spec().segment_bytes


def journal_record(_directory: Path) -> Format:
    """The payload of a journal frame."""
    payloads = [journal.encode_record(record) for record in _records()]

    def change(mutator: Mutator, _data: bytes) -> bytes:
        kind, *fields = msgpack.unpackb(mutator.random.choice(payloads))
        at = mutator.random.randrange(len(fields) + 1)
        mutator.mutated[f"record.{kind}{at}"] += 1
        if at == len(fields):
            return bytes(msgpack.packb([mutator.thing(kind), *fields]))
        fields[at] = mutator.data(fields[at]) if isinstance(fields[at], bytes) else mutator.thing(fields[at])
        return bytes(msgpack.packb([kind, *fields]))

    def decode(payload: bytes) -> object:
        record = journal.decode_record(payload)
        return record if record is None else select(replay(index(), [record]), within=_fits)

    names = frozenset(
        f"record.{kind}{at}" for kind, *fields in map(msgpack.unpackb, payloads) for at in range(len(fields) + 1)
    )
    return Format("journal record", payloads[3], decode, change=change, fields=names)


FRAME = np.dtype([("length", "<u8"), ("checksum", "<u8")])
JOURNAL_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("reserved", "<u4"),
        ("store", "u1", (16,)),
        ("number", "<u8"),
        ("checksum", "<u8"),
    ]
)


def journal_file(directory: Path) -> Format:
    """A journal, read as a start does."""
    home = _made(directory / "journal")
    Journal.create(home, store=STORE, number=4, first=_records()).close()
    path = journal_path(home, 4)
    data, regions = path.read_bytes(), [("header", 0, JOURNAL_HEADER)]
    at = JOURNAL_HEADER.itemsize
    while at < len(data):
        regions.append(("frame", at, FRAME))
        at += FRAME.itemsize + int.from_bytes(data[at : at + 8], "little")
    metas = placed()
    regions += [("meta", data.index(metas[i].tobytes()), META) for i in range(len(metas))]
    return Format("journal", data, lambda changed: _loaded(path, changed), regions)


def snapshot_file(directory: Path) -> Format:
    """A snapshot, read as a start does."""
    home = _made(directory / "snapshot")
    write_snapshot(home, index(), store=STORE, number=3)
    path = snapshot_path(home, 3)
    data, regions = path.read_bytes(), [("header", 0, snapshot.HEADER)]
    regions += [("segment", snapshot.HEADER.itemsize + i * snapshot.SEGMENT.itemsize, snapshot.SEGMENT) for i in (0, 1)]
    regions += [("meta", len(data) - (i + 1) * META.itemsize, META) for i in range(len(KEYS))]
    return Format("snapshot", data, lambda changed: _loaded(path, changed), regions)


def _loaded(path: Path, data: bytes) -> StoredIndex:
    path.write_bytes(data)
    loaded = load_index(path.parent, store=STORE)
    for damaged in path.parent.glob("*.damaged"):
        damaged.unlink()
    return store_files._fitting(loaded, spec(), set())[0]


def slot_header(_directory: Path) -> Format:
    """The 4 KiB before a payload."""
    headers = np.zeros((len(KEYS), slots.HEADER_BYTES), dtype=np.uint8)
    slots.fill_headers(headers, range(len(headers)), placed(), tables_of(KEYS))

    def decode(data: bytes) -> object:
        row = np.frombuffer(data[: slots.HEADER_BYTES].ljust(slots.HEADER_BYTES, b"\0"), dtype=np.uint8).reshape(1, -1)
        metas, found = slots.read_tables(row)
        return slots.matches(metas, metas_of(KEYS[:1]), EXTENTS[:1], store=STORE)[0] and found[0] is not None

    return Format("slot header", headers[0].tobytes(), decode, [("meta", 0, META)])


def store_json(directory: Path) -> Format:
    """The store's own description."""
    path = _made(directory / "store") / "store.json"
    store_files._store_id(path.parent, OS, [])

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        format_check.check_versions(path.parent)
        return store_files._store_id(path.parent, OS, [])

    return Format("store.json", path.read_bytes(), decode, change=_json_changed, fields=_names("format", "store"))


# -- the arena


def catalogue_file(directory: Path) -> Format:
    """The catalogue of a segment of eight pages, three of them in use."""
    path, given = directory / "1.cat", segment(1)
    made = catalogue.Catalogue.create(path, head=catalogue.CatalogueHead(STORE, 512 << 10, given))
    made.allocate(path)
    where = EXTENTS["slot"].astype(np.uint32)
    made.stamp(where, EXTENTS["generation"])
    metas = metas_of(KEYS)
    metas["generation"] = EXTENTS["generation"]
    made.publish(where, metas=metas, slices=[table[:5] for table in tables_of(KEYS)])
    layout = made.layout
    regions = [("header", 0, CATALOGUE_HEADER), ("generation", HEADER_BYTES, np.dtype([("word", "<u8")]))]
    regions += [("meta", layout.meta_offset + int(slot) * META.itemsize, META) for slot in where]
    del made

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        found = catalogue.Catalogue.open(path)
        survivors = found.survivors()
        found.find_tables(survivors.slots, survivors.metas["generation"])
        return survivors.slots.tolist(), survivors.metas.tobytes()

    return Format("catalogue", path.read_bytes(), decode, regions)


def arena_table(directory: Path) -> Format:
    """`arena.tbl`."""
    path = directory / "arena.tbl"
    made = marks.Marks(path)
    made.use_segment(5)
    made.use_generation(900)
    del made

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        found = marks.Marks(path)
        found.use_generation(found.next_generation)
        found.use_segment(found.next_segment)
        return found.store

    return Format("arena.tbl", path.read_bytes(), decode, [("header", 0, marks.ARENA_HEADER)])


def session_table(directory: Path) -> Format:
    """`sessions.tbl` with two sessions and their pages."""
    path = directory / "sessions.tbl"
    made = holds.HoldTable(path)
    _open_small(made)
    for session in (3, 4):
        made.add_holder(holds.Holder(session, 1, 5, holds.read_boot_id(), 1000, 1, "tenant"))
        made.append(session, EXTENTS, kind=holds.HoldKind(session - 2))
    made.close(release=False)
    used = holds._ROWS_AT + holds.HOLD.itemsize * 8
    data = path.read_bytes()
    regions = [("header", 0, holds.TABLE_HEADER)]
    regions += [("holder", 4096 + i * holds.HOLDER.itemsize, holds.HOLDER) for i in (0, 1)]
    first = _first_used(data)
    regions += [("hold", first + i * holds.HOLD.itemsize, holds.HOLD) for i in range(-2, 1)]

    def decode(changed: bytes) -> object:
        _overwrite(path, changed)
        found, faults = holds.HoldTable(path), list[str]()
        former = _open_small(found, distrust=faults.append)
        told = [(f.holder.session, f.leased.tobytes(), f.reserved.tobytes()) for f in former]
        found.close(release=False)
        return faults or sorted(told)

    return Format("sessions.tbl", data[: max(used, first + holds.HOLD.itemsize)], decode, regions)


def _open_small(table: holds.HoldTable, **options: Any) -> list[holds.FormerHolder]:
    """Opens it with few rows: a table of 16,384 takes ten times as long to read."""
    with mock.patch.object(holds, "_FIRST_ROWS", 64):
        return table.open(**options)


def _overwrite(path: Path, data: bytes) -> None:
    """Like `write_bytes`, but reuses the pages that the file has."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        assert os.pwrite(fd, data, 0) == len(data)
        os.truncate(fd, len(data))
    finally:
        os.close(fd)


def _first_used(data: bytes) -> int:
    """Offset of the last row in use: the table assigns rows from the first on."""
    count = (len(data) - holds._ROWS_AT) // holds.HOLD.itemsize
    rows = np.frombuffer(data, dtype=holds.HOLD, count=count, offset=holds._ROWS_AT)
    return int(holds._ROWS_AT + np.flatnonzero(rows["kind"])[-1] * holds.HOLD.itemsize)


LOG_RECORD = np.dtype([("length", "<u4"), ("zero", "<u4"), ("checksum", "<u8")])


def namespace_log(directory: Path) -> Format:
    """`namespaces.log`."""
    path = directory / "namespaces.log"
    for record in (_namespace_record(), b"two"):
        marks.append_record(path, record)
    data = path.read_bytes()
    second = len(data) - 3 - LOG_RECORD.itemsize

    def decode(changed: bytes) -> object:
        path.write_bytes(changed)
        return marks.read_records(path)

    return Format("namespaces.log", data, decode, [("record", 0, LOG_RECORD), ("record", second, LOG_RECORD)])


# -- the instance


def _namespace_record() -> bytes:
    registry = NamespaceRegistry()
    registry.open(NamespaceSpec(model="m", tokens_per_block=16, block_bytes=LENGTH, rank_count=2), tenant="t")
    return registry.records()[0]


def namespace_record(_directory: Path) -> Format:
    """The text of a namespace."""

    def decode(data: bytes) -> object:
        registry = NamespaceRegistry()
        registry.restore([data])
        namespace = namespace_from_record(data)
        return [list(namespace.ids)[:2], registry.records(), registry.current(model="m")]

    names = _names("id", "tenant", "domain", "epoch", "digest", "spec")
    return Format("namespace record", _namespace_record(), decode, change=_json_changed, fields=names)


def namespaces_file(directory: Path) -> Format:
    """`namespaces.jsonl`, as an instance restores it."""
    instance = Instance(str(directory / "state"))
    path = instance.directory / "namespaces.jsonl"

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        registry = NamespaceRegistry()
        instance.restore_namespaces(registry)
        return registry.records()

    def change(mutator: Mutator, data: bytes) -> bytes:
        return b"\n".join([_json_changed(mutator, _namespace_record()), data])

    return Format("namespaces.jsonl", _namespace_record() + b"\n", decode, change=change, fields=_names("id", "spec"))


CONFIG = """\
[server]
runtime_dir = "/tmp/x"
state_dir = "/tmp/y"
queue_limit = 64
call_timeout = "30 s"
[identity]
tenants = { "1000" = "team" }
[[host]]
capacity = "32 MiB"
segment = "2 MiB"
verify = "always"
high_watermark = 0.95
[[nvme]]
path = "/tmp/z"
capacity = "64 MiB"
segment = "auto"
"""


def config_file(_directory: Path) -> Format:
    """The configuration."""
    lines = CONFIG.splitlines()

    def change(mutator: Mutator, _data: bytes) -> bytes:
        at = mutator.random.randrange(len(lines))
        mutator.mutated[f"config.{at}"] += 1
        key, equals, value = lines[at].partition(" = ")
        odd = (
            '"x"',
            "-1",
            "0",
            "nan",
            "1e400",
            '"1 EiB"',
            '"\\u0000"',
            "[]",
            "{}",
            "true",
            "99999999999999999999",
            '"-5 s"',
        )
        value = mutator.random.choice((*odd, mutator.text(value), mutator.text(value)))
        key = mutator.text(key) if mutator.random.random() < 0.2 else key
        return "\n".join([*lines[:at], key + (equals or "") + (value if equals else ""), *lines[at + 1 :]]).encode()

    def decode(data: bytes) -> object:
        return resolve(read_config(data.decode(errors="replace")), environ={})

    return Format(
        "config", CONFIG.encode(), decode, change=change, fields=frozenset(f"config.{i}" for i in range(len(lines)))
    )


def credential_file(directory: Path) -> Format:
    """The credentials of tenants."""
    path = directory / "credentials"

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        return load_rules({}, str(path))

    return Format("credentials", b"one 0123456789abcdef0\n# two\ntwo abcdefabcdefabcdef # x\n", decode)


MAKERS: dict[str, Callable[[Path], Format]] = {
    "journal record": journal_record,
    "journal": journal_file,
    "snapshot": snapshot_file,
    "slot header": slot_header,
    "store.json": store_json,
    "catalogue": catalogue_file,
    "arena.tbl": arena_table,
    "sessions.tbl": session_table,
    "namespaces.log": namespace_log,
    "namespace record": namespace_record,
    "namespaces.jsonl": namespaces_file,
    "config": config_file,
    "credentials": credential_file,
}


def bits(data: bytes) -> Iterator[tuple[int, int]]:
    """Every bit of a file: offset and mask."""
    return itertools.product(range(len(data)), (1 << i for i in range(8)))


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def _names(*names: str) -> frozenset[str]:
    return frozenset(f"json.{name}" for name in names)


def _json_changed(mutator: Mutator, data: bytes) -> bytes:
    described = json.loads(data)
    key = mutator.rarest(sorted(described), key=lambda key: f"json.{key}")
    mutator.mutated[f"json.{key}"] += 1
    if isinstance(described[key], dict) and mutator.random.random() < 0.8:
        within = mutator.random.choice(sorted(described[key]))
        described[key][within] = mutator.thing(described[key][within])
    elif mutator.random.random() < 0.2:
        del described[key]
    else:
        described[key] = mutator.thing(described[key])
    return json.dumps(described, default=repr).encode(errors="surrogatepass")
