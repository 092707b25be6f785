"""Codec layered: the multiples of codec transform in two parts, of which the first can be decoded alone.

A multiple q of a coefficient without low bits is 3c + r, with r of -1, 0 or 1. The coarse part has c,
the refinement r. With low bits, the refinement has the lowest one. Tables of c are sums of
transform's frequencies, and tables of r are the shares in such a sum. So both parts together take as
many bits as transform (embedded quantisation: Taubman and Marcellin, JPEG2000, section 3.3).

    q -> c -> transform's payload with tables of c          the prefix, read alone: layered-2-coarse
      -> r -> rANS stream, then lowest bits                 the refinement

A coarse value is the mean of its cell, by the table's frequencies, in multiples of half a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import rans, transform
from tierd.codecs.block import FRONT, Lengths, Payload, Prefix
from tierd.codecs.rans import Frequencies
from tierd.codecs.transform import HEAD, Plan, Transform, _error, _packed, _plan, _unpacked
from tierd.codecs.transform_fit import CENTRE, ESCAPE, SYMBOLS, TARGETS
from tierd.codecs.values import Bytes, Floats, KVShape
from tierd.errors import CorruptRecord

CELL = 3
"""Multiples of a cell. It is odd, so that a cell has a middle; ESCAPE is a multiple of it."""
CELLS = ESCAPE // CELL
FARTHEST = transform.FARTHEST // 2
"""Multiples beyond it cannot be encoded: coarse values are in half steps."""
SHARE = 64
"""Weight of a frequency in a table of r, against 1 for each r, that may be an escape of transform."""
Multiples = NDArray[Any]
"""Integers [coefficients, tokens]."""


class Layers(NamedTuple):
    """coarse: the tensors of transform, for c. refined: tables of r, [tables * (CELLS + 1), CELL]; the last
    of a table is for all c without a cell. middles: of cells in half steps, [tables, CELLS]."""

    coarse: dict[str, Any]
    refined: Frequencies
    middles: NDArray[np.int32]


def layers_of(found: dict[str, Any]) -> Layers:
    """What follows from the tensors of transform, in integers alone."""
    frequencies = found["frequencies"].astype(np.int64)
    tables = len(frequencies)
    cells = frequencies[:, :ESCAPE].reshape(tables, CELLS, CELL)
    sums = cells.sum(axis=2)
    coarse = np.zeros((2 * tables, SYMBOLS), np.uint16)
    coarse[:tables] = found["frequencies"]
    first = CENTRE - CELLS // 2
    coarse[tables:, first : first + CELLS], coarse[tables:, ESCAPE] = sums, frequencies[:, ESCAPE]
    each = np.concatenate((SHARE * cells + 1, np.ones((tables, 1, CELL), np.int64)), axis=1)
    multiples = np.arange(-CENTRE, CENTRE + 1).reshape(CELLS, CELL)
    middles = np.where(
        sums > 0, (4 * (cells * multiples).sum(axis=2) + sums) // np.maximum(2 * sums, 1), 2 * multiples[:, CELL // 2]
    )
    has_cells = found["shifts"] == 0
    choices = np.where(has_cells, found["choices"] + np.uint8(tables), found["choices"])
    shifts = np.where(has_cells, np.uint8(0), found["shifts"] - np.uint8(1))
    return Layers(
        found | {"frequencies": coarse, "choices": choices, "shifts": shifts},
        rans.frequencies_of(each.reshape(-1, CELL)),
        middles.astype(np.int32),
    )


@dataclass(frozen=True, slots=True)
class Coarse(Transform):
    """The coarse part of Layered as a block of its own, in half steps."""

    def written(self, q: Multiples, rows: Floats, plan: Plan, found: dict[str, Any]) -> Payload:
        """See Transform."""
        if not np.abs(q).max() <= FARTHEST:
            return Payload(np.empty(0, np.uint8), np.inf)
        layers, level = layers_of(found), int(found["levels"][self.profile])
        c = _coarse_of(q, plan)
        data = _packed(c, _plan(layers.coarse, level), level, layers.coarse)
        return Payload(data, _error(rows, _middles(c, plan, layers), _halved(plan), found))

    def read(self, payload: Bytes, tokens: int, found: dict[str, Any]) -> tuple[NDArray[np.int32], Plan]:
        """See Transform."""
        layers = layers_of(found)
        c, plan = _read_coarsely(payload, tokens, found, layers)
        return _near(_middles(c, plan, layers)), _halved(plan)


@dataclass(frozen=True, slots=True)
class Layered(Coarse):
    """The values of transform in the same profile. `prefix.py` reads the coarse part alone."""

    def lengths(self, shape: KVShape) -> Lengths:
        """As transform's, with FRONT."""
        least = FRONT.itemsize + HEAD.itemsize
        return Lengths(least, max(least, shape.block_bytes))

    def written(self, q: Multiples, rows: Floats, plan: Plan, found: dict[str, Any]) -> Payload:
        """See Transform."""
        coarse = Coarse.written(self, q, rows, plan, found)
        if not np.isfinite(coarse.error):
            return coarse
        layers, c = layers_of(found), _coarse_of(q, plan)
        has_cells = plan.shifts == 0
        r = (q[has_cells] + 1 - CELL * c[has_cells]).astype(np.uint8)
        stream = rans.encode(r.reshape(-1), *_tables_of(c[has_cells], plan.tables[has_cells], layers), 1)
        low = np.packbits((q[~has_cells] & 1).astype(np.uint8).reshape(-1), bitorder="little")
        front = np.zeros(FRONT.itemsize, np.uint8)
        prefix = Prefix(len(front) + len(coarse.data), coarse.error)
        return Payload(np.concatenate((front, coarse.data, stream, low)), _error(rows, q, plan, found), prefix=prefix)

    def read(self, payload: Bytes, tokens: int, found: dict[str, Any]) -> tuple[NDArray[np.int32], Plan]:
        """See Transform."""
        length = int(payload[: FRONT.itemsize].view(FRONT)["length"][0])
        if not FRONT.itemsize + HEAD.itemsize <= length <= len(payload):
            raise CorruptRecord(
                f"codec {self.name}: a prefix of {length} bytes in a payload of {len(payload)}; read another copy"
            )
        layers = layers_of(found)
        q, plan = _read_coarsely(payload[FRONT.itemsize : length], tokens, found, layers)
        has_cells = plan.shifts == 0
        c, low_bits = q[has_cells], np.count_nonzero(~has_cells) * tokens
        low_bytes = -(-low_bits // 8)
        if length + low_bytes > len(payload):
            raise CorruptRecord(
                f"codec {self.name}: {len(payload)} bytes have no room for {low_bits} low bits; read another copy"
            )
        cut = len(payload) - low_bytes
        r = rans.decode(
            payload[length:cut], np.empty(c.size, np.uint8), *_tables_of(c, plan.tables[has_cells], layers), 1
        )
        bits = np.unpackbits(payload[cut:], count=low_bits, bitorder="little")
        q[has_cells] = CELL * c + r.reshape(c.shape) - 1
        q[~has_cells] = q[~has_cells] << 1 | bits.reshape(-1, tokens)
        return _near(q), plan


def _coarse_of(q: Multiples, plan: Plan) -> Multiples:
    """c of each q."""
    c = q >> 1
    has_cells = plan.shifts == 0
    c[has_cells] = (q[has_cells] + CELL // 2) // CELL
    return c


def _read_coarsely(
    payload: Bytes, tokens: int, found: dict[str, Any], layers: Layers
) -> tuple[NDArray[np.int32], Plan]:
    """c, and transform's plan."""
    c, _ = _unpacked(payload, tokens, layers.coarse)
    return c, _plan(found, int(payload[: HEAD.itemsize].view(HEAD)["level"][0]))


def _tables_of(c: Multiples, tables: NDArray[np.uint8], layers: Layers) -> tuple[Frequencies, NDArray[np.int32]]:
    """The tables of r that occur, and which of them each r has. tables: of each coefficient."""
    cell = np.where(np.abs(c) <= CELLS // 2, c + CELLS // 2, CELLS)
    which = ((CELLS + 1) * tables[:, None].astype(np.int32) + cell).reshape(-1)
    occurs = np.bincount(which, minlength=len(layers.refined)) > 0
    return layers.refined[occurs], (np.cumsum(occurs, dtype=np.int32) - 1)[which]


def _middles(c: Multiples, plan: Plan, layers: Layers) -> NDArray[np.int32]:
    """The value of each c, in half steps."""
    middles = 4 * c.astype(np.int32) + 1
    has_cells = plan.shifts == 0
    own = c[has_cells].astype(np.int32)
    cell = np.clip(own + CELLS // 2, 0, CELLS - 1)
    middles[has_cells] = np.where(
        np.abs(own) <= CELLS // 2, layers.middles[plan.tables[has_cells][:, None], cell], 2 * CELL * own
    )
    return middles


def _halved(plan: Plan) -> Plan:
    return plan._replace(step=plan.step / np.float32(2))


def _near(q: NDArray[np.int32]) -> NDArray[np.int32]:
    """Raises CorruptRecord for multiples that no encoder writes."""
    if np.abs(q).max() > FARTHEST * 2 + 1:
        raise CorruptRecord("codec layered: a multiple of the step is beyond what is ever encoded; read another copy")
    return q


LAYERED = Layered(17, "layered-2", TARGETS.index(2.0))
COARSE = Coarse(18, "layered-2-coarse", TARGETS.index(2.0))
"""Made of a layered block's prefix when that is read alone; stores have none of it."""
