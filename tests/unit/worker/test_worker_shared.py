"""Passes of sequences that share pages: the tokens are the same, and groups are found where they pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.unit.worker.conftest import StoringPages
from tierd.kernels import Attended, PagedBatch, paged_attention
from tierd.worker import sequences
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.report import Report, Request
from tierd.worker.tokens.choice import TokenChoice

NewSource = Callable[..., StoringPages]
PROMPT = tuple(int(t) for t in np.random.default_rng(1).integers(0, 64, 50))


class Noting:
    """The reference, which notes what each call was told to share: sequences and pages."""

    def __init__(self) -> None:
        self.shared: list[list[tuple[int, int]]] = []

    def __call__(
        self, q: Any, pages: Sequence[Any], batch: PagedBatch, *, scale: float | None = None, with_mass: bool = False
    ) -> Attended:
        self.shared.append([(len(one.sequences), one.pages) for one in batch.shared])
        return paged_attention(q, pages, batch, scale=scale, with_mass=with_mass)


def served(
    model: Llama, source: StoringPages, requests: Sequence[Request], **options: Any
) -> tuple[list[Report], list[list[tuple[int, int]]]]:
    """Reports, and what the calls shared."""
    noting = Noting()
    with Engine(model, source, options=EngineOptions(**options), attention=noting) as engine:
        reports = engine.generate(requests)
    assert source.held == 0
    return reports, noting.shared


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_forks_share_their_prompt(
    model: Llama, new_source: NewSource, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Samples of one prompt attend to its pages together, and draw the tokens that they draw apart."""
    request = Request(PROMPT, 12, temperature=1.0, samples=5, seed=3)
    want, apart = served(model, new_source(dtype=dtype), [request])
    monkeypatch.setattr(sequences, "SAVED_TOKENS", 4 * 48)
    got, shared = served(model, new_source(dtype=dtype), [request])
    assert [report.tokens for report in got] == [report.tokens for report in want]
    assert len({tuple(report.tokens) for report in got}) == 5
    assert not any(apart)
    assert shared[-1] == [(5, 12)]


def test_what_saves_too_little_is_not_shared(
    model: Llama, new_source: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks whose prompt saves fewer tokens than the rule says attend apart."""
    monkeypatch.setattr(sequences, "SAVED_TOKENS", 4 * 48 + 1)
    _, shared = served(model, new_source(), [Request(PROMPT, 6, temperature=1.0, samples=5)])
    assert not any(shared)


def test_requests_share_a_stored_prefix(model: Llama, new_source: NewSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that begin with the same stored blocks share them, and one without them stays apart."""
    requests = [Request((*PROMPT, *more), 9) for more in ((1, 2, 3), (4,), (5, 6))] + [Request(PROMPT[7:], 9)]
    want, _ = served(model, new_source(), requests)
    monkeypatch.setattr(sequences, "SAVED_TOKENS", 1)
    source = new_source()
    served(model, source, [Request(PROMPT, 1)])
    got, shared = served(model, source, requests)
    assert [report.tokens for report in got] == [report.tokens for report in want]
    assert [(3, 12)] in shared


def test_a_page_with_the_query_is_not_shared(
    model: Llama, new_source: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt that is stored whole, the page with its last token is each sequence's own."""
    source, noting = new_source(), Noting()
    served(model, source, [Request(PROMPT[:48], 1)])
    monkeypatch.setattr(sequences, "SAVED_TOKENS", 1)
    with Engine(model, source, attention=noting) as engine:
        both = [engine.open(Request(PROMPT[:48], 1)) for _ in range(2)]
        engine.compute(both)
        assert noting.shared == [[(2, 11)]] * 2
        monkeypatch.setattr(sequences, "SAVED_TOKENS", 1 << 40)
        alone = engine.begin(Request(PROMPT[:48], 1))
        for sequence in both:
            np.testing.assert_allclose(sequence.logits, alone.logits, rtol=0, atol=1e-4)
        for sequence in (*both, alone):
            engine.end(sequence)


def test_measured_attention_and_token_policies_are_not_shared(
    model: Llama, new_source: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that measure attention, and sequences of a token policy, attend to all of their pages apart."""
    request, choice = Request(PROMPT, 6, samples=3), TokenChoice("quest", 0.5)
    policy = Request(PROMPT, 6, samples=3, token_policy=choice)
    plain = [
        served(model, new_source(), [one], **more)[0]
        for one, more in ((request, {"measure_attention": True}), (policy, {}))
    ]
    monkeypatch.setattr(sequences, "SAVED_TOKENS", 1)
    source = new_source()
    measured, shared = served(model, source, [request], measure_attention=True)
    chosen, beside = served(model, new_source(), [policy])
    assert not any(shared) and not any(beside)
    assert [[report.tokens for report in reports] for reports in (measured, chosen)] == [
        [report.tokens for report in reports] for reports in plain
    ]
    assert source.mass
