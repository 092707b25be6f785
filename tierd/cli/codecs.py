"""`tierctl codecs`: the codecs of this version, with a quick measurement of each."""

from __future__ import annotations

import click

from tierd.cli.ask import Ask, listing
from tierd.cli.help import example
from tierd.cli.progress import shown_progress
from tierd.cli.render import Cell, Column, show_json, show_table
from tierd.codecs.named import ALL
from tierd.quality.survey import Known, sample, surveyed

COLUMNS = (
    Column("codec", style="bold"),
    Column("number", right=True, spare=3),
    Column("bits", right=True),
    Column("error", right=True),
    Column("calibration"),
    Column("loops", spare=1),
    Column("encode", right=True),
    Column("decode", right=True),
)


@click.command(epilog=example("tierctl codecs"))
@listing
def codecs(ask: Ask) -> None:
    """Lists the codecs: size, error, speed.

    Each encodes a block of made-up values: 256 tokens of one layer, 8 heads of 128 channels. Bits
    are stored ones, of each value of 16. The error of no value is greater than that in the block's
    header, here in standard deviations of the values. Loops are native, or numpy with the same
    results. Speeds are GB/s of bfloat16 per CPU second.

    A codec that needs a calibration is not measured here. For these, and for what a codec costs in
    a model's predictions, see `tierctl quality`.
    """
    on, rows = sample(), []
    with shown_progress("codecs", len(ALL)) as show:
        for codec in ALL:
            rows.append(surveyed(codec, on))
            show(len(rows))
    if ask.as_json:
        show_json({"codecs": rows})
    else:
        show_table(ask.console, COLUMNS, [cells_of(row) for row in rows], empty="no codecs")


def cells_of(row: Known) -> list[Cell]:
    """One row, in the order of COLUMNS."""
    return [
        row["codec"],
        str(row["number"]),
        shown(row["bits"], 3),
        "exact" if row["is_exact"] else shown(row["error"], 4),
        "needed" if row["is_calibrated"] else "none",
        row["loops"],
        shown(row["encode_gbps"], 2),
        shown(row["decode_gbps"], 2),
    ]


def shown(value: float | None, places: int) -> str:
    """A figure; a dash if it was not measured."""
    return "-" if value is None else f"{value:.{places}f}"
