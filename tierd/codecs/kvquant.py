"""Codecs kvquant-4, kvquant-3 and kvquant-2: tables of uneven levels, outliers apart
(KVQuant, arXiv 2401.18079, sections 3.1 to 3.5).

A channel of keys before RoPE has fixed limits from the calibration. A token's values in one layer
have limits of their own. What is between the limits is scaled to -1..1 and becomes the nearest
of a table's levels. What is beyond is an outlier, and is kept in float16.

Payload: middle and half width of each token's values (float16, [layer][token]); codes
([layer][keys, values][token][kv head][channel], 8 codes in as many bytes as a code has bits, lowest
first); length of the gaps (uint32); gaps; outliers. A gap below 255 is the number of values between
an outlier and the one before, and 255 is 255 values without any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.block import Context, Lengths, Payload
from tierd.codecs.calibration import Calibration, Samples, Tensors
from tierd.codecs.rope import rotate
from tierd.codecs.values import Bytes, Floats, KVShape, Raw, floats_of, rounded
from tierd.errors import CorruptRecord, Unsupported

BITS = (4, 3, 2)
OUTLIERS = 0.01
"""Share of the values beyond the limits."""
ROUNDS = 50
"""Of k-means."""
SKIP = 255
ROPE_ERROR = 2.0**-20
"""Sines of two machines differ by less than this, relative to the largest key."""


class _Limits(NamedTuple):
    """Beyond lows and highs are outliers. Middles and half widths scale the rest: float32, as the decoder has them."""

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

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        values, calibration = floats_of(raw, shape.geometry.dtype), _of(context)
        flat = _turned(values, shape, context, undo=True)
        by_token = _limits_of_tokens(flat[:, 1])
        is_outlier = np.empty(flat.shape, bool)
        codes = np.empty(flat.shape, np.uint8)
        for pair, limits in enumerate((_limits_of_keys(calibration.tensors["kvquant.limits"]), by_token)):
            z = _scaled(flat[:, pair], limits)
            is_outlier[:, pair] = (flat[:, pair] < limits.lows) | (flat[:, pair] > limits.highs)
            edges = calibration.tensors[f"kvquant.edges{self.bits}"][:, pair]
            for layer in range(shape.geometry.layers):
                codes[layer, pair] = np.searchsorted(edges[layer], z[layer])
        outliers = flat[is_outlier].astype(np.float16)
        sides = np.concatenate((by_token.middles, by_token.halves), axis=-1)
        decoded = self._values(codes, is_outlier, outliers, sides, calibration)
        off = np.abs(_turned(decoded.reshape(shape.sizes), shape, context) - values.reshape(flat.shape)).max()
        gaps = _gaps(is_outlier.reshape(-1))
        parts = (sides.astype(np.float16), self._packed(codes), np.array([len(gaps)], "<u4"), gaps, outliers)
        data = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
        return Payload(data, float(off + np.abs(flat[:, 0]).max() * np.float32(ROPE_ERROR)))

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        layers, _, tokens, heads, dim = shape.sizes
        fixed, sides = self._fixed(shape), 4 * layers * tokens
        count = int(payload[fixed : fixed + 4].copy().view("<u4")[0])
        gaps, rest = payload[fixed + 4 : fixed + 4 + count], payload[fixed + 4 + count :]
        steps = np.where(gaps == SKIP, SKIP, gaps.astype(np.int64) + 1)
        places = np.cumsum(steps)[gaps != SKIP] - 1
        if len(gaps) != count or len(rest) != 2 * len(places) or steps.sum() > shape.values:
            raise CorruptRecord(
                f"codec {self.name}: {count} gaps and {len(rest)} bytes of outliers do not fit {shape.values} values; "
                "read another copy"
            )
        is_outlier = np.zeros(shape.values, bool)
        is_outlier[places] = True
        by_token = payload[:sides].copy().view(np.float16).astype(np.float32).reshape(layers, tokens, 2)
        sizes = (layers, 2, tokens, heads * dim)
        decoded = self._values(
            self._unpacked(payload[sides:fixed]).reshape(sizes),
            is_outlier.reshape(sizes),
            rest.copy().view(np.float16),
            by_token,
            _of(context),
        )
        turned = _turned(decoded.reshape(shape.sizes), shape, context)
        return rounded(turned.reshape(shape.sizes), shape.geometry.dtype)

    def _fixed(self, shape: KVShape) -> int:
        """Bytes of limits and codes."""
        return 4 * shape.geometry.layers * shape.tokens + self.bits * shape.values // 8

    def _values(
        self,
        codes: Bytes,
        is_outlier: NDArray[np.bool_],
        outliers: NDArray[np.float16],
        by_token: Floats,
        calibration: Calibration,
    ) -> Floats:
        """Keys before RoPE and values: float32 [layers, 2, tokens, channels]. by_token: middle and half width of
        each token's values, [layers, tokens, 2]."""
        levels = calibration.tensors[f"kvquant.levels{self.bits}"]
        keys = _limits_of_keys(calibration.tensors["kvquant.limits"])
        values = np.empty(codes.shape, np.float32)
        for layer, pair in np.ndindex(len(codes), 2):
            values[layer, pair] = levels[layer, pair][codes[layer, pair]]
        values[:, 0] = values[:, 0] * keys.halves + keys.middles
        values[:, 1] = values[:, 1] * by_token[..., 1:] + by_token[..., :1]
        values[is_outlier] = outliers
        return values

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


