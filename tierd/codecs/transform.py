"""Codec transform: the values of a token decorrelated, rounded with one step, and entropy coded.

Keys are turned back by RoPE first, as their position is known. Values of one token over all layers
are one row, or several groups for large models. A calibration has the basis, the steps and the
tables (transform_fit.py). Rounding is plain: a wider zero would shrink keys, and blur sharp
attention.

    values -> rows -> y = (x - mean) forward^T -> q = rint(y / step) -> symbols, low bits, escapes
      rows.py            product.py                                       multiples.py

Payload: index of the step (uint8), 3 zeros, number of escapes and length of the rANS stream
(uint32 each). Then the stream, the low bits, and the escapes (int16).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tierd.codecs import loops, rans
from tierd.codecs.block import Context, Lengths, Payload, room_for_raw
from tierd.codecs.calibration import Calibration
from tierd.codecs.multiples import MOST_SHIFT, SYMBOLS, Coding, Split, join, known_of, low_bytes, split
from tierd.codecs.product import UNIT, Basis, Multiples, Place, has_tiles
from tierd.codecs.rows import Origin, empty_rows, packed, raw_of_rows, rows_of
from tierd.codecs.transform_fit import TABLES, TARGETS, WIDTH, Choice, group_width
from tierd.codecs.values import Bytes, Floats, KVShape, Raw
from tierd.errors import CorruptRecord, Unsupported

HEAD = np.dtype([("level", "u1"), ("zero", "V3"), ("escapes", "<u4"), ("stream", "<u4")])


class Plan(NamedTuple):
    """How a level is coded. ranks: per group. coding: of the kept coefficients of all groups."""

    step: np.float32
    ranks: list[int]
    coding: Coding


@dataclass(frozen=True, slots=True)
class Transform:
    """profile: index into the calibration's levels. Any level can be decoded."""

    number: int
    name: str
    profile: int
    version: int = 1
    is_exact: bool = False
    is_calibrated: bool = True

    def check(self, shape: KVShape) -> None:
        """Raises Unsupported for heads wider than a basis."""
        if shape.geometry.head_dim > WIDTH:
            raise Unsupported(f"codec {self.name}: head_dim {shape.geometry.head_dim} is above {WIDTH}; use int8")

    def lengths(self, shape: KVShape) -> Lengths:
        """Below the block's own length: longer payloads are not kept."""
        return Lengths(HEAD.itemsize, max(HEAD.itemsize, shape.block_bytes))

    def expected_bytes(self, shape: KVShape) -> int:
        """The target, a third more for text unlike the calibration's, and a stream's fixed parts."""
        return int(shape.values * TARGETS[self.profile] / 6) + 512

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        found = _tensors(context.calibration, shape, self.name)
        plan = _plan(found, int(found["levels"][self.profile]))
        rows = rows_of(raw, shape, _origin(found, context))
        parts = []
        for basis, x, rank in zip(found["bases"], rows, plan.ranks, strict=True):
            q = basis.multiples(x, rank, plan.step)
            if q is None:
                return Payload(np.empty(0, np.uint8), np.inf)
            parts.append(q)
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self.written(whole, rows, plan, found)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        found = _tensors(context.calibration, shape, self.name)
        q, plan = self.read(payload, shape.tokens, found)
        return _raw(q, plan, found, shape, _origin(found, context))

    def written(self, q: Multiples, rows: Floats, plan: Plan, found: dict[str, Any]) -> Payload:
        """The payload of q, [coefficients, tokens], rounded from rows."""
        return Payload(_packed(q, plan, int(found["levels"][self.profile]), found), _error(rows, q, plan, found))

    def read(self, payload: Bytes, tokens: int, found: dict[str, Any]) -> tuple[Multiples, Plan]:
        """The multiples of a payload, and their plan. Raises CorruptRecord."""
        return _unpacked(payload, tokens, found)


def _parts(q: Multiples, plan: Plan) -> list[Multiples]:
    """The multiples of each group."""
    return np.split(q, np.cumsum(plan.ranks)[:-1])


def _raw(q: Multiples, plan: Plan, found: dict[str, Any], shape: KVShape, origin: Origin) -> Raw:
    """The block of q: [coefficients, tokens]."""
    width, dim = origin.mean.shape[1], shape.geometry.head_dim
    if has_tiles() and dim % 32 == 0:
        raw, turns = room_for_raw(shape, Context(out=origin.out)), packed(shape, origin, undo=False)
        for g, (basis, part) in enumerate(zip(found["bases"], _parts(q, plan), strict=True)):
            basis.put(part, plan.step, Place(loops.described(raw, shape), turns.data, g * width, dim))
        return raw
    rows = empty_rows(shape, width)
    for g, part in enumerate(_parts(q, plan)):
        _restored(part, plan, found, g, rows[g])
    return raw_of_rows(rows, shape, origin)


def _origin(found: dict[str, Any], context: Context) -> Origin:
    return Origin(found["mean"], context.position, found["frequencies_of_rope"], context.out)


def _restored(q: Multiples, plan: Plan, found: dict[str, Any], group: int, to: Floats | None = None) -> Floats:
    """Rows without their mean, [tokens, n], of q: [rank, tokens]. to: their place, contiguous."""
    basis: Basis = found["bases"][group]
    return basis.values(q, plan.step, to)


