"""`tierctl plan`: sizes, hits, times and costs for a model, before a daemon exists.

tierd.plan computes; this module has the command line, tables, and the configuration that `--write`
makes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from tierd.cli.ask import SIZE, Ask, verb
from tierd.cli.configuration import LEAST_BYTES
from tierd.cli.figures import human_bytes, human_seconds, human_share
from tierd.cli.help import example
from tierd.cli.progress import shown_progress
from tierd.cli.render import Column, show_table
from tierd.cli.trace import read_trace
from tierd.errors import InvalidArgument
from tierd.pictures import checked_plot
from tierd.plan.drawing import draw
from tierd.plan.kv import form_of
from tierd.plan.machines import DECODE_SHARE, GPUS, PREFILL_SHARE, gpus_for
from tierd.plan.models import Model, model_of
from tierd.plan.plan import Asked, Hits, Plan, plan_of
from tierd.plan.traced import TraceHits, traffic_of
from tierd.plan.traffic import PRESETS, CurveHits
from tierd.simulator.sequences import Trace, trace_of
from tierd.units import format_bytes

TIERS = (Column("tier", style="bold"), Column("size", right=True), Column("hits", right=True))
FIRST = (
    Column("reused from", style="bold"),
    Column("tokens", right=True),
    Column("first token", right=True),
    Column("", style="dim"),
)
COSTS = (
    Column("form of KV", style="bold"),
    Column("hits", right=True),
    Column("batch", right=True),
    Column("GPU time", right=True),
    Column("engines", right=True),
    Column("$ per million tokens", right=True),
)


class Between(click.FloatRange):
    """As click's. NaN is in no range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error for one outside."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


TOKENS, PRICE = Between(1, 10**9), Between(0, 10**6)


@click.command(
    epilog=example(
        "tierctl plan --model llama-3.1-70b --context 131072",
        "tierctl plan --model ./config.json --traffic agent --write tierd.toml",
    )
)
@click.option(
    "--model",
    "name",
    required=True,
    help="A known model, or a config.json of Hugging Face. A wrong name lists the known ones.",
)
@click.option(
    "--context", type=click.IntRange(1, 1 << 40), help="Tokens of the longest request. [default: the model's most]"
)
@click.option(
    "--dtype", default="bfloat16", show_default=True, help="Of KV: bfloat16, fp8, or a codec such as rot-4-4."
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1 << 20),
    default=32,
    show_default=True,
    help="Requests of an engine at a time.",
)
@click.option(
    "--traffic", type=click.Choice(list(PRESETS)), default="chat", show_default=True, help="Measured traffic."
)
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="Your own: as `tierctl record start` writes it."
)
@click.option("--prompt", type=TOKENS, help="Mean tokens of a prompt. [default: the traffic's]")
@click.option("--output", type=TOKENS, help="Mean tokens of an answer. [default: the traffic's]")
@click.option("--rate", type=Between(1e-6, 10**6), help="Requests a second. [default: the traffic's]")
@click.option("--gpu", type=click.Choice(list(GPUS)), default="h100", show_default=True)
@click.option(
    "--gpus", type=click.IntRange(1, 1 << 16), help="GPUs of an engine. [default: the fewest that hold the weights]"
)
@click.option("--parameters", type=Between(1e-3, 10**6), help="Billions. [default: the model's]")
@click.option(
    "--weight-bits", type=Between(1, 32), help="Of a parameter. [default: as the model is published, else 16]"
)
@click.option("--host", type=SIZE, help="Size of the host tier. [default: suggested]")
@click.option("--nvme", type=SIZE, help="Size of the NVMe tier. [default: suggested]")
@click.option("--gpu-price", type=PRICE, help="Dollars for a GPU an hour. [default: the preset's]")
@click.option("--memory-price", type=PRICE, default=2.0, show_default=True, help="Dollars for a GiB a month.")
@click.option("--disk-price", type=PRICE, default=30.0, show_default=True, help="Dollars for a TiB a month.")
@click.option(
    "--write",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the sizes as a configuration to a new file.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=lambda _ctx, _param, path: path and checked_plot(path),
    help="Draw hits and bytes to FILE.png or FILE.svg (needs matplotlib).",
)
@verb
def plan(ask: Ask, *, name: str, file: Path | None, plot: Path | None, **options: Any) -> None:
    """Plans memory and disk for a model: bytes of its KV, tier sizes, hits, first token, costs.

    No daemon has to run, and nothing is measured: times and costs are estimates from data sheets.
    """
    if file and file.exists():
        raise InvalidArgument(f"--write: {file} exists; name a new file, or remove it")
    if file and not file.parent.is_dir():
        raise InvalidArgument(f"--write: the directory {file.parent} does not exist; create it first")
    trace = trace_of(read_trace(options["trace"], limit=None), name=str(options["trace"])) if options["trace"] else None
    if trace is not None and not len(trace):
        raise InvalidArgument(f"--trace: {options['trace']} has no request, 1 at least; record some, or leave it out")
    for tier in ("host", "nvme"):
        if 0 < (options[tier] or 0) < LEAST_BYTES:
            raise InvalidArgument(
                f"--{tier}: {options[tier]} B is below the minimum of 4 KiB, a page; give more, or 0 for none"
            )
    asked = asked_of(model_of(name), trace, options)
    made = plan_of(asked, hits_of(asked, trace, options["traffic"]))
    if file:
        file.write_text(settings_text(asked, made), encoding="utf-8")
    if plot:
        draw(asked, made, plot)
    if ask.as_json:
        ask.show_json(plain(asked, made))
    else:
        show(ask.console, asked, made)


