"""Codecs measured over windows: every stored byte, and what a model predicts over decoded blocks.

Every codec sees the same windows. A window's prefix is computed once, and so are the predictions
over its own KV, with which those over decoded blocks are compared.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import block
from tierd.codecs.block import Codec, Context
from tierd.codecs.calibration import Calibration
from tierd.codecs.values import Bytes, Floats, KVShape, Raw, bytes_of, raw_of
from tierd.errors import InvalidArgument, TierFailed
from tierd.linux.children import end_with_parent
from tierd.quality.runs import DTYPE, predictions, prefill
from tierd.quality.windows import USUAL, Lengths, Window
from tierd.worker.model import Llama
from tierd.worker.spec import LlamaSpec
from tierd.worker.tokens.choice import TokenChoice
from tierd.worker.tokens.policy import Place

BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Trial:
    """Codecs and policies to measure, each codec under each policy.

    policies: of tokens that a continuation attends to; None: all. block_tokens: tokens of a block;
    the last one of a prefix may be shorter.
    """

    codecs: Sequence[Codec]
    policies: Sequence[TokenChoice | None] = (None,)
    calibration: Calibration | None = None
    block_tokens: int = BLOCK_TOKENS
    lengths: Lengths = USUAL

    def check(self, spec: LlamaSpec) -> None:
        """Raises InvalidArgument, Unsupported if a codec cannot encode blocks of this model."""
        if not 1 <= self.block_tokens <= self.lengths.prefix:
            raise InvalidArgument(
                f"block tokens: {self.block_tokens} is outside 1 to {self.lengths.prefix}, the tokens of a prefix"
            )
        if spec.max_positions < self.lengths.tokens:
            raise InvalidArgument(
                f"model: it has {spec.max_positions} positions, a window takes {self.lengths.tokens}; take a model "
                "with more"
            )
        for policy in filter(None, self.policies):
            policy.checked()
        shape = KVShape(spec.geometry(DTYPE), self.block_tokens)
        zeros = np.zeros(shape.block_bytes, np.uint8)
        for codec in self.codecs:
            block.encode(codec, zeros, shape, Context(0, self.calibration))


def kept_share(policy: TokenChoice | None, spec: LlamaSpec, tokens: int) -> float:
    """The share of a prefix of so many tokens that a policy keeps; reading few pages drops none."""
    if policy is None:
        return 1.0
    made = policy.policy(Place(0, spec.kv_heads, tokens, 1))
    return 1.0 if made.reads_pages else made.budget.of(tokens, prompt=tokens, least=made.least) / tokens


def policy_name(policy: TokenChoice) -> str:
    """As `tierctl quality --tokens` takes it."""
    return f"{policy.name}:{policy.tokens or format(policy.keep, 'g')}"


class Blocks(NamedTuple):
    """Encoded blocks of a prefix, and the values that they decode to."""

    coded: Sequence[Bytes]
    raw: Raw


class Scores(NamedTuple):
    """Of a window's continuations, means over their scored tokens: float64 [2], restore and recall.

    nll: nats. kl: nats, of the predictions from those over the exact KV.
    same: share whose likeliest token is that over the exact KV. right: share whose is the next one.
    """

    nll: NDArray[np.float64]
    kl: NDArray[np.float64]
    same: NDArray[np.float64]
    right: NDArray[np.float64]


class Outcome(NamedTuple):
    """One window. exact: over its own KV. scores: of each codec under each policy. stored_bytes: of
    each codec."""

    exact: Scores
    scores: Sequence[Sequence[Scores]]
    stored_bytes: Sequence[int]


def cut(raw: Raw, tokens: int) -> Iterator[tuple[int, Raw]]:
    """The blocks of a prefix, each with the position of its first token."""
    for start in range(0, raw.shape[2], tokens):
        yield start, raw[:, :, start : start + tokens]


def coded(codec: Codec, raw: Raw, trial: Trial, spec: LlamaSpec) -> Blocks:
    """A prefix encoded in blocks, and decoded."""
    known = {trial.calibration.hash: trial.calibration} if trial.calibration else {}
    found, back = [], np.empty_like(raw)
    for start, values in cut(raw, trial.block_tokens):
        shape = KVShape(spec.geometry(DTYPE), values.shape[2])
        data = block.encode(codec, bytes_of(values, shape), shape, Context(start, trial.calibration))
        back[:, :, start : start + shape.tokens] = raw_of(block.decode(data, {codec.number: codec}, known).block, shape)
        found.append(data)
    return Blocks(found, back)


def measure(model: Llama, window: Window, trial: Trial) -> Outcome:
    """One window under every codec."""
    prefix, ways = prefill(model, window.prefix), window.ways[:, :-1]
    own = predictions(model, prefix, ways)
    scores, stored = [], []
    for codec in trial.codecs:
        blocks = coded(codec, prefix.raw, trial, model.spec)
        read = prefix._replace(raw=blocks.raw)
        found = (predictions(model, read, ways, policy) for policy in trial.policies)
        scores.append([scored(one, own, window, trial) for one in found])
        stored.append(sum(len(data) for data in blocks.coded))
    return Outcome(scored(own, own, window, trial), scores, stored)


def scored(found: Floats, own: Floats, window: Window, trial: Trial) -> Scores:
    """Scores of log-probabilities [2, tokens, vocab] against those over the exact KV."""
    following = window.ways[:, 1:]
    nll = -np.take_along_axis(found, following[..., None], axis=-1)[..., 0]
    kl = (np.exp(own) * (own - found)).sum(axis=-1)
    likely = found.argmax(axis=-1)
    each = (nll, kl, likely == own.argmax(axis=-1), likely == following)
    from_ = (0, trial.lengths.unscored)
    return Scores(*(np.array([part[way, from_[way] :].mean(dtype=np.float64) for way in (0, 1)]) for part in each))


Show = Callable[[int], None]
"""Called with the number of windows done."""


def measure_all(
    opened: Callable[[], Llama], windows: Sequence[Window], trial: Trial, *, jobs: int, show: Show = lambda _: None
) -> list[Outcome]:
    """The outcomes of all windows, in their order; any number of jobs gives the same figures.

    opened: loads the model; with several jobs (processes) it is called in each, so it can be
    pickled. Raises TierFailed if a process dies.
    """
    if min(jobs, len(windows)) > 1:
        return _in_processes(opened, windows, trial, jobs=min(jobs, len(windows)), show=show)
    model, outcomes = opened(), []
    for window in windows:
        outcomes.append(measure(model, window, trial))
        show(len(outcomes))
    return outcomes


# -- processes

_held: list[tuple[Llama, Trial]] = []


def _begin(opened: Callable[[], Llama], trial: Trial) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent()
    _held[:] = [(opened(), trial)]


def _work(window: Window) -> Outcome:
    model, trial = _held[0]
    return measure(model, window, trial)


def _in_processes(
    opened: Callable[[], Llama], windows: Sequence[Window], trial: Trial, *, jobs: int, show: Show
) -> list[Outcome]:
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin, initargs=(opened, trial))
    try:
        futures = [pool.submit(_work, window) for window in windows]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            show(done)
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise TierFailed("quality: a process was killed, perhaps out of memory; use fewer --jobs") from error
    finally:
        pool.shutdown(cancel_futures=True)
