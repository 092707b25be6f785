"""The demo's claims are true: it reports its own faults, and its prompts fit the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.cli.coded_demo import CodedTurn, changed, fault_of
from tierd.cli.conversation import BLOCK_TOKENS, Conversation, Plan
from tierd.cli.demo import SCENES, Scene, Stage, Turn, verdict
from tierd.cli.render import new_console
from tierd.worker.report import Report

GOOD = Report(prompt_tokens=100, reused_tokens=90, tier_tokens={"host.0": 90}, ttft_s=0.1, tokens=[1, 2, 3])
PLAIN = Report(prompt_tokens=100, ttft_s=1.0, tokens=[1, 2, 3])


def turn(tier: str, **changes: object) -> Turn:
    """A turn expected from this tier, with changes to its report."""
    return Turn(Scene("a place", Stage.stay, tier), replace(GOOD, **changes), PLAIN)  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", ["host.0", "*"])
def test_a_turn_as_promised_has_no_fault(tier: str) -> None:
    """Equal tokens, served from the named tier, give exit code 0."""
    assert turn(tier).fault == ""
    assert verdict(new_console(), [turn(tier)]) == 0


@pytest.mark.parametrize(
    "faulty",
    [
        turn("host.0", tokens=[1, 2, 4]),
        turn("host.0", tokens=[1, 2]),
        turn("nvme.0"),
        turn("*", tier_tokens={}),
        turn("", tier_tokens={"device.0": 10}),
        turn("host.0", tier_tokens={"host.0": 10, "device.0": 80}),
    ],
    ids=["other-token", "fewer-tokens", "other-tier", "nothing", "not-cold", "mostly-elsewhere"],
)
def test_a_turn_that_differs_fails_loudly(faulty: Turn, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong tokens or the wrong source give exit code 1 and a line that begins with FAILED."""
    assert verdict(new_console(), [turn("host.0"), faulty]) == 1
    assert "FAILED: a place" in capsys.readouterr().out


@given(st.integers(600, 100_000))
def test_prompts_keep_within_the_model(positions: int) -> None:
    """Prompts and answers fit the model's positions, extend the conversation and end on block boundaries."""
    plan = Plan.within(positions, turns=len(SCENES))
    conversation = Conversation(plan, turns=len(SCENES))
    said: list[int] = []
    for _ in SCENES:
        prompt = conversation.ask()
        assert list(prompt[: len(said)]) == said
        conversation.add_answer([7] * plan.answer)
        said = list(conversation.tokens)
        assert (len(said) - 1) % BLOCK_TOKENS == 0
    assert len(said) <= positions


def coded(base: Turn, cached: float = -1.0, plain: float = -1.0) -> CodedTurn:
    """A turn whose passage has tokens of these log-probabilities."""
    return CodedTurn(base, 50, 100, np.full(4, cached), np.full(4, plain))


def test_a_lossy_codec_may_change_tokens_and_nothing_else() -> None:
    """Other tokens are a fault under an exact codec, or in a turn without reuse; another tier always is."""
    other, elsewhere = coded(turn("host.0", tokens=[1, 9, 3])), coded(turn("nvme.0"))
    assert "tokens are" in fault_of(other, is_exact=True) and not fault_of(other, is_exact=False)
    assert fault_of(elsewhere, is_exact=False) and fault_of(elsewhere, is_exact=True)
    cold = coded(turn("", reused_tokens=0, tier_tokens={}, tokens=[1, 9, 3]))
    assert "tokens are" in fault_of(cold, is_exact=False)
    assert (other.same_tokens, elsewhere.same_tokens) == (1, 3)


def test_perplexity_is_of_the_passages_of_all_turns() -> None:
    """The change is that of the mean over all tokens; a turn without a passage has none."""
    first = CodedTurn(turn("host.0"), 50, 100, np.zeros(0), np.zeros(0))
    assert changed([first]) == "-"
    assert changed([first, coded(turn("host.0"), cached=-1.1)]) == "3.00 (+10.52 %)"
    assert changed([coded(turn("host.0"), cached=-1.1), coded(turn("host.0"), cached=-0.9)]) == "2.72 (+0.00 %)"
