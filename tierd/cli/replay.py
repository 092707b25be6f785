"""`tierctl replay`: drives the daemon with a recorded trace, through the real client.

It makes each request as an engine does: acquire the longest prefix, write the missing blocks,
release. trace.py reads traces, tally.py has the sums. A block's bytes are a function of its hash:
reads can be verified. In lockstep no block moves between two requests, and all steps of a request
happen at the trace's time.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import Connection
from tierd.cli.ask import SIZE, Ask, listing
from tierd.cli.exits import ExitCode
from tierd.cli.figures import human_share
from tierd.cli.help import example
from tierd.cli.render import show_json
from tierd.cli.stored_form import StoredForm, encoded
from tierd.cli.tally import Step, Tally, draw_tally
from tierd.cli.trace import Content, hash_ids, read_trace
from tierd.client import Client, Lease, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.core.formats.model import ROOT, BlockStatus
from tierd.errors import InvalidArgument
from tierd.simulator.sequences import TOKENS_PER_BLOCK, Encoding, Request

MODEL = "tierctl-replay"
BLOCK_BYTES = 64 << 10
"""Bytes of a full block if neither the trace nor an option gives them."""
STORED = (BlockStatus.READY, BlockStatus.EXISTS)
QUIESCE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a replay, as on the command line.

    block_bytes: of a full block (None: from the trace, else BLOCK_BYTES). cold: a new namespace.
    codec, geometry, bits: see StoredForm.
    speed: divides the trace's pauses (None: no pauses). tier: of blocks (None: the nearest).
    lockstep: one request after another, at the trace's time.
    """

    limit: int | None = None
    block_bytes: int | None = None
    tier: str | None = None
    verify: bool = False
    lockstep: bool = False
    speed: float | None = None
    cold: bool = False
    codec: str | None = None
    geometry: str | None = None
    bits: float | None = None

    @property
    def stored_form(self) -> StoredForm:
        """The options about lengths."""
        return StoredForm(self.codec, self.geometry, self.bits, self.block_bytes)


@click.command(epilog=example("tierctl replay trace.jsonl.gz --lockstep"))
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(1), default=None, help="Replay only this many requests.")
@click.option(
    "--block-bytes", type=SIZE, default=None, help="Size of a full block. [default: as recorded, else 64 KiB]"
)
@encoded
@click.option(
    "--tier", type=click.Choice(["device", "host"]), default=None, help="Tier for the blocks. [default: the nearest]"
)
@click.option("--verify", is_flag=True, help="Compare every served byte with the written one.")
@click.option(
    "--lockstep", is_flag=True, help='Use the trace\'s time, so results repeat exactly; needs server.clock = "replay".'
)
@click.option(
    "--speed", type=click.FloatRange(0, min_open=True), default=None, help="Keep the trace's pauses, divided by this."
)
@click.option("--cold", is_flag=True, help="Use a new namespace: no hits on blocks of earlier replays.")
@listing
def replay(ask: Ask, *, trace: Path, **options: Any) -> None:
    """Drives the daemon with a recorded trace.

    TRACE: JSON lines, gzip or plain. The report has the sources of the tokens, the durations of the
    calls, and the bytes that moved.
    """
    how = Options(**options)
    if how.lockstep and how.speed is not None:
        raise click.UsageError("replay: --lockstep uses the trace's time, --speed the clock's; leave one out")
    requests = list(read_trace(trace, limit=how.limit))
    with ask.connect() as daemon, Client(ask.target, name="tierctl replay") as client:
        tiers = [tier.name for tier in daemon.ask(pb.TiersRequest()).tiers]
        run = Run(Replayer(client, tiers, how), daemon, how)
        with shown_progress(len(requests), name=trace.name) as show:
            run.all(requests, show)
    report(ask, run.tally)


def namespace_spec(block_bytes: int, *, block_tokens: int = TOKENS_PER_BLOCK, salt: str = "") -> NamespaceSpec:
    """A namespace of a replay. Raises InvalidArgument for a size that is no multiple of the tokens."""
    if block_bytes < block_tokens or block_bytes % block_tokens:
        raise InvalidArgument(
            f"--block-bytes: {block_bytes} is not a multiple of {block_tokens}, the tokens of a block; write for example 64 KiB"
        )
    return NamespaceSpec(model=MODEL, tokens_per_block=block_tokens, block_bytes=block_bytes, salt=salt)


def report(ask: Ask, tally: Tally) -> None:
    """Prints the sums. Wrong bytes end the program with FAILED."""
    if ask.as_json:
        show_json(tally.plain())
    else:
        draw_tally(ask.console, tally)
    if tally.wrong_blocks:
        raise click.exceptions.Exit(ExitCode.FAILED)


class Run:
    """A replay of a trace. tally: the sums so far."""

    def __init__(self, replayer: Replayer, daemon: Connection, options: Options) -> None:
        self.tally = Tally(replayer.tiers)
        self._replayer = replayer
        self._daemon = daemon
        self._options = options

    def all(self, requests: Sequence[Request], show: Callable[[Tally], None]) -> None:
        """Makes the requests, and shows the tally after each."""
        begun = time.monotonic()
        for request in requests:
            self._await_turn(request, begun)
            self.tally.add(self._replayer.step(request))
            if self._options.lockstep:
                self._daemon.ask(pb.QuiesceRequest(deadline_s=QUIESCE_TIMEOUT_S), timeout_s=QUIESCE_TIMEOUT_S + 5)
            self.tally.elapsed_s = time.monotonic() - begun
            show(self.tally)

    def _await_turn(self, request: Request, begun: float) -> None:
        if self._options.lockstep:
            self._daemon.set_time(request.time_ms)
        elif self._options.speed is not None:
            time.sleep(max(0.0, begun + request.time_ms / 1000 / self._options.speed - time.monotonic()))