def asked_of(model: Model, trace: Trace | None, options: dict[str, Any]) -> Asked:
    """The question of a command line. Raises InvalidArgument."""
    traffic = traffic_of(trace) if trace is not None else PRESETS[options["traffic"]]
    traffic = replace(
        traffic,
        prompt=options["prompt"] or traffic.prompt,
        output=options["output"] or traffic.output,
        per_s=options["rate"] or traffic.per_s,
    )
    if options["parameters"]:
        share = model.active / model.parameters if model.parameters else 1.0
        whole = options["parameters"] * 1e9
        model = replace(model, parameters=whole, active=share * whole)
    model = replace(model, weight_bits=options["weight_bits"] or model.weight_bits)
    gpu = GPUS[options["gpu"]]
    if options["gpu_price"] is not None:
        gpu = replace(gpu, price=options["gpu_price"])
    count = gpus_for(model, gpu, options["gpus"])
    context = options["context"] or model.context
    if not context:
        raise InvalidArgument("--context: the config.json names no limit of positions; give one")
    return Asked(
        model,
        form_of(options["dtype"]),
        context,
        options["concurrency"],
        traffic,
        gpu.times(count),
        count,
        options["host"],
        options["nvme"],
        options["memory_price"],
        options["disk_price"],
    )


def hits_of(asked: Asked, trace: Trace | None, preset: str) -> Hits:
    """By the trace, else by a preset. Raises what simulations raise."""
    if trace is None:
        return CurveHits(asked.traffic, preset, asked.token_bytes)
    with shown_progress("requests", len(trace) * TraceHits.runs(trace, asked.token_bytes)) as show_done:
        return TraceHits(trace, asked.token_bytes, show=show_done)


def plain(asked: Asked, made: Plan) -> dict[str, Any]:
    """The plan as JSON."""
    values = asdict(made)
    values["tiers"] = [tier._asdict() for tier in made.tiers]
    values["first_token"] = [row._asdict() for row in made.first_token]
    values["costs"] = [cost._asdict() for cost in made.costs]
    said = {"model": asked.model.name, "context": asked.context, "dtype": asked.form.name}
    whole = {name: round(values.pop(name)) for name in ("kv_bytes_per_token", "kv_bytes_per_request")}
    return {**said, **whole, **values, "assumptions": assumptions(asked)}


