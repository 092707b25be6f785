"""A whole measurement and its report, as `tierctl quality --json` prints it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple, TypedDict

from tierd.codecs.values import KVShape, bytes_of
from tierd.quality.measure import Show, Trial, cut, kept_share, measure_all
from tierd.quality.rows import Exact, Measured, Row, exact_of, rows_of
from tierd.quality.runs import DTYPE, prefill
from tierd.quality.speed import Sample, codec_speed, copy_gbps
from tierd.quality.windows import Window, read_text, windows_of
from tierd.worker.checkpoint import open_checkpoint
from tierd.worker.model import Llama


class Report(TypedDict):
    """calibration: its hash in hexadecimal; None without one. copy_gbps: of a plain copy, see speed.py."""

    model: str
    text: str
    windows: int
    block_tokens: int
    calibration: str | None
    copy_gbps: float
    exact: Exact
    rows: list[Row]


class Job(NamedTuple):
    """model: a checkpoint folder. text: see windows.read_text. windows: their number."""

    model: Path
    text: Path
    windows: int


def report_of(job: Job, trial: Trial, *, jobs: int = 1, show: Show = lambda _: None) -> Report:
    """Measures. jobs: processes, each with its own copy of the model. show: called with the number
    of windows done.

    Raises ConfigError, InvalidArgument, Unsupported, CorruptRecord, TierFailed, OSError.
    """
    spec = open_checkpoint(job.model).spec
    trial.check(spec)
    text = read_text(job.text, job.model, spec.vocab_size)
    windows = windows_of(text, job.windows, trial.lengths)
    sample = sample_of(open_model(job.model), windows[0], trial)
    speeds = [codec_speed(codec, sample, trial.calibration) for codec in trial.codecs]
    opened = functools.partial(open_model, job.model)
    outcomes = measure_all(opened, windows, trial, jobs=jobs, show=show)
    values = len(windows) * KVShape(spec.geometry(DTYPE), trial.lengths.prefix).values
    kept = [kept_share(policy, spec, trial.lengths.prefix) for policy in trial.policies]
    return Report(
        model=str(job.model),
        text=str(job.text),
        windows=job.windows,
        block_tokens=trial.block_tokens,
        calibration=trial.calibration.hash.hex() if trial.calibration else None,
        copy_gbps=copy_gbps(sample),
        exact=exact_of(outcomes),
        rows=rows_of(trial, Measured(outcomes, values, text.per_token, kept), speeds),
    )


def open_model(folder: Path) -> Llama:
    """The model of a checkpoint folder, on numpy. Raises ConfigError."""
    return Llama(open_checkpoint(folder))


def sample_of(model: Llama, window: Window, trial: Trial) -> Sample:
    """The full blocks of a window's prefix, to measure speeds on."""
    shape = KVShape(model.spec.geometry(DTYPE), trial.block_tokens)
    blocks = cut(prefill(model, window.prefix).raw, trial.block_tokens)
    full = [(start, bytes_of(values, shape)) for start, values in blocks if values.shape[2] == shape.tokens]
    return Sample(full, shape)
