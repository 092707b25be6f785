"""Codecs kvquant-4, kvquant-3 and kvquant-2: tables of uneven levels, outliers apart
(KVQuant, arXiv 2401.18079, sections 3.1 to 3.5).

A channel of keys before RoPE has fixed limits from the calibration. A token's values in one layer
have limits of their own. A value between the limits is scaled to -1..1 and becomes the
nearest of a table's levels. A value beyond is an outlier, and is kept in float16.

Payload: limits, codes, length of the gaps (uint32), gaps, outliers. Limits are middle and half
width of each token's values (float16, [layer][token]). 8 codes are in as many bytes as a code has
bits, lowest first ([layer][keys, values][token][kv head][channel]). A gap below 255 is the number
of values between an outlier and the one before, and 255 is 255 values without any.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops
from tierd.codecs.block import Context, Lengths, Payload, room_for_raw
from tierd.codecs.rope import Frequencies, rotate, turns
from tierd.codecs.values import INFINITY, Bytes, Floats, KVShape, Raw, floats_of, rounded
from tierd.errors import CorruptRecord, Unsupported

BITS = (4, 3, 2)
OUTLIERS = 0.01
"""Share of the values beyond the limits."""
SKIP = 255
_TABLES, _OUT = struct.Struct("<3Q7Q"), struct.Struct("<4Q3Q2f")
"""KvquantTables and KvquantOut of codecs.cpp."""
ROPE_ERROR = 2.0**-20
"""Sines of two machines differ by less than this, relative to the largest key."""

Places = NDArray[np.uint64]
"""Of outliers among all values, in order."""


class Encoded(NamedTuple):
    """fixed: limits of tokens and codes. gaps, outliers: see above. error: largest of a value.
    largest_key: before RoPE."""

    fixed: Bytes
    gaps: Bytes
    outliers: NDArray[np.float16]
    error: np.float32
    largest_key: np.float32


class Tables(NamedTuple):
    """A calibration's tensors for this many bits, as `kvquant_fit.fit` describes it, and RoPE."""

    limits: Floats
    edges: Floats
    levels: Floats
    position: int
    frequencies: Frequencies

    def turned(self, values: Floats, *, undo: bool = False) -> Floats:
        """With keys at their positions, or undone: float32 [layers, 2, tokens, channels]."""
        both = values.copy()
        both[:, 0] = rotate(values[:, 0], self.position, self.frequencies, undo=undo)
        return both.reshape(*values.shape[:3], -1)


class Limits(NamedTuple):
    """Beyond lows and highs are outliers. Middles and half widths scale the rest, as the decoder
    has them."""

    lows: Floats
    highs: Floats
    middles: Floats
    halves: Floats