def show(console: Console, asked: Asked, made: Plan) -> None:
    """Prints the tables. Lines are whole in a pipe."""
    say = partial(console.print, soft_wrap=not console.is_terminal)
    title(console, f"{asked.model.name}: keys and values in {asked.form.name}")
    say(f"of a token     {human_bytes(made.kv_bytes_per_token)}")
    say(f"of a request   {human_bytes(made.kv_bytes_per_request)} at {asked.context:,} tokens")
    say(
        f"on the GPUs    {human_bytes(made.room_bytes)} beside the weights of {asked.gpus} x {asked.gpu.name}: "
        f"{made.fitting_requests} requests of {asked.traffic.mean_tokens:,.0f} tokens"
    )
    say(
        f"wasted         {human_share(made.waste.contiguous, 1)} with room for {asked.context:,} tokens each, "
        f"{human_share(made.waste.paged, 1)} in blocks of 16"
    )
    title(console, f"Tiers for {asked.traffic.per_s:.3g} prompts of {asked.traffic.prompt:,.0f} tokens a second")
    rows = [
        [tier.name, human_bytes(tier.capacity_bytes) if tier.capacity_bytes else "none", human_share(tier.hits, 1)]
        for tier in made.tiers
    ]
    show_table(
        console, TIERS, [*rows, ["together", "", human_share(sum(tier.hits for tier in made.tiers), 1)]], empty=""
    )
    if made.drive_writes:
        years = made.life_years
        life = f"{years:,.1f} years" if years >= 1 else f"{years * 365:.3g} days"
        say(
            f"at most {float(f'{made.drive_writes:.2g}'):,g} drive writes a day; a drive rated for 1 a day over five years lasts "
            f"{life} (set nvme.endurance_dwpd, and tierd writes less)"
        )
    title(console, "First token of a mean prompt")
    show_table(
        console,
        FIRST,
        [
            [
                row.source,
                f"{row.reused_tokens:,}",
                human_seconds(row.seconds),
                "" if row.is_worth else "slower than computing; the advisor computes",
            ]
            for row in made.first_token
        ],
        empty="",
    )
    title(console, "Costs")
    show_table(
        console,
        COSTS,
        [
            [
                cost.name,
                human_share(cost.hits, 1),
                str(cost.batch),
                human_seconds(cost.gpu_s),
                f"{cost.engines:.1f}",
                f"{cost.dollars:.2f}",
            ]
            for cost in made.costs
        ],
        empty="",
    )
    title(console, "Assumptions")
    for line in assumptions(asked):
        say(Text(f"- {line}", style="dim"))


def title(console: Console, text: str) -> None:
    """Prints a heading."""
    console.print()
    console.print(Text(text, style="bold cyan"))


def assumptions(asked: Asked) -> list[str]:
    """The facts and guesses under the figures."""
    gpu, count = asked.gpu, asked.gpus
    gpus = (
        f"{gpu.name}: {gpu.memory / count / 1e9:.0f} GB, {gpu.bandwidth / count / 1e12:.2f} TB/s, "
        f"{gpu.flops / count / 1e12:,.0f} TFLOP/s, ${gpu.price / count:.2f} an hour; host link "
        f"{gpu.link / count / 1e9:.0f} GB/s, NVMe {gpu.disk / 1e9:.0f} GB/s"
    )
    most, mean, beyond = asked.model.context, asked.traffic.mean_tokens, []
    if asked.context > most > 0:
        beyond.append(f"the model takes {most:,} tokens; {asked.context:,} need a change of it")
    if mean > asked.context:
        beyond.append(
            f"the traffic's mean request of {mean:,.0f} tokens is longer than {asked.context:,}; give --prompt or --context"
        )
    return [
        *beyond,
        gpus,
        f"computing reaches {PREFILL_SHARE:.0%} of the arithmetic, decoding {DECODE_SHARE:.0%} of the bandwidth",
        f"weights have {asked.model.weight_bits:g} bits a parameter",
        f"memory ${asked.memory_price:g} a GiB and NVMe ${asked.disk_price:g} a TiB a month; GPUs are paid for the work alone",
        "INT4 is rot-4-4: 4 bits and its scales; a million tokens counts prompts and answers",
        "hits in the engine's own GPU memory are not counted; loads go layer by layer, beside computing",
    ]


def settings_text(asked: Asked, made: Plan) -> str:
    """A configuration with these tiers."""
    host, nvme = (tier.capacity_bytes for tier in made.tiers)
    lines = [
        f"# Planned for {asked.model.name}: {asked.traffic.per_s:.3g} prompts of {asked.traffic.prompt:,.0f} tokens a second.",
        "",
    ]
    for section, size in (("host", host), ("nvme", nvme)):
        if size:
            lines += [f"[[{section}]]", f'capacity = "{format_bytes(int(size))}"', ""]
    least = ["# Not planned; a daemon needs one, and a store reads into it.", "[[host]]", 'capacity = "16 GiB"', ""]
    return "\n".join(lines if host else [*lines, *least])
