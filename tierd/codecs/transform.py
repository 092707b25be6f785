"""Codec transform: the values of a token decorrelated, rounded with one step, and entropy coded.

Keys are turned back by RoPE first, as their position is known. Values of one token over all layers
are one row, or several groups for large models. A calibration has the basis, the steps and the
tables (transform_fit.py). Rounding is plain: a wider zero would shrink keys, and blur sharp
attention.

    values -> rows -> y = (x - mean) forward^T -> q = rint(y / step) -> symbols, low bits, escapes

Payload: index of the step (uint8), 3 zeros, number of escapes and length of the rANS stream
(uint32 each). Then the stream, the low bits, and the escapes (int16).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import rans
from tierd.codecs.block import Context, Lengths, Payload
from tierd.codecs.calibration import Calibration
from tierd.codecs.rope import rotate
from tierd.codecs.transform_fit import CENTRE, ESCAPE, TARGETS, WIDTH, Choice, group_width, grouped, symbols_of
from tierd.codecs.values import Bytes, Floats, KVShape, Raw, floats_of, rounded
from tierd.errors import CorruptRecord, Unsupported

HEAD = np.dtype([("level", "u1"), ("zero", "V3"), ("escapes", "<u4"), ("stream", "<u4")])
FARTHEST = 32767
"""Multiples of the step beyond it cannot be encoded; such blocks are kept as they are."""
UNIT = 2.0**-24
"""Of float32: the largest relative error of one operation."""


class Plan(NamedTuple):
    """How a level is coded. ranks: per group. tables, shifts: of the kept coefficients of all groups."""

    step: np.float32
    ranks: list[int]
    tables: NDArray[np.uint8]
    shifts: NDArray[np.uint8]


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
        values = floats_of(raw, shape.geometry.dtype)
        values[:, 0] = rotate(values[:, 0], context.position, found["frequencies_of_rope"], undo=True)
        rows = grouped(values, found["mean"].shape[1]) - found["mean"][:, None]
        parts = [
            np.rint(forward[:rank] @ x.T * (1 / plan.step))
            for forward, x, rank in zip(found["forward"], rows, plan.ranks, strict=True)
        ]
        q = np.concatenate(parts)
        if not np.abs(q).max() <= FARTHEST:
            return Payload(np.empty(0, np.uint8), np.inf)
        return self.written(q.astype(np.int16), rows, plan, found)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        found = _tensors(context.calibration, shape, self.name)
        layers, _, tokens, heads, dim = shape.sizes
        q, plan = self.read(payload, tokens, found)
        values = np.empty((tokens, len(found["mean"]), found["mean"].shape[1]), np.float32)
        first = 0
        for g, rank in enumerate(plan.ranks):
            values[:, g] = _restored(q[first : first + rank].astype(np.float32), plan, found, g)
            first += rank
        values += found["mean"]
        whole = np.ascontiguousarray(values.reshape(tokens, layers, 2, heads, dim).transpose(1, 2, 0, 3, 4))
        whole[:, 0] = rotate(whole[:, 0], context.position, found["frequencies_of_rope"])
        return rounded(whole, shape.geometry.dtype)

    def written(self, q: NDArray[np.int16], rows: Floats, plan: Plan, found: dict[str, Any]) -> Payload:
        """The payload of q, [coefficients, tokens], rounded from rows."""
        return Payload(_packed(q, plan, int(found["levels"][self.profile]), found), _error(rows, q, plan, found))

    def read(self, payload: Bytes, tokens: int, found: dict[str, Any]) -> tuple[NDArray[np.int32], Plan]:
        """The multiples of a payload, and their plan. Raises CorruptRecord."""
        return _unpacked(payload, tokens, found)


def _restored(q: Floats, plan: Plan, found: dict[str, Any], group: int) -> Floats:
    """Rows without their mean, [tokens, n], of q: [rank, tokens]."""
    restored: Floats = (q * plan.step).T @ found["inverse"][group, : len(q)]
    return restored


def _error(rows: Floats, whole: NDArray[Any], plan: Plan, found: dict[str, Any]) -> float:
    """The largest error of a value after RoPE, whatever the order of sums. whole: [coefficients, tokens].

    A turn of two channels makes an error at most sqrt(2) times as large. Sums of r products of
    float32 are off by r units of the product of their lengths, on either side.
    """
    largest, slack = 0.0, 0.0
    parts = np.split(whole.astype(np.float32), np.cumsum(plan.ranks)[:-1])
    for g, (x, q) in enumerate(zip(rows, parts, strict=True)):
        inverse = found["inverse"][g, : len(q)]
        largest = max(largest, float(np.abs(x - _restored(q, plan, found, g)).max()))
        longest = float(np.sqrt(np.einsum("rt,rt->t", q, q).max())) * float(plan.step)
        widest = float(np.sqrt(np.einsum("rn,rn->n", inverse, inverse).max()))
        slack = max(slack, 2 * (len(q) + 8) * UNIT * longest * widest)
    top = float(np.abs(rows).max() + np.abs(found["mean"]).max())
    return float(np.sqrt(2.0)) * (largest + slack + 16 * UNIT * top)


def _packed(q: NDArray[np.int16], plan: Plan, level: int, found: dict[str, Any]) -> Bytes:
    """The payload of q: [coefficients, tokens]."""
    high = q >> plan.shifts[:, None]
    symbols = symbols_of(high).astype(np.uint8)
    symbols[found["frequencies"][plan.tables[:, None], symbols] == 0] = ESCAPE
    is_far = symbols == ESCAPE
    stream = rans.encode(symbols.reshape(-1), found["frequencies"], plan.tables, q.shape[1])
    escapes = high[is_far]
    head = np.zeros(1, HEAD)
    head[0] = (level, b"", len(escapes), len(stream))
    planes = [(q[plan.shifts > bit] >> bit & 1).astype(np.uint8).reshape(-1) for bit in range(int(plan.shifts.max()))]
    low = np.packbits(np.concatenate(planes), bitorder="little") if planes else np.empty(0, np.uint8)
    return np.concatenate((head.view(np.uint8), stream, low, escapes.astype("<i2").view(np.uint8)))


def _unpacked(payload: Bytes, tokens: int, found: dict[str, Any]) -> tuple[NDArray[np.int32], Plan]:
    """q: [coefficients, tokens]. Raises CorruptRecord."""
    head = payload[: HEAD.itemsize].view(HEAD)[0]
    plan = _plan(found, int(head["level"]))
    low_bits = int(plan.shifts.sum()) * tokens
    ends = np.cumsum([HEAD.itemsize, int(head["stream"]), -(-low_bits // 8), 2 * int(head["escapes"])])
    if ends[-1] != len(payload):
        raise CorruptRecord(
            f"codec transform: {len(payload)} bytes are not the {ends[-1]} of its parts; read another copy"
        )
    stream, low, escapes = (payload[a:b] for a, b in itertools.pairwise(ends))
    count = len(plan.tables) * tokens
    symbols = rans.decode(stream, np.empty(count, np.uint8), found["frequencies"], plan.tables, tokens).reshape(
        -1, tokens
    )
    q = symbols.astype(np.int32) - CENTRE
    is_far = symbols == ESCAPE
    if np.count_nonzero(is_far) != head["escapes"]:
        raise CorruptRecord(
            f"codec transform: {head['escapes']} escapes are not those of its symbols; read another copy"
        )
    q[is_far] = np.frombuffer(escapes.tobytes(), "<i2")
    bits = np.unpackbits(low, count=low_bits, bitorder="little")
    q <<= plan.shifts[:, None]
    first = 0
    for bit in range(int(plan.shifts.max())):
        has = np.flatnonzero(plan.shifts > bit)
        q[has] |= bits[first : first + len(has) * tokens].reshape(-1, tokens).astype(np.int32) << bit
        first += len(has) * tokens
    return q, plan


def _plan(found: dict[str, Any], level: int) -> Plan:
    choice = Choice(found["choices"], found["shifts"], found["ranks"])
    each = [choice.of(level, group) for group in range(len(found["mean"]))]
    tables, shifts = (np.concatenate(parts) for parts in zip(*each, strict=True))
    return Plan(found["steps"][level], [len(chosen.tables) for chosen in each], tables, shifts)


NAMES = ("mean", "forward", "inverse", "steps", "frequencies", "choices", "shifts", "ranks", "levels")


def _tensors(calibration: Calibration | None, shape: KVShape, name: str) -> dict[str, Any]:
    """Raises Unsupported for a calibration that was not made for this codec."""
    assert calibration is not None
    found = {each: tensor for each in NAMES if (tensor := calibration.tensors.get(f"transform.{each}")) is not None}
    missing = [each for each in NAMES if each not in found]
    if missing or found["mean"].shape[1] != group_width(shape.geometry):
        raise Unsupported(
            f"codec {name}: calibration {calibration.hash.hex()} has no {' '.join(missing) or 'groups of this width'}; "
            "make it again with `tierctl calibrate`"
        )
    return found | {"frequencies_of_rope": calibration.frequencies}
