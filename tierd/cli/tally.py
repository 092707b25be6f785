"""Sums of a replay: sources of tokens, bytes, latencies.

They are printed as JSON or as tables. The tokens of all tiers and the computed tokens add up to the
requested tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from tierd.cli.figures import human_bytes, human_count, human_rate, human_seconds, human_share
from tierd.cli.render import Cell, Column, facts, show_table

PERCENTILES = (50, 90, 99, 100)
SHARE_COLUMNS = (
    Column("from", style="bold"),
    Column("tokens", right=True),
    Column("share", right=True),
)
LATENCY_COLUMNS = (
    Column("call", style="bold"),
    Column("calls", right=True),
    *(Column("max" if p == 100 else f"p{p}", right=True) for p in PERCENTILES),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One request's result. tier_tokens: tokens hit in each tier. seconds: by call.
    refused_blocks: not stored. wrong_blocks: their bytes differ from the written ones."""

    tokens: int
    tier_tokens: Sequence[int]
    seconds: dict[str, float]
    bytes_read: int = 0
    bytes_written: int = 0
    refused_blocks: int = 0
    wrong_blocks: int = 0


@dataclass(slots=True)
class Tally:
    """Sums over the steps of a replay. tiers: their names, near to far."""

    tiers: Sequence[str]
    requests: int = 0
    tokens: int = 0
    tier_tokens: list[int] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    refused_blocks: int = 0
    wrong_blocks: int = 0
    elapsed_s: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tier_tokens = [0] * len(self.tiers)

    def add(self, step: Step) -> None:
        """Adds a step to the sums."""
        self.requests += 1
        for name in ("tokens", "bytes_read", "bytes_written", "refused_blocks", "wrong_blocks"):
            setattr(self, name, getattr(self, name) + getattr(step, name))
        for tier, tokens in enumerate(step.tier_tokens):
            self.tier_tokens[tier] += tokens
        for call, seconds in step.seconds.items():
            self.seconds.setdefault(call, []).append(seconds)

    @property
    def hit_ratio(self) -> float:
        """Tokens hit in any tier, as a share of all."""
        return sum(self.tier_tokens) / self.tokens if self.tokens else 0.0

    def plain(self) -> dict[str, Any]:
        """All sums as plain values, with raw numbers."""
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "hit_ratio": self.hit_ratio,
            "tier_tokens": dict(zip(self.tiers, self.tier_tokens, strict=True)),
            "tier_ratios": {n: t / max(1, self.tokens) for n, t in zip(self.tiers, self.tier_tokens, strict=True)},
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "refused_blocks": self.refused_blocks,
            "wrong_blocks": self.wrong_blocks,
            "elapsed_s": self.elapsed_s,
            "latency_s": {call: percentiles(values) for call, values in self.seconds.items()},
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Count and percentiles of durations in seconds."""
    found = np.percentile(np.asarray(values), PERCENTILES).tolist()
    return {"count": len(values), **{f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}}


def draw_tally(console: Console, tally: Tally) -> None:
    """Prints the sources of tokens, the calls' durations, and errors."""
    rate = tally.requests / tally.elapsed_s if tally.elapsed_s else 0.0
    done = f"{human_count(tally.requests)} requests, {human_count(tally.tokens)} tokens in {human_seconds(tally.elapsed_s)}"
    console.print(Text(f"{done} ({rate:,.0f} requests/s)", style="bold"), soft_wrap=True)
    console.print()
    show_table(console, SHARE_COLUMNS, share_rows(tally), empty="no tiers")
    console.print()
    show_table(console, LATENCY_COLUMNS, latency_rows(tally), empty="no calls")
    console.print()
    console.print(facts(traffic(tally)), soft_wrap=True)
    if tally.wrong_blocks:
        console.print(
            Text(
                f"WRONG: {tally.wrong_blocks:,} blocks were served with other bytes than were written", style="bold red"
            )
        )


def share_rows(tally: Tally) -> list[list[Cell]]:
    """One row a tier, one for computed tokens, one for all hits."""
    rows = list(zip(tally.tiers, tally.tier_tokens, strict=True))
    rows.append(("computed", tally.tokens - sum(tally.tier_tokens)))
    cells: list[list[Cell]] = [[name, human_count(n), human_share(n, tally.tokens)] for name, n in rows]
    return [
        *cells,
        [
            "hits",
            human_count(sum(tally.tier_tokens)),
            Text(human_share(sum(tally.tier_tokens), tally.tokens), style="bold"),
        ],
    ]


def latency_rows(tally: Tally) -> list[list[Cell]]:
    """One row a call."""
    rows: list[list[Cell]] = []
    for call, values in tally.seconds.items():
        found = percentiles(values)
        rows.append([call, human_count(len(values)), *(human_seconds(found[f"p{p}"]) for p in PERCENTILES)])
    return rows


def traffic(tally: Tally) -> list[tuple[str, Cell]]:
    """Bytes read and written, with rates over the replay, and refused blocks, if any."""
    pairs: list[tuple[str, Cell]] = [
        ("read", f"{human_bytes(tally.bytes_read)} ({human_rate(tally.bytes_read / max(tally.elapsed_s, 1e-9))})"),
        (
            "written",
            f"{human_bytes(tally.bytes_written)} ({human_rate(tally.bytes_written / max(tally.elapsed_s, 1e-9))})",
        ),
    ]
    if tally.refused_blocks:
        pairs.append(("not stored", Text(f"{human_count(tally.refused_blocks)} blocks", style="yellow")))
    return pairs
