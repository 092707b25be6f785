"""Figures of codecs from the scores of all windows, one row a codec.

tok is the growth of a perplexity of 5.68 by the same damage: 5.68 * (exp(4 * nats a byte) - 1) for
tokens of 4 bytes. LLaMA-7B has 5.68 on WikiText-2, and papers report against it. The nats are
paired: those of the same tokens over decoded and over exact KV.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from tierd.quality.measure import Outcome, Scores, Trial, policy_name
from tierd.quality.speed import Speed

PERPLEXITY = 5.68
_EXPONENT_MOST = 20.0
"""So that a broken codec has a finite figure."""


class Mean(NamedTuple):
    """Over windows, with its standard error; the error of one window is 0."""

    value: float
    error: float


class Row(TypedDict):
    """Figures of a codec under a policy. tokens: the policy; None: all tokens.

    bits: stored, of each value. se: standard error. kl: nats a token.
    restore_top1: share of predictions that stay the same. recall_top1: share of right ones.
    gbps: see speed.Speed.
    """

    codec: str
    tokens: str | None
    bits: float
    ratio: float
    restore_tok: float
    restore_tok_se: float
    restore_kl: float
    restore_kl_se: float
    restore_top1: float
    recall_tok: float
    recall_tok_se: float
    recall_kl: float
    recall_kl_se: float
    recall_top1: float
    encode_gbps: float
    decode_gbps: float


class Exact(TypedDict):
    """The model over its own KV. nll: nats a token of the text. top1: shares of right tokens."""

    restore_nll: float
    restore_top1: float
    recall_nll: float
    recall_top1: float


def exact_of(outcomes: Sequence[Outcome]) -> Exact:
    """Means over the windows."""
    nll = np.mean([outcome.exact.nll for outcome in outcomes], axis=0)
    right = np.mean([outcome.exact.right for outcome in outcomes], axis=0)
    return Exact(
        restore_nll=float(nll[0]), restore_top1=float(right[0]), recall_nll=float(nll[1]), recall_top1=float(right[1])
    )


class Measured(NamedTuple):
    """All that rows need. values: of all windows' prefixes. per_token: see windows.Text. kept: share
    of tokens that each policy keeps."""

    outcomes: Sequence[Outcome]
    values: int
    per_token: int
    kept: Sequence[float]


def rows_of(trial: Trial, measured: Measured, speeds: Sequence[Speed]) -> list[Row]:
    """A row for each codec under each policy."""
    return [
        _row(trial, (codec, policy), measured, speeds[codec])
        for codec in range(len(trial.codecs))
        for policy in range(len(trial.policies))
    ]


def _row(trial: Trial, at: tuple[int, int], measured: Measured, speed: Speed) -> Row:
    """at: numbers of the codec and of the policy."""
    codec, policy = trial.codecs[at[0]], trial.policies[at[1]]
    stored = measured.kept[at[1]] * sum(outcome.stored_bytes[at[0]] for outcome in measured.outcomes)
    mine = [outcome.scores[at[0]][at[1]] for outcome in measured.outcomes]
    exact = [outcome.exact for outcome in measured.outcomes]
    (restore, restore_kl), (recall, recall_kl) = (_of(way, mine, exact, measured.per_token) for way in (0, 1))
    return Row(
        codec=codec.name,
        tokens=policy_name(policy) if policy else None,
        bits=8 * stored / measured.values,
        ratio=2 * measured.values / stored,
        restore_tok=restore.value,
        restore_tok_se=restore.error,
        restore_kl=restore_kl.value,
        restore_kl_se=restore_kl.error,
        restore_top1=float(np.mean([scores.same[0] for scores in mine])),
        recall_tok=recall.value,
        recall_tok_se=recall.error,
        recall_kl=recall_kl.value,
        recall_kl_se=recall_kl.error,
        recall_top1=float(np.mean([scores.right[1] for scores in mine])),
        encode_gbps=speed.encode_gbps,
        decode_gbps=speed.decode_gbps,
    )


def front(rows: Sequence[Row]) -> list[bool]:
    """Whether no other row has fewer bits and, in both ways, less divergence."""

    def key(row: Row) -> tuple[float, ...]:
        return (row["bits"], row["restore_kl"], row["recall_kl"])

    def beats(one: Row, other: Row) -> bool:
        return key(one) != key(other) and all(a <= b for a, b in zip(key(one), key(other), strict=True))

    return [not any(beats(other, row) for other in rows) for row in rows]


def _of(way: int, mine: Sequence[Scores], exact: Sequence[Scores], per_token: int) -> tuple[Mean, Mean]:
    """tok and divergence of one way to go on."""
    worse = _mean(np.array([a.nll[way] - b.nll[way] for a, b in zip(mine, exact, strict=True)]))
    grown = math.exp(min(_EXPONENT_MOST, per_token * worse.value))
    tok = Mean(PERPLEXITY * (grown - 1), PERPLEXITY * grown * per_token * worse.error)
    return tok, _mean(np.array([scores.kl[way] for scores in mine]))


def _mean(each: NDArray[np.float64]) -> Mean:
    error = float(each.std(ddof=1)) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    return Mean(float(each.mean()), error)
