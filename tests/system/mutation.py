"""Almost correct messages and records: a seeded mutator that knows their structure.

A mutation changes one field, so the message still parses and reaches the handler. `Mutator.mutated`
counts the changed fields by name. A run that never changed a field has not fuzzed it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tierd.core.formats.model import COMMIT_BLOCK, HASH_BYTES, PUT_BLOCK

HASH = np.dtype([("hash", "u1", (HASH_BYTES,))])
RECORDS = {
    "PutGroup.blocks": PUT_BLOCK,
    "CommitGroup.blocks": COMMIT_BLOCK,
    "Group.hashes": HASH,
    "PutGroup.parent": HASH,
    "ReportAttentionRequest.mass": np.dtype([("mass", "<f4")]),
}
"""Record types packed into bytes fields."""

NUMBERS = (0, 1, 2, 3, 15, 16, 17, 255, 4095, 4097, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
DOUBLES = (0.0, -0.0, -1.0, 0.001, 1e308, 5e-324, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    "\0",
    "é" * 40,
    "A" * 5000,
    "../../etc/passwd",
    "{root}",
    "0",
    "-",
    "host.0",
    "nvme.9",
    "\N{GRINNING FACE}",
)
WIDTHS = {
    FieldDescriptor.TYPE_UINT32: (0, 1 << 32),
    FieldDescriptor.TYPE_FIXED32: (0, 1 << 32),
    FieldDescriptor.TYPE_UINT64: (0, 1 << 64),
    FieldDescriptor.TYPE_FIXED64: (0, 1 << 64),
    FieldDescriptor.TYPE_INT32: (-(1 << 31), 1 << 31),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), 1 << 63),
    FieldDescriptor.TYPE_ENUM: (-(1 << 31), 1 << 31),
}
Path = tuple[FieldDescriptor, ...]


def name_of(field: FieldDescriptor) -> str:
    """A field's name, such as `Group.hashes`."""
    return f"{field.containing_type.name}.{field.name}"


def paths(message: Descriptor) -> list[Path]:
    """Every field of a message, nested ones too."""
    found: list[Path] = []
    for field in message.fields:
        found.append((field,))
        if field.message_type is not None:
            found += [(field, *rest) for rest in paths(field.message_type)]
    return found


def names(message: Descriptor) -> set[str]:
    """Every name that `Mutator.mutated` can count for a message, with the columns of packed records."""
    fields = {name_of(path[-1]) for path in paths(message)}
    packed = [(name, RECORDS[name].names or ()) for name in fields if name in RECORDS]
    return fields | {f"{name}[{column}]" for name, columns in packed for column in columns}