@dataclass(frozen=True, slots=True)
class KVQuant:
    """bits: of a code, one of BITS."""

    number: int
    bits: int
    version: int = 1
    is_exact: bool = False
    is_calibrated: bool = True

    @property
    def name(self) -> str:
        """kvquant-3, for instance."""
        return f"kvquant-{self.bits}"

    def check(self, shape: KVShape) -> None:
        """Raises Unsupported."""
        g = shape.geometry
        if g.kv_heads * g.head_dim % 8:
            raise Unsupported(
                f"codec {self.name}: {g.kv_heads} kv heads of {g.head_dim} channels are not a multiple of 8 together; "
                "use int8"
            )

    def lengths(self, shape: KVShape) -> Lengths:
        """The more outliers, the longer."""
        least = self._fixed(shape) + 4
        return Lengths(least, max(least, shape.block_bytes))

    def expected_bytes(self, shape: KVShape) -> int:
        """With up to 1.5 % of outliers, at 24 bits each."""
        return self.lengths(shape).least + shape.values * 3 // 64

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        tables = self._tables(shape, context)
        use_plain = loops.library is None or shape.geometry.head_dim % loops.STEP
        done = self._plain_encode(raw, shape, tables) if use_plain else self._native_encode(raw, shape, tables)
        count = np.array([len(done.gaps)], "<u4").view(np.uint8)
        data = np.concatenate((done.fixed, count, done.gaps, done.outliers.view(np.uint8)))
        return Payload(data, float(done.error + done.largest_key * np.float32(ROPE_ERROR)))

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        tables, fixed = self._tables(shape, context), self._fixed(shape)
        count = int(payload[fixed : fixed + 4].copy().view("<u4")[0])
        gaps, rest = payload[fixed + 4 : fixed + 4 + count], payload[fixed + 4 + count :]
        steps = np.where(gaps == SKIP, np.uint64(SKIP), gaps.astype(np.uint64) + np.uint64(1))
        places = np.cumsum(steps, dtype=np.uint64)[gaps != SKIP] - np.uint64(1)
        if len(gaps) != count or len(rest) != 2 * len(places) or steps.sum() > shape.values:
            raise CorruptRecord(
                f"codec {self.name}: {count} gaps and {len(rest)} bytes of outliers do not fit {shape.values} values; "
                "read another copy"
            )
        outliers = rest.copy().view(np.float16)
        sides = payload[: 4 * shape.geometry.layers * shape.tokens].copy().view(np.uint16)
        if max(map(loops.largest, (sides, np.append(outliers.view(np.uint16), np.uint16(0))))) >= INFINITY["float16"]:
            raise CorruptRecord(f"codec {self.name}: a limit or an outlier is not finite; read another copy")
        if loops.library is None or shape.geometry.head_dim % loops.STEP:
            return self._plain_decode(payload[:fixed], shape, tables, places, outliers)
        raw, coded = room_for_raw(shape, context), np.ascontiguousarray(payload[:fixed])
        packed = _packed_tables(tables, shape)
        loops.library.tierd_kvquant_decode(
            *(loops.described(raw, shape), packed.data, loops.address_of(coded)),
            *(loops.address_of(places), len(places), loops.address_of(outliers)),
        )
        return raw

    def _native_encode(self, raw: Raw, shape: KVShape, tables: Tables) -> Encoded:
        assert loops.library is not None
        fixed = np.empty(self._fixed(shape), np.uint8)
        gaps, outliers = (np.empty(shape.block_bytes, np.uint8) for _ in range(2))
        codes = loops.address_of(fixed) + 4 * shape.geometry.layers * shape.tokens
        places = (loops.address_of(fixed), codes, loops.address_of(gaps), loops.address_of(outliers))
        out = bytearray(_OUT.pack(*places, shape.block_bytes, 0, 0, 0.0, 0.0))
        packed = _packed_tables(tables, shape)
        loops.library.tierd_kvquant_encode(
            loops.described(raw, shape), packed.data, loops.address_of(np.frombuffer(out, np.uint8))
        )
        *_, gap_count, outlier_count, error, largest_key = _OUT.unpack(out)
        return Encoded(
            *(fixed, gaps[:gap_count], outliers[: 2 * outlier_count].view(np.float16)),
            *(np.float32(error), np.float32(largest_key)),
        )

    def _plain_encode(self, raw: Raw, shape: KVShape, tables: Tables) -> Encoded:
        values = floats_of(raw, shape.geometry.dtype)
        flat = tables.turned(values, undo=True)
        by_token = limits_of_tokens(flat[:, 1])
        is_outlier = np.empty(flat.shape, bool)
        codes = np.empty(flat.shape, np.uint8)
        for pair, limits in enumerate((limits_of_keys(tables.limits), by_token)):
            z = scaled(flat[:, pair], limits)
            is_outlier[:, pair] = (flat[:, pair] < limits.lows) | (flat[:, pair] > limits.highs)
            for layer in range(len(codes)):
                codes[layer, pair] = np.searchsorted(tables.edges[layer, pair], z[layer])
        outliers = flat[is_outlier].astype(np.float16)
        sides = np.concatenate((by_token.middles, by_token.halves), axis=-1)
        decoded = _values(codes, is_outlier, outliers, sides, tables)
        off = np.abs(tables.turned(decoded.reshape(shape.sizes)) - values.reshape(flat.shape)).max()
        fixed = np.concatenate((sides.astype(np.float16).reshape(-1).view(np.uint8), self._packed(codes)))
        return Encoded(fixed, _gaps(is_outlier.reshape(-1)), outliers, off, np.abs(flat[:, 0]).max())

    def _plain_decode(
        self, coded: Bytes, shape: KVShape, tables: Tables, places: Places, outliers: NDArray[np.float16]
    ) -> Raw:
        layers, _, tokens, heads, dim = shape.sizes
        is_outlier = np.zeros(shape.values, bool)
        is_outlier[places] = True
        sides = 4 * layers * tokens
        by_token = coded[:sides].copy().view(np.float16).astype(np.float32).reshape(layers, tokens, 2)
        sizes = (layers, 2, tokens, heads * dim)
        codes = self._unpacked(coded[sides:]).reshape(sizes)
        decoded = _values(codes, is_outlier.reshape(sizes), outliers, by_token, tables)
        return rounded(tables.turned(decoded.reshape(shape.sizes)).reshape(shape.sizes), shape.geometry.dtype)

    def _tables(self, shape: KVShape, context: Context) -> Tables:
        """Raises Unsupported if the calibration has no tables of these sizes."""
        g, found = shape.geometry, context.calibration
        assert found is not None  # block.py has checked it
        names = (f"kvquant.{name}" for name in ("limits", f"edges{self.bits}", f"levels{self.bits}"))
        limits, edges, levels = (np.ascontiguousarray(found.tensors.get(name, ()), np.float32) for name in names)
        sizes = [(g.layers, 2, n) for n in (g.kv_heads * g.head_dim, (1 << self.bits) - 1, 1 << self.bits)]
        if [limits.shape, edges.shape, levels.shape] != sizes or 2 * len(found.frequencies) > g.head_dim:
            raise Unsupported(
                f"codec {self.name}: calibration {found.hash.hex()} has no tensors of it with sizes {sizes}; make one "
                "with `tierctl calibrate`"
            )
        return Tables(limits, edges, levels, context.position, found.frequencies)

    def _fixed(self, shape: KVShape) -> int:
        """Bytes of limits and codes."""
        return 4 * shape.geometry.layers * shape.tokens + self.bits * shape.values // 8

    def _packed(self, codes: Bytes) -> Bytes:
        shifts = np.arange(8, dtype=np.uint32) * np.uint32(self.bits)
        words = np.bitwise_or.reduce(codes.reshape(-1, 8).astype("<u4") << shifts, axis=1)
        packed: Bytes = words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : self.bits].reshape(-1)
        return packed

    def _unpacked(self, data: Bytes) -> Bytes:
        words = np.zeros((len(data) // self.bits, 4), np.uint8)
        words[:, : self.bits] = data.reshape(-1, self.bits)
        shifts = np.arange(8, dtype=np.uint32) * np.uint32(self.bits)
        codes: Bytes = (words.view("<u4") >> shifts & np.uint32((1 << self.bits) - 1)).astype(np.uint8)
        return codes


def _values(
    codes: Bytes, is_outlier: NDArray[np.bool_], outliers: NDArray[np.float16], by_token: Floats, tables: Tables
) -> Floats:
    """Keys before RoPE and values: float32 [layers, 2, tokens, channels]. by_token: middle and half
    width of each token's values, [layers, tokens, 2]."""
    keys = limits_of_keys(tables.limits)
    values = np.empty(codes.shape, np.float32)
    for layer, pair in np.ndindex(len(codes), 2):
        values[layer, pair] = tables.levels[layer, pair][codes[layer, pair]]
    values[:, 0] = values[:, 0] * keys.halves + keys.middles
    values[:, 1] = values[:, 1] * by_token[..., 1:] + by_token[..., :1]
    values[is_outlier] = outliers
    return values


class _PackedTables(NamedTuple):
    """data: KvquantTables of codecs.cpp. arrays: what it points to."""

    data: bytes
    arrays: tuple[Floats, ...]


def _packed_tables(tables: Tables, shape: KVShape) -> _PackedTables:
    g = shape.geometry
    channels = g.kv_heads * g.head_dim
    cosine, sine = turns(shape.tokens, tables.position, tables.frequencies)
    scratch = np.empty(8 * channels, np.float32)
    arrays = (cosine, sine, -sine, tables.limits, tables.edges, tables.levels, scratch)
    bits = tables.levels.shape[-1].bit_length() - 1
    data = _TABLES.pack(bits, len(tables.frequencies), beyond(channels), *map(loops.address_of, arrays))
    return _PackedTables(data, arrays)


def limits_of_keys(limits: Floats) -> Limits:
    """kvquant.limits, float32 [layers, 2, channels], as [layers, 1, channels] each."""
    middles, halves = limits[:, :1], limits[:, 1:]
    return Limits(middles - halves, middles + halves, middles, halves)


def beyond(channels: int) -> int:
    """Outliers on each side of a token's values, if none are equal."""
    return min(int(OUTLIERS / 2 * (channels - 1)) + 1, (channels - 1) // 2)


def limits_of_tokens(values: Floats) -> Limits:
    """Of values, float32 [layers, tokens, channels]: [layers, tokens, 1] each."""
    low, high = beyond(values.shape[-1]), values.shape[-1] - 1 - beyond(values.shape[-1])
    ordered = np.partition(values, (low, high), axis=-1)
    lows, highs = (ordered[..., each, None] + np.float32(0) for each in (low, high))  # never -0
    half = np.float32(0.5)
    middles, halves = (
        each.astype(np.float16).astype(np.float32) for each in ((lows + highs) * half, (highs - lows) * half)
    )
    return Limits(lows, highs, middles, halves)


def scaled(values: Floats, limits: Limits) -> Floats:
    """Values between the limits in -1..1."""
    safe: Floats = np.where(limits.halves > 0, limits.halves, np.float32(np.inf))
    return (values - limits.middles) * np.reciprocal(safe)


def _gaps(is_outlier: NDArray[np.bool_]) -> Bytes:
    """One byte per outlier, and one for each 255 values without any before it."""
    between = np.diff(np.flatnonzero(is_outlier), prepend=-1) - 1
    skips, rests = between // SKIP, between % SKIP
    gaps = np.full(len(between) + int(skips.sum()), SKIP, np.uint8)
    gaps[np.cumsum(skips + 1) - 1] = rests
    return gaps
