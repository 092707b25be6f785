"""Decode steps over far prompts: the granules that a query attends to, against all tokens.

    OPENBLAS_NUM_THREADS=1 python -m tools.bench far

Two sequences continue one stored prompt of random keys in host memory, and take their steps in
turns. One reads all of it in place, the other 32 granules. The text rows tell how many granules a
trained model finds in its hot buffer, and how much of its attention they have.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tierd.client import Client
from tierd.testing import Daemon
from tierd.worker.checkpoint import open_checkpoint, random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.far import FarChoice
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, page_shape
from tierd.worker.report import Request
from tierd.worker.sequences import LiveSequence
from tierd.worker.spec import LlamaSpec
from tierd.worker.tierd_pages import TierdPages
from tools.bench.measure import FULL, Effort
from tools.bench.rows import Row, row_of

SPEC = LlamaSpec(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=256,
    layers=2,
    q_heads=8,
    kv_heads=2,
    head_dim=64,
    max_positions=1 << 17,
    tied=True,
)
FAR = FarChoice(granules=32)
PAGE_TOKENS = 64
CONFIG = """\
[server]
session_share = 1.0
[[host]]
capacity = "320 MiB"
"""
TEXT = Path(__file__).resolve().parents[3] / "shared" / "models" / "tiny-llama"
TEXT_PROMPT, TEXT_ANSWER = 960, 48


def rows(effort: Effort = FULL) -> list[Row]:
    """`far_step_{4,16,64}K`: processor seconds of a step against those of a dense one.

    `far_text_hits`: the share of chosen granules that were in the hot buffer. `far_text_mass`: the
    median share of attention that is read. A quarter of the granules is chosen, and half of them
    fit the buffer.
    """
    model = Llama(random_checkpoint(SPEC, seed=1))
    with Daemon(CONFIG) as daemon, Client(daemon.target) as client:
        source = TierdPages(client, model, name="far", shape=page_shape(model, tokens_per_block=PAGE_TOKENS))
        with Engine(model, source) as engine:
            sizes = effort.pick((4096, 16_384, 65_536), (4096,))
            found = [_step_row(engine, stored(source, tokens), runs=effort.at_least(31)) for tokens in sizes]
    return [*found, *(_text_rows() if (TEXT / "model.safetensors").exists() else ())]


def stored(source: TierdPages, tokens: int) -> tuple[int, ...]:
    """The tokens of a stored prompt with random keys and values."""
    rng = np.random.default_rng(tokens)
    prompt, after = tuple(rng.integers(0, SPEC.vocab_size, tokens).tolist()), None
    for start in range(0, tokens, PAGE_TOKENS):
        (page,) = source.reserve(1)
        page.array[:] = rng.standard_normal(page.array.shape, dtype=np.float32)
        (after,) = source.commit([page], prompt[start : start + PAGE_TOKENS], after=after)
    return prompt


def _step_row(engine: Engine, prompt: tuple[int, ...], *, runs: int) -> Row:
    sequences = [engine.begin(Request(prompt, runs + 2, far=far)) for far in (None, FAR)]
    engine.pick(sequences)
    engine.step(sequences)  # makes the bounds
    dense, far = zip(*(_turn(engine, sequences) for _ in range(runs)), strict=True)
    for sequence in sequences:
        sequence.table.release()
    read = sequences[1].report.far
    meaning = (
        f"a decode step over a far prompt, {FAR.granules} granules of {len(prompt) // 64}, {read.hits / read.chosen:.0%}"
        " of them in the hot buffer, against all tokens"
    )
    return row_of(f"far_step_{len(prompt) >> 10}K", far, unit="s", limits=dense, meaning=meaning)


def _turn(engine: Engine, sequences: list[LiveSequence]) -> Iterator[float]:
    """Processor seconds of one step of each sequence: a busy machine does not change them much."""
    for sequence in sequences:
        begun = time.process_time()
        engine.step([sequence])
        yield time.process_time() - begun


def _text_rows() -> list[Row]:
    model, text = Llama(open_checkpoint(TEXT)), (TEXT / "eval.txt").read_bytes()
    hits, masses = [], []
    for start in range(0, len(text) - TEXT_PROMPT, len(text) // 3):
        prompt = (256, *text[start : start + TEXT_PROMPT - 1])
        granules = TEXT_PROMPT // 64
        far = FarChoice(-(-granules // 4), granules // 2 * 64)
        with Engine(model, LocalPages(page_shape(model)), options=EngineOptions(measure_attention=True)) as engine:
            report = engine.generate([Request(prompt, TEXT_ANSWER, far=far)])[0].far
        hits.append(report.hits / report.chosen)
        masses.append(report.chosen_mass)
    names = {"far_text_hits": (hits, "chosen granules found in the hot buffer, of all chosen")}
    names["far_text_mass"] = masses, "median share of attention on a quarter of the granules and the latest tokens"
    return [
        row_of(name, values, unit="of 1", limits=[1.0] * len(values), meaning=f"tiny-llama on text: {meaning}")
        for name, (values, meaning) in names.items()
    ]
