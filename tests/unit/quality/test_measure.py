"""Measurements: what is stored, what is predicted over it, and the rows of figures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tierd.codecs.block import Codec, Context, Payload, decode
from tierd.codecs.named import BY_NUMBER, codec_named
from tierd.codecs.values import KVShape, Raw, floats_of, raw_of
from tierd.errors import InvalidArgument, Unsupported
from tierd.quality import runs
from tierd.quality.identity import IDENTITY
from tierd.quality.measure import Scores, Trial, coded, kept_share, measure
from tierd.quality.rows import Measured, Outcome, exact_of, front, rows_of
from tierd.quality.runs import predictions, prefill
from tierd.quality.speed import Speed
from tierd.quality.windows import Lengths, Window
from tierd.worker.model import Llama
from tierd.worker.tokens.choice import TokenChoice

SHORT = Lengths(prefix=96, continuation=32, unscored=8)
NAMES = ("identity", "int8", "rot-4-4", "int3")


def trial(*names: str, block_tokens: int = 40) -> Trial:
    codecs = [IDENTITY if name == "identity" else codec_named(name) for name in names]
    return Trial(codecs, block_tokens=block_tokens, lengths=SHORT)


def plainly(model: Llama, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities of a whole sequence, by attention in float64 over bfloat16 keys and values."""

    def bf16(x: np.ndarray) -> np.ndarray:
        words = x.view(np.uint32).astype(np.uint64)
        return ((words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out = np.empty(q.shape)
        group = q.shape[1] // k.shape[1]
        for row in range(len(q)):
            for head in range(q.shape[1]):
                keys, values = (bf16(x)[: row + 1, head // group].astype(np.float64) for x in (k, v))
                weights = np.exp(keys @ q[row, head] / math.sqrt(q.shape[-1]))
                out[row, head] = weights @ values / weights.sum()
        return out.astype(np.float32)

    scores = model.logits(model.hidden(tokens, np.arange(len(tokens)), attend)).astype(np.float64)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def test_predictions_are_the_models(model: Llama, windows: list[Window]) -> None:
    """Over its own KV a continuation is predicted as the whole sequence at once is, each way for itself."""
    window = windows[0]
    found = predictions(model, prefill(model, window.prefix), window.ways[:, :-1])
    for way in (0, 1):
        want = plainly(model, np.concatenate((window.prefix, window.ways[way, :-1])))[96:]
        np.testing.assert_allclose(found[way], want, atol=0.03)
        assert np.abs(found[way] - want).mean() < 2e-3


def test_identity_changes_nothing(model: Llama, windows: list[Window]) -> None:
    """Blocks that keep their bytes give exactly 0 in every score, and 16 bits with the headers."""
    outcomes = [measure(model, window, trial("identity")) for window in windows]
    (row,) = rows_of(trial("identity"), Measured(outcomes, 3 * values_of(model), 4, [1.0]), [Speed(1, 1)])
    zeros = ("restore_tok", "restore_tok_se", "restore_kl", "restore_kl_se", "recall_tok", "recall_kl")
    assert [row[name] for name in zeros] == [0.0] * 6  # type: ignore[literal-required]
    assert row["restore_top1"] == 1.0 and row["recall_top1"] == exact_of(outcomes)["recall_top1"]
    assert row["bits"] == 16 + 3 * 64 * 8 / values_of(model)
    assert row["ratio"] == pytest.approx(16 / row["bits"])


def values_of(model: Llama) -> int:
    return 2 * model.spec.layers * 96 * model.spec.kv_heads * model.spec.head_dim


def test_fewer_bits_diverge_more(model: Llama, windows: list[Window]) -> None:
    """int8, rot-4-4 and int3 have less bits in this order, and more divergence in both ways."""
    found = measure(model, windows[1], trial(*NAMES))
    assert found.stored_bytes == sorted(found.stored_bytes, reverse=True)
    kl = np.array([scores.kl for (scores,) in found.scores])
    assert (np.diff(kl, axis=0) > 0).all() and kl[-1].min() > 100 * kl[1].max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_blocks_that_decode(model: Llama, windows: list[Window], name: str) -> None:
    """Stored bytes are those of whole blocks, which alone give the values back; the last is short."""
    plan = trial(name)
    raw = prefill(model, windows[0].prefix).raw
    stored, values = coded(plan.codecs[0], raw, plan, model.spec)
    back = [decode(data.tobytes(), BY_NUMBER).block for data in stored]
    shapes = [KVShape(model.spec.geometry("bfloat16"), tokens) for tokens in (40, 40, 16)]
    parts = [raw_of(block, shape) for block, shape in zip(back, shapes, strict=True)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=2), values)
    assert measure(model, windows[0], plan).stored_bytes == [sum(len(data) for data in stored)]
    assert (name == "identity") == np.array_equal(values, raw)


class Noting:
    """Identity that notes the position of each block."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(IDENTITY, name)

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        self.seen.append(context.position)
        return IDENTITY.encode(raw, shape, context)


def test_blocks_know_their_position(model: Llama, windows: list[Window]) -> None:
    """Each block is encoded with the position of its first token."""
    codec = Noting()
    coded(codec, prefill(model, windows[0].prefix).raw, trial(), model.spec)
    assert codec.seen == [0, 40, 80]


def scores(nll: float, kl: float, same: float, right: float) -> Scores:
    return Scores(*(np.array([figure, figure / 2]) for figure in (nll, kl, same, right)))


def test_rows_hold_the_figures_of_papers() -> None:
    """tok is 5.68 (exp(4 nats) - 1) of the paired loss, and its error follows from the loss's."""
    exact = scores(1.0, 0.0, 1.0, 0.75)
    mine = [scores(1.0 + off, kl, 0.5, 0.25) for off, kl in ((0.01, 0.002), (0.03, 0.004))]
    outcomes = [Outcome(exact, [[one]], [300]) for one in mine]
    (row,) = rows_of(trial("int8"), Measured(outcomes, 800, 4, [1.0]), [Speed(2.0, 3.0)])
    assert row == {
        "codec": "int8",
        "tokens": None,
        "bits": 6.0,
        "ratio": pytest.approx(16 / 6),
        "restore_tok": pytest.approx(5.68 * (math.exp(0.08) - 1)),
        "restore_tok_se": pytest.approx(5.68 * math.exp(0.08) * 4 * 0.01),
        "restore_kl": pytest.approx(0.003),
        "restore_kl_se": pytest.approx(0.001),
        "restore_top1": 0.5,
        "recall_tok": pytest.approx(5.68 * (math.exp(0.04) - 1)),
        "recall_tok_se": pytest.approx(5.68 * math.exp(0.04) * 4 * 0.005),
        "recall_kl": pytest.approx(0.0015),
        "recall_kl_se": pytest.approx(0.0005),
        "recall_top1": 0.125,
        "encode_gbps": 2.0,
        "decode_gbps": 3.0,
    }
    assert exact_of(outcomes) == {"restore_nll": 1.0, "restore_top1": 0.75, "recall_nll": 0.5, "recall_top1": 0.375}
    (tokens,) = rows_of(trial("int8"), Measured(outcomes[:1], 400, 1, [1.0]), [Speed(2.0, 3.0)])
    assert tokens["restore_tok"] == pytest.approx(5.68 * (math.exp(0.01) - 1)) and tokens["restore_tok_se"] == 0


def test_only_scored_tokens_count(model: Llama, windows: list[Window]) -> None:
    """All tokens of restore count, and of recall those after the first 8."""
    window = windows[0]
    own = predictions(model, prefill(model, window.prefix), window.ways[:, :-1])
    found = measure(model, window, trial("int3")).exact
    nll = -np.take_along_axis(own, window.ways[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.nll, [nll[0].mean(), nll[1, 8:].mean()], rtol=1e-6)
    assert (found.kl == 0).all() and (found.same == 1).all()


def test_a_policy_that_keeps_all_changes_nothing(
    model: Llama, windows: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a policy of all tokens the predictions are those of plain attention, but for rounding."""
    prefix, ways = prefill(model, windows[0].prefix), windows[0].ways[:, :-1]
    # Another order of sums can change the last bit of a later layer's bfloat16: here it is left out.
    narrow = floats_of
    monkeypatch.setattr(runs, "rounded", lambda values, _: values)
    monkeypatch.setattr(runs, "floats_of", lambda raw, dtype: narrow(raw, dtype) if raw.dtype == np.uint16 else raw)
    plain = predictions(model, prefix, ways)
    for name in ("h2o", "quest", "snapkv"):
        np.testing.assert_allclose(predictions(model, prefix, ways, TokenChoice(name, 1.0)), plain, atol=1e-4)


def test_policies_cross_codecs(model: Llama, windows: list[Window]) -> None:
    """Each codec has a row under each policy: dropped tokens save bytes, and unread pages save none."""
    plan = replace(trial("identity", "int8"), policies=(None, TokenChoice("h2o", 0.25), TokenChoice("quest", 0.25)))
    plan.check(model.spec)
    found = [measure(model, windows[0], plan)]
    kept = [kept_share(policy, model.spec, 96) for policy in plan.policies]
    assert kept == [1.0, 0.25, 1.0]
    rows = rows_of(plan, Measured(found, values_of(model), 4, kept), [Speed(1, 1)] * 2)
    assert [(row["codec"], row["tokens"]) for row in rows] == [
        (codec, policy) for codec in ("identity", "int8") for policy in (None, "h2o:0.25", "quest:0.25")
    ]
    for every, dropped, read in (rows[:3], rows[3:]):
        assert dropped["bits"] == every["bits"] / 4 and read["bits"] == every["bits"]
        assert min(dropped["restore_kl"], read["restore_kl"]) > 10 * every["restore_kl"]


def test_the_front_has_what_nothing_beats() -> None:
    """A row is on the front unless another is at most as large and diverges at most as much in both ways."""

    def row(bits: float, restore: float, recall: float) -> Any:
        return {"bits": bits, "restore_kl": restore, "recall_kl": recall}

    rows = [row(8, 0, 0), row(4, 1, 1), row(4, 1, 1), row(5, 1, 1), row(5, 2, 0.5), row(4, 2, 1)]
    assert front(rows) == [True, True, True, False, True, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_tokens": 0}, "block tokens: 0 is outside 1 to 96"),
        ({"block_tokens": 97}, "97 is outside"),
        ({"lengths": replace(SHORT, prefix=1000)}, "1024 positions, a window takes 1032"),
    ],
)
def test_impossible_trials_are_refused(model: Llama, change: dict[str, Any], words: str) -> None:
    """Before anything is computed: blocks longer than a prefix, windows longer than the model's positions."""
    with pytest.raises(InvalidArgument, match=words):
        replace(trial("int8"), **change).check(model.spec)


def test_codecs_that_cannot_are_refused(model: Llama) -> None:
    """Before anything is computed: a shape that a codec does not take, and a missing calibration."""
    with pytest.raises(Unsupported, match="head_dim 32"):
        trial("rot-4-4").check(replace(model.spec, head_dim=32))

    class Calibrated(Noting):
        is_calibrated = True

    codec: Codec = Calibrated()
    with pytest.raises(Unsupported, match="tierctl calibrate"):
        replace(trial(), codecs=[codec]).check(model.spec)
