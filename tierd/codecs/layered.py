"""Codec layered: the multiples of codec transform in two parts; the first can be decoded alone.

A multiple q of a coefficient without low bits is 3c + r - 1, with r of 0, 1 or 2. The coarse part
has c, the refinement r. With low bits, the refinement has the lowest one. Tables of c have sums of
transform's frequencies, and tables of r the shares in such a sum. So both parts together take as
many bits as transform's payload (successive refinement: Equitz and Cover, IEEE Transactions on
Information Theory 37(2), 1991).

    q ─▶ c ─▶ transform's payload, with tables of c    the coarse part: codec layered-2-coarse
     └─▶ r ─▶ rANS stream, then lowest bits            the refinement

Payload: FRONT of block.py, the coarse part, the refinement. A coarse value is the middle of the
multiples with its c, in half steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import product, rans
from tierd.codecs.block import FRONT, Lengths, Payload, Prefix
from tierd.codecs.multiples import CENTRE, ESCAPE, SYMBOLS, known_of
from tierd.codecs.product import Multiples
from tierd.codecs.rans import Frequencies
from tierd.codecs.transform import HEAD, Plan, Transform, _error, _packed, _plan, _unpacked
from tierd.codecs.transform_fit import TARGETS
from tierd.codecs.values import Bytes, Floats, KVShape
from tierd.errors import CorruptRecord

CELL = 3
"""Multiples with the same c. It divides ESCAPE, so that the cells are all symbols but that."""
CELLS = ESCAPE // CELL
FARTHEST = product.FARTHEST // 2
"""Multiples beyond it cannot be encoded: coarse values are in half steps."""
WEIGHT = 64
"""Of a frequency in a table of r. Each r has 1 more: transform may encode it as an escape."""


class Layers(NamedTuple):
    """coarse: what `_tensors` of transform.py gives, for c. refined: tables of r, [tables *
    (CELLS + 1), CELL]. The last of a table's is for c beyond the cells."""

    coarse: dict[str, Any]
    refined: Frequencies


def layers_of(found: dict[str, Any]) -> Layers:
    """Both tables, by integers alone: they are part of the format. Made once. found: transform's tensors."""
    made: Layers | None = found.get("layers")
    if made is not None:
        return made
    frequencies = found["frequencies"].astype(np.int64)
    tables = len(frequencies)
    cells = frequencies[:, :ESCAPE].reshape(tables, CELLS, CELL)
    of_c = np.zeros((tables, SYMBOLS), np.int64)
    first = CENTRE - CELLS // 2
    of_c[:, first : first + CELLS], of_c[:, ESCAPE] = cells.sum(axis=2), frequencies[:, ESCAPE]
    beyond = np.zeros((tables, 1, CELL), np.int64)
    refined = rans.frequencies_of((WEIGHT * np.concatenate((cells, beyond), axis=1) + 1).reshape(-1, CELL))
    has_cells = found["shifts"] == 0
    of_both = np.concatenate((frequencies, of_c)).astype(np.uint16)
    coarse = {
        "frequencies": of_both,
        "choices": found["choices"] + np.uint8(tables) * has_cells,
        "shifts": found["shifts"] - ~has_cells,
        "known": known_of(of_both),
        "plans": {},
    }
    made = found["layers"] = Layers(found | coarse, refined)
    return made


