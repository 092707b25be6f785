"""A plan as a picture: hits against memory, and bytes against context."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tierd.errors import InvalidArgument
from tierd.pictures import require_matplotlib
from tierd.plan.kv import form_of
from tierd.plan.plan import CODED, GIB, Asked, Plan

BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
"""Colour-blind people distinguish them too (M. Okabe and K. Ito)."""


def draw(asked: Asked, made: Plan, path: Path) -> None:
    """Draws to a PNG or SVG file. Raises Unsupported without matplotlib, InvalidArgument if the
    file cannot be written."""
    figure = require_matplotlib()(figsize=(11, 4.5), layout="constrained")
    hits, sizes = figure.subplots(1, 2)
    hits.plot([size / GIB for size, _ in made.curve], [100 * share for _, share in made.curve], color=BLUE, marker="o")
    below = 0.0
    for tier, colour in zip(made.tiers, (ORANGE, GREEN), strict=True):
        below += tier.capacity_bytes
        if tier.capacity_bytes:
            hits.axvline(
                below / GIB, color=colour, linestyle="--", label=f"{tier.name} to here: {100 * tier.hits:.1f} %"
            )
    hits.set(xscale="log", xlabel="GiB of all tiers", ylabel="% of prompt tokens", title=f"Hits: {asked.traffic.name}")
    hits.set_xscale("log", base=2)
    hits.set_ylim(0, 100)
    if any(tier.capacity_bytes for tier in made.tiers):
        hits.legend()
    tokens = np.geomspace(1024, max(2048, asked.context), 32).astype(int)
    for name, colour in (("bfloat16", BLUE), (CODED, ORANGE)):
        form = form_of(name)
        grown = [form.request_bytes(asked.model, int(count)) / GIB for count in tokens]
        sizes.plot(tokens, grown, color=colour, label=form.name)
    sizes.set(xlabel="tokens of a request", ylabel="GiB", title=f"Keys and values: {asked.model.name}")
    sizes.legend()
    for axis in (hits, sizes):
        axis.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidArgument(f"--plot: {path} cannot be written ({error.strerror}); give another file") from error
