"""Fits the tensors of codec transform to samples: bases, steps and tables.

Values of one token are weighted by what their errors do to the model's loss, then decorrelated. The
weights are the covariance of the loss's gradients (Fisher information). One step then fits all
coefficients: an error of one step costs the same in each. Without gradients, queries and output
weights say the same less well (arXiv 2608.14191, 2608.04074).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.calibration import Samples, Tensors
from tierd.codecs.multiples import CENTRE, ESCAPE, MOST_SHIFT, SYMBOLS, symbols_of
from tierd.codecs.product import Patterns, floats_of_patterns, patterns_of
from tierd.codecs.rans import frequencies_of
from tierd.codecs.rope import rotate
from tierd.codecs.rows import grouped
from tierd.codecs.values import Floats
from tierd.core.formats.block import KVGeometry
from tierd.errors import InvalidArgument

WIDTH = 2048
"""Values of a token that one basis takes, at most."""
SHRINK = 0.02
"""Of the mean weight, added to each weight: what the samples do not show still matters a little."""
TABLES = 64
STEPS, STEPS_PER_OCTAVE, STEPS_PER_ROW = 256, 32, 8
"""Steps fall by 2^(-1/32) from one to the next. Eight adjoining steps share a row of choices."""
COARSEST = 0.2
"""Bits per value of the first step."""
LOSS = 0.02
"""The last coefficients are dropped, as many as add no more than so much to the squared error."""
SPREAD = 5
"""Standard deviations that symbols reach on either side. Wider coefficients have low bits, which
stay as they are."""
ROUNDS = 8
SAMPLE_ROWS = 8192
"""Tokens that tables and rates are fitted to."""
TARGETS = (3.0, 2.0, 1.0, 0.5)
"""Bits per value of the profiles."""


class Basis(NamedTuple):
    """Per group of n values: y = (x - mean) @ forward.T, and x = y @ inverse + mean.

    mean: float32 [groups, n]. forward, inverse: bfloat16 [groups, coefficients, n], so that all
    machines have the same numbers. The inverse is that of the rounded forward. Coefficients go from
    the largest variance to the least.
    """

    mean: Floats
    forward: Patterns
    inverse: Patterns


class Chosen(NamedTuple):
    """uint8 per coefficient: its table, and how many low bits are kept as they are."""

    tables: NDArray[np.uint8]
    shifts: NDArray[np.uint8]


class Choice(NamedTuple):
    """The same per row of steps, group and coefficient. ranks: uint16 [rows, groups], coefficients kept."""

    tables: NDArray[np.uint8]
    shifts: NDArray[np.uint8]
    ranks: NDArray[np.uint16]

    def of(self, level: int, group: int) -> Chosen:
        """For a step, by its index."""
        row = level // STEPS_PER_ROW
        rank = int(self.ranks[row, group])
        return Chosen(self.tables[row, group, :rank], self.shifts[row, group, :rank])


def group_width(geometry: KVGeometry) -> int:
    """Values of a group: those of as many heads as divide all heads of a token and fit in WIDTH."""
    heads = 2 * geometry.layers * geometry.kv_heads
    most = max(1, WIDTH // geometry.head_dim)
    return geometry.head_dim * next(n for n in range(min(most, heads), 0, -1) if heads % n == 0)


def fit(samples: Samples) -> Tensors:
    """The tensors of codec transform. Takes minutes for large models."""
    width = group_width(samples.geometry)
    rows = grouped(samples.values, width)
    if samples.gradients is None:
        weights = _weights(samples, width)
    else:
        slopes = grouped(samples.gradients, width)
        weights = np.stack([_moment(each) for each in slopes])
    bases = [_basis(x, weight) for x, weight in zip(rows, weights, strict=True)]
    basis = Basis(*(np.stack(part) for part in zip(*bases, strict=True)))
    some = slice(None, None, -(-rows.shape[1] // SAMPLE_ROWS))
    forward = floats_of_patterns(basis.forward).transpose(0, 2, 1)
    y: Floats = np.matmul(rows[:, some] - basis.mean[:, None], forward)
    return _tables(y) | {f"transform.{name}": part for name, part in basis._asdict().items()}


def _basis(x: Floats, weight: NDArray[np.float64]) -> Basis:
    """x: [tokens, n]. weight: [n, n], symmetric, how much errors cost."""
    n = len(weight)
    mean = x.mean(axis=0, dtype=np.float64).astype(np.float32)
    level = np.trace(weight) / n or 1.0
    values, vectors = np.linalg.eigh(weight / level + SHRINK * np.eye(n))
    root = (vectors * np.sqrt(values)) @ vectors.T
    _, turn = np.linalg.eigh(root @ _moment(x - mean) @ root)
    forward = patterns_of((np.sqrt(level) * turn[:, ::-1].T @ root).astype(np.float32))
    inverse = np.linalg.inv(floats_of_patterns(forward).astype(np.float64)).T
    return Basis(mean, forward, patterns_of(inverse.astype(np.float32)))


def _moment(x: Floats) -> NDArray[np.float64]:
    """The second moments of rows: [n, n]."""
    return (x.T @ x).astype(np.float64) / len(x)


def _weights(samples: Samples, width: int) -> NDArray[np.float64]:
    """Weights without gradients: [groups, width, width]. Raises InvalidArgument.

    An error of a value reaches the hidden state through the output weights. An error of a key
    changes the logit by its product with the query. That moves the output by what values differ.
    """
    queries, outputs = samples.queries, samples.outputs
    if queries is None or outputs is None:
        raise InvalidArgument("calibration: samples have no gradients, and no queries with outputs; take either")
    g = samples.geometry
    share = queries.shape[2] // g.kv_heads
    whole = np.zeros((2 * g.layers * g.kv_heads, g.head_dim, g.head_dim))
    for layer, head, own in np.ndindex(g.layers, g.kv_heads, share):
        q_head = head * share + own
        out = outputs[layer][:, q_head * g.head_dim : (q_head + 1) * g.head_dim]
        by_value = _moment(out) * len(out)
        spread = samples.values[layer, 1, :, head]
        moved = float((by_value * np.cov(spread.T)).sum())
        turned = rotate(queries[layer, :, q_head : q_head + 1], 0, samples.frequencies)[:, 0]
        at = 2 * layer * g.kv_heads + head
        whole[at] += _moment(turned) * (moved / g.head_dim)
        whole[at + g.kv_heads] += by_value
    weights = np.zeros((len(whole) * g.head_dim // width, width, width))
    for i, block in enumerate(whole):
        first = i * g.head_dim % width
        weights[i * g.head_dim // width, first : first + g.head_dim, first : first + g.head_dim] = block
    return weights


class _Counted(NamedTuple):
    """counts: float32 [coefficients, SYMBOLS]. shifts: uint8 [coefficients]. rank: of them, those kept."""

    counts: Floats
    shifts: NDArray[np.uint8]
    rank: int


def _counted(y: Floats, step: float) -> _Counted:
    """y: [tokens, n]."""
    q = np.rint(y * (1 / step)).T
    squares, errors = (y * y).sum(axis=0), ((y - q.T * step) ** 2).sum(axis=0)
    lost = np.cumsum((squares - errors)[::-1])[::-1]  # by dropping this coefficient and all after it
    rank = max(1, int((lost > LOSS * errors.sum()).sum()))
    q = q[:rank]
    wide = SPREAD * np.sqrt((q * q).mean(axis=1))
    shifts = np.clip(np.ceil(np.log2((wide + 1) / (CENTRE - 2))), 0, MOST_SHIFT).astype(np.uint8)
    flat = symbols_of(q.astype(np.int64) >> shifts[:, None]) + SYMBOLS * np.arange(rank)[:, None]
    counts = np.bincount(flat.reshape(-1), minlength=SYMBOLS * rank).reshape(rank, SYMBOLS)
    return _Counted(counts.astype(np.float32), shifts, rank)


def _tables(y: Floats) -> dict[str, NDArray[Any]]:
    """y: [groups, tokens, n]. Steps, tables, choices and the steps of the profiles."""
    first = _coarsest(y)
    steps = (first * 2.0 ** (-np.arange(STEPS) / STEPS_PER_OCTAVE)).astype(np.float32)
    middles = steps[STEPS_PER_ROW // 2 :: STEPS_PER_ROW]
    found = [[_counted(part, float(step)) for part in y] for step in middles]
    tables = _clustered(np.concatenate([each.counts for row in found for each in row]))
    prices = _prices(tables)
    rows, groups, n = len(middles), len(y), y.shape[2]
    each = np.zeros((2, rows, groups, n), np.uint8)
    choice = Choice(each[0], each[1], np.zeros((rows, groups), np.uint16))
    for row, g in np.ndindex(rows, groups):
        counts, shifts, rank = found[row][g]
        choice.ranks[row, g] = rank
        chosen = choice.of(row * STEPS_PER_ROW, g)
        chosen.tables[:], chosen.shifts[:] = (counts @ prices.T).argmin(axis=1), shifts
    levels = [_level(y, steps, choice, prices, target) for target in TARGETS]
    return {
        "transform.steps": steps,
        "transform.frequencies": tables,
        "transform.choices": choice.tables,
        "transform.shifts": choice.shifts,
        "transform.ranks": choice.ranks,
        "transform.levels": np.array(levels, np.uint8),
    }


def _entropy(y: Floats, step: float) -> float:
    """Bits per value at a step, if each coefficient had its own table."""
    total = 0.0
    for part in y:
        counts, shifts, _ = _counted(part, step)
        share = counts / counts.sum(axis=1, keepdims=True)
        total -= float((counts * np.log2(np.maximum(share, 1e-9))).sum()) - len(part) * float(shifts.sum())
    return total / y.size


def _coarsest(y: Floats) -> float:
    """The step that gives COARSEST bits by entropy."""
    few = y[:, :: -(-y.shape[1] // 1024)]
    top = float(np.sqrt((few[:, :, 0] ** 2).mean())) or 1.0
    low, high = top * 2.0**-24, top * 4
    for _ in range(20):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if _entropy(few, middle) > COARSEST else (low, middle)
    return high


def _level(y: Floats, steps: Floats, choice: Choice, prices: Floats, target: float) -> int:
    """The finest step whose code has at most so many bits per value."""
    low, high = 0, STEPS - 1
    few = y[:, ::2]
    while low < high:
        middle = (low + high + 1) // 2
        bits = sum(_coded(part, float(steps[middle]), choice.of(middle, g), prices) for g, part in enumerate(few))
        low, high = (middle, high) if bits / few.size <= target else (low, middle - 1)
    return low


def _coded(y: Floats, step: float, chosen: Chosen, prices: Floats) -> float:
    """Bits of the code of y: [tokens, n]."""
    q = np.rint(y[:, : len(chosen.tables)] * (1 / step)).T.astype(np.int64)
    symbols = symbols_of(q >> chosen.shifts[:, None])
    return float(np.take_along_axis(prices[chosen.tables], symbols, axis=1).sum()) + len(y) * float(chosen.shifts.sum())


def _prices(frequencies: NDArray[np.uint16]) -> Floats:
    """Bits of each symbol in each table. A symbol of frequency 0 is an escape, which has 16 bits more."""
    prices = np.log2(4096 / np.maximum(frequencies, 1)).astype(np.float32)
    prices[:, ESCAPE] += 16
    return np.where(frequencies > 0, prices, prices[:, ESCAPE:])


def _clustered(counts: Floats) -> NDArray[np.uint16]:
    """TABLES tables that fit the rows of counts together: k-means by code length."""
    share = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(share * np.log2(np.maximum(share, 1e-9))).sum(axis=1)
    order = np.argsort(entropy, kind="stable")
    nearest = np.empty(len(counts), np.int64)
    nearest[order] = np.arange(len(counts)) * TABLES // len(counts)
    for _ in range(ROUNDS):
        is_of = (nearest == np.arange(TABLES)[:, None]).astype(np.float32)
        frequencies = frequencies_of(_smooth(is_of @ share))
        nearest = (share @ _prices(frequencies).T).argmin(axis=1)
    return frequencies


def _smooth(sums: Floats) -> NDArray[np.int64]:
    """Counts of parts in a million. Each symbol that could occur has some, the escape too."""
    share = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1e-9)
    near = np.zeros_like(share)
    for by in (-2, -1, 1, 2):
        near[:, :ESCAPE] += np.roll(share[:, :ESCAPE], by, axis=1)
    share = share + 0.002 * near
    share[:, ESCAPE] += 1e-4
    counts: NDArray[np.int64] = np.rint(share * 1e6).astype(np.int64)
    counts[:, ESCAPE] = np.maximum(counts[:, ESCAPE], 1)
    return counts