class Mutator:
    """random: the only source of chance, so that a seed gives the same messages again."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(str(seed))
        self.mutated: Counter[str] = Counter()

    # -- protobuf

    def message(self, message: Message) -> None:
        """Changes one to three fields, in place."""
        choices = paths(message.DESCRIPTOR)
        for path in self.random.choices(choices, k=self.random.choice((0, 0, 0, 1, 2))) if choices else ():
            self._along(message, path)
        if choices:
            self._along(message, self.rarest(choices, key=lambda path: name_of(path[-1])))

    def rarest(self, choices: Sequence[Any], *, key: Callable[[Any], str]) -> Any:
        """Half of the time the least mutated choice, so that the run mutates every choice."""
        if self.random.random() < 0.5:
            return self.random.choice(choices)
        return min(choices, key=lambda choice: self.mutated[key(choice)])

    def _along(self, message: Any, path: Path) -> None:
        for field in path[:-1]:
            held = getattr(message, field.name)
            message = (self.random.choice(held) if len(held) else held.add()) if field.is_repeated else held
        self._field(message, path[-1])

    def _field(self, message: Any, field: FieldDescriptor) -> None:
        self.mutated[name_of(field)] += 1
        if field.is_repeated:
            self._repeated(message, field)
        elif field.message_type is not None:
            message.ClearField(field.name) if self.random.random() < 0.5 else getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, self._value(field, getattr(message, field.name)))

    def _repeated(self, message: Any, field: FieldDescriptor) -> None:
        held, most = getattr(message, field.name), 70
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            held.clear()
        elif not len(held) or self.random.random() < 0.4:
            kept = [] if not len(held) or self.random.random() < 0.3 else [self.random.choice(held)]
            kept = kept * self.random.choice((1, 2, most))
            message.ClearField(field.name)
            getattr(message, field.name).extend(kept or self._elements(field))
        elif field.message_type is None:
            at = self.random.randrange(len(held))
            held[at] = self._value(field, held[at])
        else:
            del held[self.random.randrange(len(held)) :]

    def _elements(self, field: FieldDescriptor) -> list[Any]:
        if field.message_type is not None:
            return [field.message_type._concrete_class()] if self.random.random() < 0.5 else []
        return [self._value(field, field.default_value or _zero(field))] * self.random.choice((0, 1, 3))

    def _value(self, field: FieldDescriptor, value: Any) -> Any:
        if field.type == FieldDescriptor.TYPE_BOOL:
            return not value
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return self.random.choice(DOUBLES)
        if field.type == FieldDescriptor.TYPE_STRING:
            return self.text(value)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._packed(name_of(field), value)
        low, high = WIDTHS[field.type]
        return self.number(value, low=low, high=high)

    # -- values

    def number(self, value: int, *, low: int = 0, high: int = 1 << 64) -> int:
        """Another number in [low, high): a border, a neighbour, a flipped bit, or any number."""
        made = self.random.choice((
            lambda: self.random.choice(NUMBERS),
            lambda: value + self.random.choice((-1, 1)),
            lambda: value ^ 1 << self.random.randrange(64),
            lambda: self.random.getrandbits(64),
            lambda: self.random.randrange(100),
        ))()  # fmt: skip
        return low + (made - low) % (high - low)

    def text(self, value: str) -> str:
        """Another string."""
        made: list[Callable[[], str]] = [
            lambda: self.random.choice(TEXTS),
            lambda: value[:-1],
            lambda: value + "0",
            value.upper,
            lambda: value * 40,
            lambda: value[: len(value) // 2] + chr(self.random.randrange(1, 0x500)) + value[len(value) // 2 :],
        ]
        return self.random.choice(made)()

    def data(self, value: bytes) -> bytes:
        """Other bytes: cut, longer, doubled, with flipped bits, or random."""
        made: list[Callable[[], bytes]] = [
            lambda: b"",
            lambda: value[: self.random.randrange(len(value) + 1)],
            lambda: value[:-1],
            lambda: value + self.random.randbytes(self.random.choice((1, 8, 32))),
            lambda: value * self.random.choice((2, 40)),
            lambda: self.random.randbytes(len(value)),
            lambda: self._flipped(value),
            lambda: self._flipped(self._flipped(value)),
        ]
        return self.random.choice(made)()

    def column(self, records: np.ndarray, name: str) -> None:
        """Changes one column of one row, in place."""
        row, width = self.random.randrange(len(records)), records[name].dtype.itemsize
        cell = records[name][row : row + 1].view(np.uint8).reshape(-1)
        changed = self.number(int.from_bytes(cell.tobytes()[:8], "little")).to_bytes(8, "little")
        size = min(width, 8) if records[name].ndim == 1 else min(len(cell), 8)
        cell[:size] = np.frombuffer(changed[:size], dtype=np.uint8)
        if self.random.random() < 0.2:
            cell[:] = 0

    def _packed(self, name: str, value: bytes) -> bytes:
        dtype = RECORDS.get(name)
        if dtype is None or len(value) < dtype.itemsize or len(value) % dtype.itemsize:
            return self.data(value)
        if all(self.mutated[f"{name}[{column}]"] for column in dtype.names or ()) and self.random.random() < 0.5:
            return self.data(value)
        records = np.frombuffer(value, dtype=dtype).copy()
        column = self.rarest(dtype.names or (), key=lambda column: f"{name}[{column}]")
        self.mutated[f"{name}[{column}]"] += 1
        self.column(records, column)
        return records.tobytes()

    def _flipped(self, value: bytes) -> bytes:
        if not value:
            return b"\x01"
        changed = bytearray(value)
        changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    # -- msgpack

    def mapping(self, message: dict[str, Any]) -> dict[Any, Any]:
        """A map with one field changed, missing or added. `mutated` counts the change as `op.field`."""
        changed: dict[Any, Any] = dict(message)
        fields = [key for key in message if key != "op"]
        if not fields or self.random.random() < 0.1:
            changed[self.random.choice(("extra", "", 5, b"k", "op "))] = self.thing(0)
        key = "op" if self.random.random() < (0.1 if fields else 0.15) else self.random.choice(fields or ["extra"])
        self.mutated[f"{message['op']}.{key}"] += 1
        if self.random.random() < 0.15:
            changed.pop(key, None)
        else:
            changed[key] = self.thing(message.get(key, 0))
        return changed

    def thing(self, value: Any) -> Any:
        """Another value: mostly of the same type."""
        if self.random.random() < 0.3:
            return self.random.choice(
                (None, True, False, -1, 1.5, math.nan, "", "x", b"x", [], [1], {}, {"a": [1]}, [[]], [None], ["1"])
            )
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return self.number(
                value,
                low=-(1 << 63) if self.random.random() < 0.2 else 0,
                high=1 << 63 if self.random.random() < 0.2 else 1 << 64,
            )
        if isinstance(value, list):
            return [self.thing(each) for each in value] + [self.number(0)] * self.random.choice((0, 1, 300))
        return self.text(str(value))[:3000]


def _zero(field: FieldDescriptor) -> Any:
    return {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}.get(field.type, 0)
