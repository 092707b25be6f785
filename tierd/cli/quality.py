"""`tierctl quality`: what codecs cost in a model's predictions, and what they save in bytes.

This is the command line: model, text, codecs, a table. tierd.quality measures, without a daemon.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from tierd.cli.ask import Ask, listing
from tierd.cli.completion import several
from tierd.cli.help import example
from tierd.cli.progress import shown_progress
from tierd.cli.render import Cell, Column, facts, show_json, show_table
from tierd.codecs.block import Codec
from tierd.codecs.calibration import load
from tierd.codecs.layered import COARSE
from tierd.codecs.named import BY_NAME, codec_named
from tierd.errors import InvalidArgument
from tierd.pictures import checked_plot
from tierd.quality.identity import IDENTITY
from tierd.quality.measure import BLOCK_TOKENS, Trial
from tierd.quality.plot import draw
from tierd.quality.report import Job, Report, report_of
from tierd.quality.rows import Row, front
from tierd.quality.windows import WINDOWS
from tierd.worker.tokens.choice import TokenChoice

COLUMNS = (
    Column("codec", style="bold"),
    Column("tokens"),
    Column("bits", right=True),
    Column("ratio", right=True, spare=5),
    Column("restore tok", right=True),
    Column("restore ±", right=True, spare=8),
    Column("restore KL", right=True),
    Column("same top-1", right=True, spare=7),
    Column("recall tok", right=True),
    Column("recall ±", right=True, spare=8),
    Column("recall KL", right=True, spare=6),
    Column("recall top-1", right=True),
    Column("encode", right=True, spare=2),
    Column("decode", right=True, spare=1),
    Column("of copy", right=True, spare=9),
)
"""encode, decode: GB/s. of copy: both as shares of a plain copy's speed."""
MEASURED: dict[str, Codec] = {codec.name: codec for codec in (IDENTITY, COARSE)}
"""Beside the codecs that stores take."""


@click.command(epilog=example("tierctl quality --model models/tiny-llama --text eval.txt --codec int8,rot-4-4,int3"))
@click.option(
    "--model", type=click.Path(file_okay=False, path_type=Path), required=True, help="Checkpoint folder of a Llama."
)
@click.option(
    "--text",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Bytes for a model whose tokens are bytes, or token ids as .npy for any other.",
)
@click.option(
    "--codec",
    "codecs",
    metavar="NAME,...",
    required=True,
    shell_complete=several([*MEASURED, *BY_NAME]),
    help="Names as in `tierctl codecs`, identity, or layered-2-coarse.",
)
@click.option(
    "--tokens",
    metavar="POLICY:KEEP,...",
    help="Token policies, each with a share or a number of tokens: h2o:0.2,streaming:128.",
)
@click.option("--windows", type=click.IntRange(1), default=WINDOWS, show_default=True, help="Windows of the text.")
@click.option(
    "--block-tokens", type=click.IntRange(1), default=BLOCK_TOKENS, show_default=True, help="Tokens of a block."
)
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File made by `tierctl calibrate`, for codecs that need one.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=lambda _ctx, _param, path: path and checked_plot(path),
    help="Draw quality against bytes to FILE.png or FILE.svg (needs matplotlib).",
)
@click.option("--jobs", type=click.IntRange(1), default=None, help="Number of processes. [default: one for each core]")
@listing
def quality(ask: Ask, *, model: Path, text: Path, codecs: str, **options: Any) -> None:
    """Measures what codecs cost: a model goes on over decoded blocks.

    The text is cut into windows of 1,024 tokens at equal distances, the same in every run. Of each
    window the model computes 768 tokens exactly. Their keys and values are encoded in blocks and
    decoded. Then it predicts 256 tokens more, each after the true ones before it.

    restore: these are the text's next 256 tokens. recall: they repeat a passage of the 768, and
    count from the 33rd on. Judge a codec by both.

    tok is the growth of a perplexity of 5.68, KL the divergence in nats a token, both against exact
    keys and values. With --tokens the continuation attends to fewer tokens.

    Bits count every stored byte. Speeds are GB/s of bfloat16 per CPU second. Green:
    no other codec has fewer bits and less KL.
    """
    policies = (None, *policies_of(options["tokens"]))
    trial = Trial(
        codecs_of(codecs), policies, options["calibration"] and load(options["calibration"]), options["block_tokens"]
    )
    job = Job(model, text, options["windows"])
    with shown_progress("windows", job.windows) as show:
        report = report_of(job, trial, jobs=options["jobs"] or len(os.sched_getaffinity(0)), show=show)
    if options["plot"]:
        write_plot(options["plot"], report)
    if ask.as_json:
        show_json(report)
    else:
        show_report(ask, report)


