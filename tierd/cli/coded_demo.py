"""`tierd demo --codec NAME`: the demo's conversation over encoded blocks, and what the codec changes.

Pages are float16, and encoded blocks lie in host memory and on NVMe. A run without a cache computes
with the same pages. Under an exact codec the demo fails if any token differs. Under a lossy one the
table has the count of equal tokens, and the perplexity of each turn's passage after decoded blocks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from tierd.cli.demo import CONFIG, SCENES, Say, Scene, Stage, Turn, load_model, shown_steps, source_of
from tierd.cli.exits import ExitCode
from tierd.cli.figures import human_bytes, human_count, human_seconds
from tierd.cli.render import Cell, Column, new_console, show_table
from tierd.codecs.coding import Coding, coding_of
from tierd.codecs.named import ALL, codec_named
from tierd.errors import ConfigError, InvalidArgument
from tierd.testing import Daemon
from tierd.worker.coded_pages import CodedPages
from tierd.worker.model import Llama
from tierd.worker.pages import page_shape
from tierd.worker.report import Request
from tierd.worker.tierd_pages import TierdPages, namespace_spec

KV_DTYPE = "float16"
CODED_CONFIG = CONFIG.partition("[[device]]")[0] + "[[host]]" + CONFIG.partition("[[host]]")[2]
CODED_SCENES = (
    SCENES[0],
    Scene("host memory", Stage.stay, "host.0"),
    *(scene for scene in SCENES if scene.tier in ("nvme.0", "*")),
)
COLUMNS = (
    Column("served from", style="bold"),
    Column("prompt", right=True),
    Column("reused", right=True),
    Column("stored", right=True),
    Column("of", right=True, spare=1),
    Column("first token", right=True),
    Column("computed again", right=True, spare=2),
    Column("same tokens", right=True),
    Column("perplexity", right=True),
)


@dataclass(frozen=True, slots=True)
class CodedTurn:
    """stored_bytes: of the conversation's blocks after the turn; plain_bytes: before encoding.

    cached, plain: natural logarithms of the probabilities of the passage's tokens, float64 [n]:
    after decoded blocks, and after computed ones. Both are empty in the first turn.
    """

    turn: Turn
    stored_bytes: int
    plain_bytes: int
    cached: NDArray[np.float64]
    plain: NDArray[np.float64]

    @property
    def same_tokens(self) -> int:
        """Tokens of the answer that equal those of a run without a cache, from the first on."""
        cached, plain = self.turn.cached.tokens, self.turn.plain.tokens
        return next((i for i, pair in enumerate(zip(cached, plain, strict=True)) if pair[0] != pair[1]), len(plain))


class CodedStage(Stage):
    """A Stage whose blocks are encoded. Raises ConfigError for a codec that the model's KV does not fit."""

    def __init__(self, daemon: Daemon, model: Llama, *, name: str, codec: str) -> None:
        self._shape = page_shape(model, kv_dtype=KV_DTYPE)
        self.coding: Coding = coding_of(
            codec, "", geometry=self._shape.geometry, tokens_per_block=self._shape.tokens_per_block
        )
        super().__init__(daemon, model, name=name)

    def _source(self, model: Llama, name: str) -> TierdPages:
        spec = namespace_spec(model, self._shape, name=name)
        return CodedPages(self._client, spec, shape=self._shape, coding=self.coding)

    def measure(self, scene: Scene, say: Say) -> CodedTurn:
        """Plays one turn; then computes the probabilities of its passage with both engines."""
        before = len(self._conversation.tokens)
        turn = self.play(scene, say)
        prompt = tuple(self._conversation.tokens[: turn.cached.prompt_tokens])
        passage = prompt[before:] if turn.cached.reused_tokens else ()
        say(f"{scene.source}: the passage's perplexity")
        found = [
            engine.score(Request(prompt[:before]), passage) if passage else np.zeros(0)
            for engine in (self._cached, self._plain)
        ]
        return CodedTurn(turn, self._stored_bytes(), self._shape.bytes_of(len(self._said)), *found)

    @property
    def _said(self) -> list[int]:
        """The tokens that have blocks."""
        return self._conversation.tokens[: self._marks[-1]]

    def _stored_bytes(self) -> int:
        hashes = self._namespace.hash(self._said, with_tail=True)
        with self._client.acquire(self._namespace, hashes, tokens=len(self._said)) as lease:
            return int(lease.handles["length"].sum())