@dataclass(slots=True)
class Stopwatch:
    """Seconds of the parts of one request, by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Records the duration of the `with` block under a name."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - begun


class Space(NamedTuple):
    """A namespace, the bytes of its blocks, and how they are encoded."""

    namespace: OpenedNamespace
    content: Content
    encoding: Encoding | None


class Replayer:
    """Makes a trace's requests with one client, in one namespace for each of the trace's.

    tiers: of the daemon, near to far. Blocks use the nearest kind unless the options name one.
    """

    def __init__(self, client: Client, tiers: Sequence[str], options: Options) -> None:
        self.tiers = tiers
        self._client = client
        self._tier = options.tier or self.tiers[0].partition(".")[0]
        self._form, self._verify = options.stored_form, options.verify
        self._salt = secrets.token_hex(8) if options.cold else ""
        self._spaces: dict[tuple[int, int, int], Space] = {}

    def step(self, request: Request) -> Step:
        """Makes one request: gets the held blocks, puts the rest, releases all."""
        namespace, content, encoding = self._space(request)
        hashes = hash_ids(request.blocks, digest=namespace.digest)
        watch = Stopwatch()
        with watch.timed("acquire"):
            lease = self._client.acquire(namespace, hashes, tokens=request.tokens, tier=self._tier)
        wrong = wrong_blocks(lease, hashes, content) if self._verify and lease else 0
        read = int(lease.handles["length"].sum())
        first = -(-lease.tokens // request.block_tokens)
        written, refused = 0, 0
        leases = [lease]
        if first < len(hashes):
            group = put_group(namespace, hashes, request, first=first, encoding=encoding)
            stored, written, refused = self._store(group, content, watch=watch)
            leases += [stored] if stored else []
        with watch.timed("release"):
            for held in leases:
                held.release()
        return Step(request.tokens, lease.tier_tokens, watch.seconds, read, written, refused, wrong)

    def _space(self, request: Request) -> Space:
        """The request's namespace, opened at its first request."""
        block_bytes = self._form.block_bytes_of(request.block_tokens) or request.block_bytes or BLOCK_BYTES
        key = (request.namespace, request.block_tokens, block_bytes)
        if key not in self._spaces:
            salt = f"{self._salt}/{request.namespace}" if request.namespace else self._salt
            spec = namespace_spec(block_bytes, block_tokens=request.block_tokens, salt=salt)
            encoding = self._form.encoding(request.block_tokens)
            if encoding:
                longest = block_bytes + encoding.header_bytes
                spec = replace(spec, block_bytes=longest, salt=f"{salt} {self._form.codec}")
            self._spaces[key] = Space(self._client.open_namespace(spec), Content(spec.block_bytes), encoding)
        return self._spaces[key]

    def _store(self, group: PutGroup, content: Content, *, watch: Stopwatch) -> tuple[Lease | None, int, int]:
        """Writes blocks. Returns the lease on them, the bytes written, and how many were not stored."""
        with watch.timed("reserve"):
            pages = self._client.reserve(group, tier=self._tier)
        refused = int((~np.isin(pages.statuses, (BlockStatus.RESERVED, BlockStatus.EXISTS))).sum())
        if not pages:
            return None, 0, refused
        with watch.timed("write"):
            written = fill(pages.buffers(), np.asarray(group.hashes), content)
        with watch.timed("commit"):
            committed = pages.commit(lease=True)
        return committed.lease, written, refused + int((~np.isin(committed.statuses, STORED)).sum())


def put_group(
    namespace: OpenedNamespace,
    hashes: NDArray[np.uint8],
    request: Request,
    *,
    first: int,
    encoding: Encoding | None = None,
) -> PutGroup:
    """A request's blocks from number `first` on."""
    group = PutGroup(
        namespace,
        hashes[first:],
        tokens=request.tokens - first * request.block_tokens,
        parent=hashes[first - 1].tobytes() if first else ROOT,
        position=first,
    )
    if encoding is None:
        return group
    covered = namespace.block_tokens(len(group.hashes), tokens=group.tokens).astype(np.int64)
    full = np.full(len(covered), namespace.spec.block_bytes - encoding.header_bytes, np.int64)
    is_exact = (covered < request.block_tokens) | (first + np.arange(len(covered)) == 0)
    plain = np.maximum(1, full * covered // request.block_tokens)
    return replace(group, lengths=encoding.lengths(plain, full, is_exact=is_exact).tolist())


def fill(buffers: Sequence[NDArray[np.uint8] | None], hashes: NDArray[np.uint8], content: Content) -> int:
    """Writes each reserved page. Returns the bytes written."""
    written = 0
    for page, block in zip(buffers, hashes, strict=True):
        if page is not None:
            page[:] = content.of(block, length=len(page))
            written += len(page)
    return written


def wrong_blocks(lease: Lease, hashes: NDArray[np.uint8], content: Content) -> int:
    """Leased blocks that differ from the written ones. A page evicted meanwhile counts as a miss."""
    first = lease.groups[0].first
    good = [content.matches(hashes[first + i], view) for i, view in enumerate(lease.views())]
    return sum(not is_right for is_right in good[: lease.check()])


@contextlib.contextmanager
def shown_progress(total: int, *, name: str) -> Iterator[Callable[[Tally], None]]:
    """Shows a bar on stderr, if stderr is a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[hits]}"))
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console, transient=True) as progress:
        task = progress.add_task(name, total=total, hits="")

        def show(tally: Tally) -> None:
            hits = f"hits {human_share(sum(tally.tier_tokens), tally.tokens)}"
            progress.update(task, completed=tally.requests, hits=hits)

        yield show
