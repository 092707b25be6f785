"""`tierctl bench ttft`: the time to first token of an engine that loads from the running daemon.

This is the command line: a machine, a shape, prefixes, a table. tierd.ttft measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import Connection
from tierd.cli.ask import DURATION, RATE, SIZE, Ask, Several, listing
from tierd.cli.bench_report import show_report
from tierd.cli.help import Listing, example
from tierd.cli.options import shared
from tierd.cli.progress import shown_progress
from tierd.cli.render import show_json
from tierd.client import Client
from tierd.core.formats.block import DTYPE_BYTES
from tierd.core.formats.model import TierKind
from tierd.errors import InvalidArgument, NotFound
from tierd.pictures import checked_plot
from tierd.ttft.bench import LOADED, Bench, Evict, Setup
from tierd.ttft.drawing import draw
from tierd.ttft.machine import PRESETS, Machine, Shape
from tierd.ttft.report import report_of
from tierd.ttft.timeline import Source

EVICT_BLOCKS = 256
"""Of one call."""
EVICT_TIMEOUT_S = 30.0
PREFIXES = "1K,2K,4K,8K,16K,32K,64K"


def tokens_of(word: str) -> int:
    """`8K` is 8,192. Raises ValueError."""
    number = word.strip().upper().removesuffix("I")
    try:
        return int(number.removesuffix("K")) * (1024 if number.endswith("K") else 1)
    except ValueError:
        raise ValueError(f"{word!r} is no number of tokens; write 1K,8K,65536") from None


def source_of(word: str) -> Source:
    """The source of a name. Raises ValueError."""
    if word not in set(Source):
        raise ValueError(f"{word!r} is no source; there are {', '.join(Source)}")
    return Source(word)


TOKENS, SOURCES = Several("tokens", tokens_of), Several("source", source_of)


@click.group(cls=Listing)
@shared
def bench(**_: Any) -> None:
    """Measures what the running daemon is worth to an engine."""


@bench.command(epilog=example("tierctl bench ttft", "tierctl bench ttft --disk 1GB/s --prefix 1K,8K --plot ttft.png"))
@click.option(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    default="h100",
    show_default=True,
    help="h100: 55 GB/s, 7 GB/s, 20,000 tokens/s.",
)
@click.option(
    "--link", "link_bytes_per_s", type=RATE, help="Bandwidth from host memory to the engine.  [default: the preset's]"
)
@click.option("--link-latency", "link_latency_s", type=DURATION, help="Of each copy over it.  [default: the preset's]")
@click.option("--disk", "disk_bytes_per_s", type=RATE, help="Bandwidth of the NVMe drives.  [default: the preset's]")
@click.option("--disk-latency", "disk_latency_s", type=DURATION, help="Of the first read.  [default: the preset's]")
@click.option(
    "--prefill-rate",
    "prefill_tokens_per_s",
    type=click.FloatRange(1),
    help="Tokens a second, short context.  [default: the preset's]",
)
@click.option(
    "--half-context", type=click.FloatRange(1), help="Tokens of context that halve it.  [default: the preset's]"
)
@click.option("--layers", type=click.IntRange(1, 512), help="Of the model.  [default: 32, as Llama-3-8B]")
@click.option("--kv-heads", type=click.IntRange(1, 1024), help="[default: 8]")
@click.option("--head-dim", type=click.IntRange(1, 4096), help="[default: 128]")
@click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), help="Of the KV cache.  [default: bfloat16]")
@click.option("--tokens-per-block", type=click.IntRange(1, 4096), help="[default: 16]")
@click.option(
    "--scale", type=click.IntRange(1), default=32, show_default=True, help="Divides a token's bytes and the bandwidths."
)
@click.option("--prefix", "prefixes", type=TOKENS, default=PREFIXES, show_default=True, help="Lengths to measure.")
@click.option(
    "--tail",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.25,
    show_default=True,
    help="Share of the prompt that is computed after a whole prefix.",
)
@click.option("--source", "sources", type=SOURCES, default=",".join(Source), show_default=True, help="To measure.")
@click.option("--runs", type=click.IntRange(1, 1000), default=3, show_default=True, help="Of each row.")
@click.option(
    "--memory", type=SIZE, default="1 GiB", show_default=True, help="The most memory for pages and for the engine."
)
@click.option("--limit", "limit_s", type=DURATION, default="10 min", show_default=True, help="The longest duration.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=lambda _ctx, _param, path: path and checked_plot(path),
    help="Draw the curves to FILE.png or FILE.svg (needs matplotlib).",
)
@listing
def ttft(ask: Ask, *, preset: str, plot: Path | None, memory: int, limit_s: float, **options: Any) -> None:
    """Measures the time to first token by prefix length and source.

    A simulated engine loads prefixes from the running daemon, whole and by layer. Calls, reads and
    copies are real. They are slowed down to the machine's bandwidths. Computing is a wait.

    Bytes of a token and bandwidths are divided by --scale, and times stay. Blocks hold more
    tokens, so that their bytes stay. So this machine can stand for a faster one.

    The column bound is the least time by arithmetic. The engine waited for call, disk and link.
    Rows with "advised" load what the advisor finds worth loading.

    Its blocks are durable on NVMe meanwhile, and may displace others in host memory. It removes
    them in the end. Choose a daemon that nobody else uses.
    """
    setup = setup_of(preset, options).checked(memory_bytes=memory, limit_s=limit_s)
    with ask.connect() as daemon, Client(ask.target, name="tierctl bench") as client:
        check_tiers(daemon, setup)
        with Bench(client, setup, evictor(daemon)) as measured, shown_progress("requests", measured.steps) as show:
            results = []
            for result in measured.results():
                results.append(result)
                show(len(results))
    report = report_of(setup, results)
    if plot:
        draw(report, plot)
    if ask.as_json:
        show_json(report)
    else:
        show_report(ask.console, report)


def setup_of(preset: str, options: dict[str, Any]) -> Setup:
    """The setup of these options; those that are None keep the preset's values."""

    def given(kind: type) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: options[name] for name in names if options[name] is not None}

    machine = dataclasses.replace(PRESETS[preset], **given(Machine))
    shape = dataclasses.replace(Shape(), **given(Shape))
    names = ("scale", "tail", "runs", "sources")
    return Setup(machine, shape, prefixes=sorted(set(options["prefixes"])), **{name: options[name] for name in names})