def run_coded_demo(folder: Path | None, *, codec: str, keep: bool) -> int:
    """Runs the demo with a codec. Returns its exit code. folder: a checkpoint, or None for random weights.

    Raises ConfigError for a codec that is unknown or needs a calibration.
    """
    check_codec(codec)
    console = new_console()
    with ExitStack() as stack:
        say = stack.enter_context(shown_steps(console, total=3 * len(CODED_SCENES) + 2))
        say("making the model")
        model = load_model(folder)
        say("starting a daemon with two tiers: host, NVMe")
        root = Path(tempfile.mkdtemp(prefix="tierd-demo-")) if keep else None
        daemon = stack.enter_context(Daemon(CODED_CONFIG, root=root))
        name = folder.name if folder else "random"
        stage = stack.enter_context(CodedStage(daemon, model, name=name, codec=codec))
        turns = [stage.measure(scene, say) for scene in CODED_SCENES]
    console.print()
    show_table(console, COLUMNS, [row(turn) for turn in turns], empty="no turns")
    console.print()
    if root:
        console.print(f"log and directories: {root}", soft_wrap=True)
    faults = [fault for turn in turns if (fault := fault_of(turn, is_exact=stage.coding.codec.is_exact))]
    for fault in faults:
        console.print(Text(f"FAILED: {fault}", style="bold red"), soft_wrap=True)
    if not faults:
        console.print(Text(summary(turns, stage.coding), style="green"), soft_wrap=True)
        if folder is None:
            console.print("note: these weights are random; --model FOLDER shows what the codec costs a trained model")
    return ExitCode.FAILED if faults else ExitCode.OK


def check_codec(name: str) -> None:
    """Checks before anything starts that the demo can use a codec. Raises ConfigError."""
    try:
        codec = codec_named(name)
    except InvalidArgument as error:
        raise ConfigError(str(error)) from None
    if codec.is_calibrated:
        able = ", ".join(each.name for each in ALL if not each.is_calibrated)
        raise ConfigError(f"codec {name} needs a calibration, which the demo does not take; use one of {able}")


def fault_of(coded: CodedTurn, *, is_exact: bool) -> str:
    """The turn's fault; "" if none. Other tokens are a fault under an exact codec, or without reuse."""
    turn = coded.turn
    if is_exact or not turn.cached.reused_tokens:
        return turn.fault
    return "" if turn.is_from_tier() else turn.fault


def row(coded: CodedTurn) -> list[Cell]:
    """A turn's cells, in the order of COLUMNS."""
    cached, plain = coded.turn.cached, coded.turn.plain
    return [
        source_of(coded.turn),
        human_count(cached.prompt_tokens),
        human_count(cached.reused_tokens),
        human_bytes(coded.stored_bytes),
        human_bytes(coded.plain_bytes),
        human_seconds(cached.ttft_s),
        human_seconds(plain.ttft_s),
        f"{coded.same_tokens} of {len(plain.tokens)}",
        changed([coded]),
    ]


def changed(turns: Sequence[CodedTurn]) -> str:
    """`6.12 (+0.31 %)`: perplexity after decoded blocks, and its change; "-" without passages."""
    cached, plain = (np.concatenate(parts) for parts in zip(*((t.cached, t.plain) for t in turns), strict=True))
    if not len(cached):
        return "-"
    perplexity = float(np.exp(-cached.mean()))
    return f"{perplexity:.2f} ({perplexity / float(np.exp(-plain.mean())) - 1:+.2%})".replace("%", " %")


def summary(turns: Sequence[CodedTurn], coding: Coding) -> str:
    """The last line."""
    last, count = turns[-1], sum(len(turn.plain) for turn in turns)
    same, answers = sum(turn.same_tokens for turn in turns), sum(len(turn.turn.plain.tokens) for turn in turns)
    share = 100 * last.stored_bytes / last.plain_bytes
    return (
        f"codec {coding.text}: {share:.0f} % of the bytes; {same} of {answers} generated tokens equal those without a "
        f"cache; perplexity of {count} tokens: {changed(turns)}"
    )