@dataclass(frozen=True, slots=True)
class Coarse(Transform):
    """The coarse part of Layered as a codec of its own."""

    def written(self, q: Multiples, rows: Floats, plan: Plan, found: dict[str, Any]) -> Payload:
        """See Transform."""
        if not np.abs(q).max() <= FARTHEST:
            return Payload(np.empty(0, np.uint8), np.inf)
        coarse, level, c = layers_of(found).coarse, int(found["levels"][self.profile]), _coarse_of(q, plan)
        error = _error(rows, _middles(c, plan), _halved(plan), found)
        return Payload(_packed(c, _plan(coarse, level), level, coarse), error)

    def read(self, payload: Bytes, tokens: int, found: dict[str, Any]) -> tuple[Multiples, Plan]:
        """See Transform."""
        c, plan = _read_coarse(payload, tokens, found, layers_of(found))
        return _middles(c, plan), _halved(plan)


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
        has_cells = plan.coding.shifts == 0
        own = q[has_cells] + 1
        c = own // CELL
        r, which = (own - CELL * c).astype(np.uint8), _tables_of(c, plan.coding.tables[has_cells])
        stream = rans.encode(r.reshape(-1), layers_of(found).refined, which, 1)
        low = np.packbits((q[~has_cells] & 1).astype(np.uint8).reshape(-1), bitorder="little")
        data = np.concatenate((np.zeros(FRONT.itemsize, np.uint8), coarse.data, stream, low))
        prefix = Prefix(FRONT.itemsize + len(coarse.data), coarse.error)
        return Payload(data, _error(rows, q, plan, found), prefix=prefix)

    def read(self, payload: Bytes, tokens: int, found: dict[str, Any]) -> tuple[Multiples, Plan]:
        """See Transform."""
        length = int(payload[: FRONT.itemsize].view(FRONT)["length"][0])
        if not FRONT.itemsize + HEAD.itemsize <= length <= len(payload):
            raise CorruptRecord(
                f"codec {self.name}: a prefix of {length} bytes in a payload of {len(payload)}; read another copy"
            )
        layers = layers_of(found)
        q, plan = _read_coarse(payload[FRONT.itemsize : length], tokens, found, layers)
        has_cells = plan.coding.shifts == 0
        c, bits = q[has_cells], int(np.count_nonzero(~has_cells)) * tokens
        stream = payload[length : max(length, len(payload) - -(-bits // 8))]
        low = payload[length + len(stream) :]
        if len(low) != -(-bits // 8):
            raise CorruptRecord(
                f"codec {self.name}: {len(low)} bytes have no room for {bits} low bits; read another copy"
            )
        which = _tables_of(c, plan.coding.tables[has_cells])
        r = rans.decode(stream, np.empty(c.size, np.uint8), layers.refined, which, 1)
        q[has_cells] = CELL * c + r.reshape(c.shape) - 1
        lowest = np.unpackbits(low, count=bits, bitorder="little").reshape(-1, tokens)
        q[~has_cells] = q[~has_cells] << 1 | lowest
        return q, plan


def _coarse_of(q: Multiples, plan: Plan) -> Multiples:
    """c of each q."""
    return np.where(plan.coding.shifts[:, None] == 0, (q + 1) // CELL, q >> 1)


def _middles(c: NDArray[Any], plan: Plan) -> NDArray[Any]:
    """The value of each c, in half steps."""
    has_cells = plan.coding.shifts[:, None] == 0
    middles: NDArray[Any] = c * np.where(has_cells, 2 * CELL, 4).astype(c.dtype) + ~has_cells
    return middles


def _read_coarse(payload: Bytes, tokens: int, found: dict[str, Any], layers: Layers) -> tuple[Multiples, Plan]:
    """c, and the plan of q. Raises CorruptRecord for multiples that are never encoded."""
    c, _ = _unpacked(payload, tokens, layers.coarse)
    plan = _plan(found, int(payload[: HEAD.itemsize].view(HEAD)["level"][0]))
    ends = np.stack((c.min(axis=1), c.max(axis=1)), axis=1).astype(np.int32)
    if np.abs(_middles(ends, plan)).max() > product.FARTHEST:
        raise CorruptRecord(f"codec layered: a multiple above {product.FARTHEST} is never encoded; read another copy")
    return c, plan


def _tables_of(c: Multiples, tables: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """The row of `Layers.refined` for each r. tables: of each coefficient of c."""
    cell = np.minimum((c + np.int16(CELLS // 2)).view(np.uint16), np.uint16(CELLS))  # below 0 is large
    cell += (CELLS + 1) * tables[:, None].astype(np.uint16)
    return cell.reshape(-1)


def _halved(plan: Plan) -> Plan:
    return plan._replace(step=plan.step / np.float32(2))


LAYERED = Layered(17, "layered-2", TARGETS.index(2.0))
COARSE = Coarse(18, "layered-2-coarse", TARGETS.index(2.0))
"""For prefixes of LAYERED blocks (`prefix.py`), and to measure them. No store takes it."""
