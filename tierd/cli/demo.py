"""`tierd demo`: a conversation over a long text, each turn served by another tier.

It runs a real daemon, crashes it once, and runs a real worker. It prints one table. It is no
benchmark: the figures depend on the machine's other load. Every turn is also computed without a
cache, and its tokens must be equal. A turn counts only if the tier in the table served it. The demo
owns the daemon, its directories and its memory, and removes them at the end.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.cli.conversation import BYTE_BOS, Conversation, Plan
from tierd.cli.exits import ExitCode
from tierd.cli.figures import human_bytes, human_count, human_seconds
from tierd.cli.render import Cell, Column, new_console, show_table
from tierd.client import Client
from tierd.errors import OperatorError
from tierd.testing import Daemon
from tierd.worker.checkpoint import open_checkpoint, random_checkpoint
from tierd.worker.engine import Engine
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.spec import LlamaSpec
from tierd.worker.tierd_pages import TierdPages

CONFIG = """\
[server]
session_share = 0.9

[[device]]
kind = "cpu"
capacity = "96 MiB"
segment = "2 MiB"

[[host]]
capacity = "160 MiB"
segment = "2 MiB"

[[nvme]]
capacity = "256 MiB"
segment = "4 MiB"
"""
RANDOM = LlamaSpec(
    vocab_size=260,
    hidden_size=512,
    intermediate_size=1408,
    layers=6,
    q_heads=8,
    kv_heads=4,
    head_dim=64,
    max_positions=4096,
)
"""Its prefill of 2,000 tokens takes seconds on two cores."""
RANDOM_SCALE = 0.05
"""Scale of its weights: large enough that each token depends on all tokens before it."""
SETTLE_TIMEOUT_S = 20.0
COLUMNS = (
    Column("served from", style="bold"),
    Column("prompt", right=True),
    Column("reused", right=True),
    Column("first token", right=True),
    Column("computed again", right=True),
    Column("speed-up", right=True, style="bold green"),
    Column("same tokens", spare=1),
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scene:
    """One turn: its source's name in the table, its preparation, its tier ("": none, "*": any)."""

    source: str
    prepare: Callable[[Stage], None]
    tier: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A scene's two runs: with the cache, and computed again without one."""

    scene: Scene
    cached: Report
    plain: Report

    @property
    def fault(self) -> str:
        """The turn's fault; empty if none."""
        if self.cached.tokens != self.plain.tokens:
            return f"{self.scene.source}: the tokens are {self.cached.tokens}, but {self.plain.tokens} without a cache"
        if not self.is_from_tier():
            found = dict(self.cached.tier_tokens) or "no token"
            return f"{self.scene.source}: the cache served {found} of {self.cached.prompt_tokens} tokens"
        return ""

    def is_from_tier(self) -> bool:
        """Whether the scene's tier served most of the prompt."""
        tiers, half = self.cached.tier_tokens, self.cached.prompt_tokens / 2
        if self.scene.tier == "*":
            return sum(tiers.values()) > half
        return tiers.get(self.scene.tier, 0) > half if self.scene.tier else not tiers


def run_demo(folder: Path | None, *, keep: bool) -> int:
    """Runs the demo. Returns its exit code. folder: a checkpoint, or None for random weights."""
    console = new_console()
    with ExitStack() as stack:
        say = stack.enter_context(shown_steps(console, total=2 * len(SCENES) + 2))
        say("making the model")
        model = load_model(folder)
        say("starting a daemon with three tiers: device (in host memory), host, NVMe")
        root = Path(tempfile.mkdtemp(prefix="tierd-demo-")) if keep else None
        daemon = stack.enter_context(Daemon(CONFIG, root=root))
        stage = stack.enter_context(Stage(daemon, model, name=folder.name if folder else "random"))
        turns = [stage.play(scene, say) for scene in SCENES]
    draw(console, model, turns)
    if root:
        console.print(f"log and directories: {root}", soft_wrap=True)
    return verdict(console, turns)


def load_model(folder: Path | None) -> Llama:
    """The checkpoint of a folder, or random weights. Raises OperatorError for too few tokens."""
    model = Llama(open_checkpoint(folder) if folder else random_checkpoint(RANDOM, scale=RANDOM_SCALE))
    if model.spec.vocab_size <= BYTE_BOS:
        raise OperatorError(
            f"{folder}: its vocabulary of {model.spec.vocab_size} tokens is below {BYTE_BOS + 1}; use tiny-llama, "
            "whose tokens are bytes"
        )
    return model