def _of(context: Context) -> Calibration:
    """Raises Unsupported if the calibration has no tables."""
    found = context.calibration
    assert found is not None  # block.py has checked it
    if "kvquant.limits" not in found.tensors:
        raise Unsupported(
            f"codec kvquant: calibration {found.hash.hex()} has no tensors of it; make one with `tierctl calibrate`"
        )
    return found


def _turned(values: Floats, shape: KVShape, context: Context, *, undo: bool = False) -> Floats:
    """With keys at their positions, or undone: float32 [layers, 2, tokens, channels]."""
    both = values.copy()
    both[:, 0] = rotate(values[:, 0], context.position, _of(context).frequencies, undo=undo)
    return both.reshape(*shape.sizes[:3], -1)


def _limits_of_keys(limits: Floats) -> _Limits:
    """kvquant.limits, float32 [layers, 2, channels], as [layers, 1, channels] each."""
    middles, halves = limits[:, :1], limits[:, 1:]
    return _Limits(middles - halves, middles + halves, middles, halves)


def _limits_of_tokens(values: Floats) -> _Limits:
    """Of values, float32 [layers, tokens, channels]: [layers, tokens, 1] each. Of a token's values,
    1 + OUTLIERS / 2 * (channels - 1) are above the limits, and as many below, if none are equal."""
    channels = values.shape[-1]
    beyond = min(int(OUTLIERS / 2 * (channels - 1)) + 1, (channels - 1) // 2)
    ordered = np.partition(values, (beyond, channels - 1 - beyond), axis=-1)
    lows, highs = ordered[..., beyond, None], ordered[..., channels - 1 - beyond, None]
    half = np.float32(0.5)
    middles, halves = (
        each.astype(np.float16).astype(np.float32) for each in ((lows + highs) * half, (highs - lows) * half)
    )
    return _Limits(lows, highs, middles, halves)


def _scaled(values: Floats, limits: _Limits) -> Floats:
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


def fit(samples: Samples) -> Tensors:
    """Limits of key channels, and tables of edges and levels for each of BITS.

    kvquant.limits: float32 [layers, 2, channels], middles and half widths of keys before RoPE.
    kvquant.edges4: float32 [layers, 2, 15], between neighbouring levels. kvquant.levels4:
    float32 [layers, 2, 16]. Sensitivity is the squared gradient (section 3.3).
    """
    layers, _, tokens, heads, dim = samples.values.shape
    flat = samples.values.reshape(layers, 2, tokens, heads * dim)
    weights = None if samples.gradients is None else np.square(samples.gradients.reshape(flat.shape))
    ends = np.quantile(flat[:, 0], (OUTLIERS / 2, 1 - OUTLIERS / 2), axis=1)
    low, high = ends[:, :, None]
    limits = np.concatenate(((low + high) / 2, (high - low) / 2), axis=1).astype(np.float32)
    tensors = {"kvquant.limits": limits}
    for bits in BITS:
        tensors[f"kvquant.edges{bits}"] = np.empty((layers, 2, (1 << bits) - 1), np.float32)
        tensors[f"kvquant.levels{bits}"] = np.empty((layers, 2, 1 << bits), np.float32)
    keys, values = _limits_of_keys(limits), _limits_of_tokens(flat[:, 1])
    for pair, each in enumerate((keys, values)):
        z = _scaled(flat[:, pair], each)
        inside = (flat[:, pair] >= each.lows) & (flat[:, pair] <= each.highs)
        for layer in range(layers):
            own = np.ones(inside[layer].sum()) if weights is None else weights[layer, pair][inside[layer]]
            for bits, table in _tables(z[layer][inside[layer]].astype(np.float64), own.astype(np.float64)):
                tensors[f"kvquant.edges{bits}"][layer, pair] = table.edges
                tensors[f"kvquant.levels{bits}"][layer, pair] = table.levels
    return tensors


class _Table(NamedTuple):
    edges: NDArray[np.float64]
    levels: NDArray[np.float64]


def _tables(z: NDArray[np.float64], weights: NDArray[np.float64]) -> Iterator[tuple[int, _Table]]:
    """Weighted k-means of one dimension, for each of BITS. Then levels get the mean and the deviation
    of z (Q-Norm, section 3.5): the paper has this at 2 bits alone, here it keeps keys from shrinking."""
    order = np.argsort(z, kind="stable")
    z, weights = z[order], weights[order] + weights.mean() * 1e-9 + 1e-300
    mass, moment = (np.concatenate(([0.0], np.cumsum(each))) for each in (weights, weights * z))
    for bits in BITS:
        quantiles = (np.arange(1 << bits) + 0.5) / (1 << bits) * mass[-1]
        levels = z[np.searchsorted(mass[1:], quantiles).clip(0, len(z) - 1)]
        for _ in range(ROUNDS):
            ends = np.concatenate(([0], np.searchsorted(z, (levels[1:] + levels[:-1]) / 2), [len(z)]))
            inside = np.diff(mass[ends])
            means = np.diff(moment[ends]) / np.where(inside > 0, inside, 1.0)
            levels = np.sort(np.where(inside > 0, means, levels))
        edges = (levels[1:] + levels[:-1]) / 2
        near = levels[np.searchsorted(edges, z)]
        yield bits, _Table(edges, (levels - near.mean()) * (z.std() / max(near.std(), 1e-30)) + z.mean())