def _error(rows: Floats, whole: Multiples, plan: Plan, found: dict[str, Any]) -> float:
    """The largest error of a value after RoPE, whatever the order of sums. whole: [coefficients, tokens].

    A turn of two channels makes an error at most sqrt(2) times as large.
    """
    parts = zip(found["bases"], _parts(whole, plan), rows, strict=True)
    offs = [basis.off(q, plan.step, x) for basis, q, x in parts]
    worst: float = max(off.largest + off.slack for off in offs)
    top: float = max(off.top for off in offs) + float(np.abs(found["mean"]).max())
    return math.sqrt(2) * (worst + 16 * UNIT * top)


def _packed(q: Multiples, plan: Plan, level: int, found: dict[str, Any]) -> Bytes:
    """The payload of q: [coefficients, tokens]."""
    symbols, low, escapes = split(q, plan.coding)
    stream = rans.encode(symbols.reshape(-1), found["frequencies"], plan.coding.tables, q.shape[1])
    head = np.zeros(1, HEAD)
    head[0] = (level, b"", len(escapes), len(stream))
    return np.concatenate((head.view(np.uint8), stream, low, escapes.astype("<i2").view(np.uint8)))


def _unpacked(payload: Bytes, tokens: int, found: dict[str, Any]) -> tuple[Multiples, Plan]:
    """q: [coefficients, tokens]. Raises CorruptRecord."""
    head = payload[: HEAD.itemsize].view(HEAD)[0]
    plan = _plan(found, int(head["level"]))
    ends = np.cumsum([HEAD.itemsize, int(head["stream"]), low_bytes(plan.coding, tokens), 2 * int(head["escapes"])])
    if ends[-1] != len(payload):
        raise CorruptRecord(
            f"codec transform: {len(payload)} bytes are not the {ends[-1]} of its parts; read another copy"
        )
    stream, low, escapes = (payload[a:b] for a, b in itertools.pairwise(ends))
    tables = plan.coding.tables
    symbols = loops.scratch("symbols", len(tables) * tokens)
    symbols = rans.decode(stream, symbols, found["frequencies"], tables, tokens).reshape(-1, tokens)
    return join(Split(symbols, low, np.frombuffer(escapes.tobytes(), "<i2")), plan.coding), plan


def _plan(found: dict[str, Any], level: int) -> Plan:
    """Made once per level."""
    made: Plan | None = found["plans"].get(level)
    if made is None:
        choice = Choice(found["choices"], found["shifts"], found["ranks"])
        each = [choice.of(level, group) for group in range(len(found["mean"]))]
        tables, shifts = (np.concatenate(parts) for parts in zip(*each, strict=True))
        coding = Coding(tables, shifts, found["known"])
        made = found["plans"][level] = Plan(found["steps"][level], [len(chosen.tables) for chosen in each], coding)
    return made


NAMES = ("mean", "forward", "inverse", "steps", "frequencies", "choices", "shifts", "ranks", "levels")


def _tensors(calibration: Calibration | None, shape: KVShape, name: str) -> dict[str, Any]:
    """The tensors by name, and what is made of them once: `bases`, `known` and `plans`.

    Raises Unsupported for a calibration that was not made for this codec.
    """
    assert calibration is not None
    made: dict[str, Any] | None = calibration.derived.get("transform")
    if made is not None:
        return made
    found: dict[str, Any] = {
        each: tensor for each in NAMES if (tensor := calibration.tensors.get(f"transform.{each}")) is not None
    }
    missing = [each for each in NAMES if each not in found]
    if missing or found["mean"].shape[1] != group_width(shape.geometry):
        raise Unsupported(
            f"codec {name}: calibration {calibration.hash.hex()} has no {' '.join(missing) or 'groups of this width'}; "
            "make it again with `tierctl calibrate`"
        )
    _check(found, calibration, shape, name)
    found["bases"] = [Basis(*pair) for pair in zip(found["forward"], found["inverse"], strict=True)]
    found["known"] = known_of(found["frequencies"])
    found |= {"plans": {}, "frequencies_of_rope": calibration.frequencies}
    calibration.derived["transform"] = found
    return found


def _check(found: dict[str, Any], calibration: Calibration, shape: KVShape, name: str) -> None:
    """Raises Unsupported for tensors of other types or sizes: C++ reads them without a look."""
    groups, n = found["mean"].shape
    coefficients = found["forward"].shape[1]
    sizes = (found["forward"].shape, found["inverse"].shape, found["choices"].shape, found["shifts"].shape)
    rows = len(found["ranks"])
    whole = ((groups, coefficients, n),) * 2 + ((rows, groups, coefficients),) * 2
    types = (found["forward"].dtype, found["inverse"].dtype)
    if (
        sizes != whole
        or types != (np.uint16, np.uint16)
        or not 0 < found["ranks"].min() <= found["ranks"].max() <= coefficients
        or found["shifts"].max() > MOST_SHIFT
        or found["frequencies"].shape[1:] != (SYMBOLS,)
        or not found["choices"].max() < len(found["frequencies"]) <= TABLES
        or 2 * len(calibration.frequencies) > shape.geometry.head_dim
    ):
        raise Unsupported(
            f"codec {name}: calibration {calibration.hash.hex()} has tensors of other sizes or types; make it again "
            "with `tierctl calibrate`"
        )