def check_tiers(daemon: Connection, setup: Setup) -> None:
    """Raises InvalidArgument if the daemon has no tier of a source."""
    tiers = daemon.ask(pb.TiersRequest()).tiers
    size = setup.memory_bytes // 2
    for source in (source for source in LOADED if source in setup.sources):
        room = sum(tier.capacity_bytes for tier in tiers if tier.kind == int(TierKind[source.name]))
        if room < size:
            raise InvalidArgument(
                f"--source {source.value}: the daemon's tiers of this kind have {room >> 20} MiB, and the longest"
                f" prefix {size >> 20} MiB; use a shorter --prefix, a larger --scale, or other sources"
            )


def evictor(daemon: Connection) -> Evict:
    """Evicts blocks of a daemon, from the tiers of host memory or from all."""
    hosts = [tier.name for tier in daemon.ask(pb.TiersRequest()).tiers if tier.kind == int(TierKind.HOST)]

    def drop(names: Sequence[str], tier: str) -> None:
        try:
            daemon.ask(pb.EvictRequest(hashes=names, tier=tier), timeout_s=EVICT_TIMEOUT_S)
        except NotFound:  # of one of them; then none was evicted
            for name in names if len(names) > 1 else ():
                drop([name], tier)

    def evict(hashes: NDArray[np.uint8], *, everywhere: bool) -> None:
        names = [name.tobytes().hex() for name in hashes]
        for tier in [""] if everywhere else hosts:
            for i in range(0, len(names), EVICT_BLOCKS):
                drop(names[i : i + EVICT_BLOCKS], tier)

    return evict