def codecs_of(names: str) -> list[Codec]:
    """The codecs of names separated by commas, without repetitions. Raises InvalidArgument."""
    return [MEASURED.get(name) or codec_named(name) for name in dict.fromkeys(names.split(","))]


def policies_of(said: str | None) -> list[TokenChoice]:
    """The policies of `--tokens`, without repetitions. Raises InvalidArgument."""
    return [policy_of(word) for word in dict.fromkeys(said.split(","))] if said else []


def policy_of(word: str) -> TokenChoice:
    """`h2o:0.2` keeps a share of the tokens, `h2o:128` so many. Raises InvalidArgument."""
    name, _, keep = word.partition(":")
    try:
        choice = (
            TokenChoice(name, tokens=int(keep)) if keep.isdecimal() and keep != "1" else TokenChoice(name, float(keep))
        )
    except ValueError:
        raise InvalidArgument(f"--tokens: {word!r} has no share or number of tokens; write h2o:0.2") from None
    return choice.checked()


def write_plot(path: Path, report: Report) -> None:
    """Draws the picture. Raises InvalidArgument if the file cannot be written."""
    try:
        draw(report["rows"], report["exact"], path)
    except OSError as error:
        raise InvalidArgument(f"--plot: {path} cannot be written ({error.strerror}); give another file") from error


def show_report(ask: Ask, report: Report) -> None:
    """Prints the table, and one line about the exact keys and values."""
    rows, exact = report["rows"], report["exact"]
    cells = [
        cells_of(row, copy_gbps=report["copy_gbps"], is_best=best) for row, best in zip(rows, front(rows), strict=True)
    ]
    has_policies = any(row["tokens"] for row in rows)
    shown = [i for i, column in enumerate(COLUMNS) if has_policies or column.name != "tokens"]
    show_table(ask.console, [COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in cells], empty="no codecs")
    said = (
        ("exact: restore", f"{exact['restore_nll']:.4f} nats"),
        ("recall top-1", f"{100 * exact['recall_top1']:.2f} %"),
        ("copy", f"{report['copy_gbps']:.1f} GB/s"),
        ("windows", str(report["windows"])),
    )
    ask.console.print(facts(said))


def cells_of(row: Row, *, copy_gbps: float, is_best: bool) -> list[Cell]:
    """One row, in the order of COLUMNS."""
    return [
        Text(row["codec"], "green" if is_best else ""),
        row["tokens"] or "all",
        f"{row['bits']:.3f}",
        f"{row['ratio']:.2f}",
        f"{row['restore_tok']:+.4f}",
        f"{row['restore_tok_se']:.4f}",
        f"{row['restore_kl']:.5f}",
        f"{100 * row['restore_top1']:.2f} %",
        f"{row['recall_tok']:+.4f}",
        f"{row['recall_tok_se']:.4f}",
        f"{row['recall_kl']:.5f}",
        f"{100 * row['recall_top1']:.2f} %",
        f"{row['encode_gbps']:.2f}",
        f"{row['decode_gbps']:.2f}",
        f"{row['encode_gbps'] / copy_gbps:.1%} {row['decode_gbps'] / copy_gbps:.1%}",
    ]