class Stage:
    """Daemon, worker and conversation; a context manager."""

    def __init__(self, daemon: Daemon, model: Llama, *, name: str) -> None:
        self._daemon = daemon
        plan = Plan.within(model.spec.max_positions, turns=len(SCENES))
        self._answer = plan.answer
        self._conversation = Conversation(plan, turns=len(SCENES))
        self._marks: tuple[int, ...] = ()
        self._client = Client(daemon.target, name="tierd demo")
        self._pages = self._source(model, name)
        self._namespace = self._pages.namespace
        self._cached = Engine(model, self._pages)
        self._plain = Engine(model, LocalPages(self._pages.shape))
        # A process's first long text takes 1.5 times as long.
        for engine in (self._plain, self._cached):
            engine.generate([Request((BYTE_BOS, *b"warm" * 64), max_new_tokens=2)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cached.close()
        self._client.close()

    def _source(self, model: Llama, name: str) -> TierdPages:
        """The pages of the engine with a cache."""
        return TierdPages(self._client, model, name=name)

    def play(self, scene: Scene, say: Say) -> Turn:
        """Runs one turn, with the cache and without."""
        scene.prepare(self)
        prompt = self._conversation.ask()
        say(f"{scene.source}: {len(prompt):,} tokens")
        cached = self._run(self._cached, prompt)
        say(f"{scene.source}: the same without a cache")
        plain = self._run(self._plain, prompt)
        self._conversation.add_answer(cached.tokens)
        self._marks = (*self._marks, cached.stored_tokens)
        return Turn(scene, cached, plain)

    def stay(self) -> None:
        """Changes nothing."""

    def leave_host(self) -> None:
        """Keeps all blocks in host memory and on NVMe, and none on the device."""
        self._flush()
        self._evict("device.0")
        self._fetch_to_host()

    def leave_nvme(self) -> None:
        """Keeps all blocks on NVMe alone."""
        self._flush()
        for tier in self._client.tiers[:-1]:
            self._evict(tier)

    def crash(self) -> None:
        """Kills the daemon with SIGKILL and starts a new one on its directories. The worker continues."""
        self._daemon.restart()

    def _run(self, engine: Engine, prompt: tuple[int, ...]) -> Report:
        return engine.generate([Request(prompt, max_new_tokens=self._answer, marks=self._marks)])[0]

    def _flush(self) -> None:
        with connect(self._daemon.target) as admin:
            admin.ask(pb.FlushRequest(deadline_s=SETTLE_TIMEOUT_S))

    def _evict(self, tier: str) -> None:
        """Empties a tier. Pages that the worker just released may stay pinned for a moment."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        with connect(self._daemon.target) as admin:
            while (left := admin.ask(pb.EvictRequest(tier=tier)).pinned) and time.monotonic() < deadline:
                time.sleep(0.01)
        if left:
            raise OperatorError(
                f"demo: {left} blocks in {tier} are still pinned after {SETTLE_TIMEOUT_S:g} s; run with --keep and "
                "read the log"
            )

    def _fetch_to_host(self) -> None:
        """Copies the conversation so far into host memory, unless it is already there."""
        said = self._conversation.tokens[: self._marks[-1]]
        hashes = self._namespace.hash(said, with_tail=True)
        self._client.prefetch(self._namespace, hashes, tokens=len(said), tier="host")
        with connect(self._daemon.target) as admin:
            admin.ask(pb.QuiesceRequest(deadline_s=SETTLE_TIMEOUT_S))


SCENES = (
    Scene("nowhere: cold", Stage.stay, ""),
    Scene("device", Stage.stay, "device.0"),
    Scene("host memory", Stage.leave_host, "host.0"),
    Scene("NVMe", Stage.leave_nvme, "nvme.0"),
    Scene("after kill -9", Stage.crash, "*"),
)
"""The turns of the conversation, in order."""


@contextmanager
def shown_steps(console: Console, *, total: int) -> Iterator[Say]:
    """Yields `say(step)`: a bar with the step's name on a terminal, one line a step in a pipe."""
    if not console.is_terminal:
        yield lambda step: print(step, flush=True)
        return
    columns = (SpinnerColumn(), BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def say(step: str) -> None:
            started = progress.tasks[0].description != ""
            progress.update(task, description=step, advance=1 if started else 0)

        yield say


def draw(console: Console, model: Llama, turns: Sequence[Turn]) -> None:
    """Prints the model's sizes, then one row a turn."""
    spec = model.spec
    kv = human_bytes(page_shape(model).bytes_of(1))
    console.print()
    console.print(
        Text(
            f"{spec.layers} layers, hidden {spec.hidden_size}, {kv} of KV a token; "
            f"{turns[-1].cached.prompt_tokens:,} tokens at the end",
            style="dim",
        )
    )
    console.print()
    show_table(console, COLUMNS, [row(turn) for turn in turns], empty="no turns")
    console.print()


def row(turn: Turn) -> list[Cell]:
    """A turn's cells, in the order of COLUMNS."""
    cached, plain = turn.cached, turn.plain
    same = cached.tokens == plain.tokens
    return [
        source_of(turn),
        human_count(cached.prompt_tokens),
        human_count(cached.reused_tokens),
        human_seconds(cached.ttft_s),
        human_seconds(plain.ttft_s),
        f"{plain.ttft_s / cached.ttft_s:.1f} x" if cached.reused_tokens else "-",
        Text("yes", style="green") if same else Text("NO", style="bold red"),
    ]


def source_of(turn: Turn) -> str:
    """The scene's name, and the tiers if the name has none."""
    found = " + ".join(turn.cached.tier_tokens)
    return f"{turn.scene.source}: {found}" if turn.scene.tier == "*" and found else turn.scene.source


def verdict(console: Console, turns: Sequence[Turn]) -> int:
    """Prints the last lines. Returns the exit code."""
    faults = [turn.fault for turn in turns if turn.fault]
    if not faults:
        answers = sum(len(turn.cached.tokens) for turn in turns)
        console.print(
            Text(f"all {answers} generated tokens equal those of a run without a cache", style="green"), soft_wrap=True
        )
        return ExitCode.OK
    for fault in faults:
        console.print(Text(f"FAILED: {fault}", style="bold red"), soft_wrap=True)
    return ExitCode.FAILED
