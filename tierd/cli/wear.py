"""`tierctl wear`: writes to each store, its remaining wear budget, and its drive's remaining life.

The daemon reads the drives; this module shows the answer. Columns missing from a table are in
`--json`.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
from rich.console import Console
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.ask import Ask, looking
from tierd.cli.figures import human_bytes, human_count, human_rate
from tierd.cli.help import example
from tierd.cli.render import Cell, Column, bar, facts, show_table

ASK_S = 60.0
"""Timeout. The daemon reads the drives, each for a few seconds at most."""
DAYS_PER_YEAR = 365.0
WORN_PERCENT = 95
"""Used share of a drive's endurance from which on it should be replaced."""
SHORT_LIFE_DAYS, LOW_LIFE_DAYS = 90.0, 365.0

WEAR_COLUMNS = (
    Column("store", style="bold"),
    Column("of", right=True, spare=3),
    Column("today", right=True),
    Column("since start", right=True, spare=4),
    Column("in all", right=True, spare=1),
    Column("rate", right=True),
    Column("budget/day", right=True),
    Column("left", right=True),
    Column("", spare=5, is_bar=True),
    Column("declined", right=True, spare=2),
    Column("drive", spare=6),
    Column("used", right=True),
    Column("life", right=True),
)


@click.command(epilog=example("tierctl wear -o wide"))
@looking
def wear(ask: Ask) -> None:
    """Shows the writes to each store, its wear budget, and its drive's life.

    The daemon fills new disk space with zeros in advance; these count as writes.
    """
    with ask.connect() as daemon:
        answer = daemon.ask(pb.WearRequest(), timeout_s=ASK_S)
    ask.show(answer, draw_wear)


def draw_wear(console: Console, reply: pb.WearReply) -> None:
    """Prints a row for each store, then its location, declined blocks, life source, and drives."""
    show_table(
        console, WEAR_COLUMNS, [wear_row(store) for store in reply.stores], empty="this daemon has no store on NVMe"
    )
    for store in reply.stores:
        console.print()
        console.print(
            facts(((store.tier, store.path), ("admission", store.admission), *declined(store))), soft_wrap=True
        )
        console.print(facts((("life from" if store.has_life else "life unknown:", store.life_basis),)), soft_wrap=True)
        draw_drives(console, store.drives)


def draw_drives(console: Console, drives: Iterable[pb.DriveInfo]) -> None:
    """Prints the drives of a store, and why a drive's wear is unknown."""
    for drive in drives:
        if drive.device:
            console.print(facts(drive_facts(drive)), soft_wrap=True)
        if drive.warning:
            console.print(
                Text(f"{drive.device}: the drive warns of failure; see `nvme smart-log {drive.device}`", style="red"),
                soft_wrap=True,
            )
        if drive.trouble:
            console.print(Text.assemble(("note: ", "yellow"), drive.trouble), soft_wrap=True)


def wear_row(store: pb.StoreWear) -> list[Cell]:
    """A store's cells, in the order of WEAR_COLUMNS."""
    written = (store.written_today_bytes, store.written_since_start_bytes, store.written_bytes)
    return [
        store.tier,
        human_bytes(store.capacity_bytes),
        *(human_bytes(size) for size in written),
        human_rate(store.write_bytes_per_s),
        human_bytes(store.budget_bytes_per_day) if store.has_budget else "none",
        left_text(store),
        bar(spent(store), 1.0) if store.has_budget else "",
        human_count(sum(store.declined.values())),
        " ".join(drive.model or drive.device for drive in store.drives if drive.device) or "-",
        used_text(store.drives),
        life_text(store),
    ]


def declined(store: pb.StoreWear) -> list[tuple[str, Cell]]:
    """The number of blocks that admission declined, by reason."""
    counts = [f"{reason} {human_count(count)}" for reason, count in sorted(store.declined.items())]
    return [("declined", ", ".join(counts))] if counts else []


def drive_facts(drive: pb.DriveInfo) -> list[tuple[str, Cell]]:
    """A drive in one line."""
    line: list[tuple[str, Cell]] = [("drive", drive.device)]
    if drive.model:
        line.append(("model", drive.model))
    if drive.capacity_bytes:
        line.append(("capacity", human_bytes(drive.capacity_bytes)))
    if drive.rotational:
        line.append(("kind", "rotational, by the kernel"))
    if drive.has_health:
        line += [("used", used_text([drive])), ("written", human_bytes(drive.written_bytes))]
        line.append(("power", f"{human_count(drive.power_on_hours)} h"))
    return line


def spent(store: pb.StoreWear) -> float:
    """The used share of the burst that the budget allows."""
    whole = store.budget_burst_bytes
    return 1.0 - max(0.0, store.budget_left_bytes) / whole if whole else 0.0


def left_text(store: pb.StoreWear) -> Text:
    """Bytes that may be written now; below zero (red) after durable writes."""
    if not store.has_budget:
        return Text("-")
    left = store.budget_left_bytes
    return Text(human_bytes(left) if left >= 0 else f"-{human_bytes(-left)}", style="red" if left < 0 else "")


def used_text(drives: Iterable[pb.DriveInfo]) -> Text:
    """The used percentage of the most worn drive."""
    used = max((drive.percentage_used for drive in drives if drive.has_health), default=None)
    return Text("-") if used is None else Text(f"{used} %", style="red" if used >= WORN_PERCENT else "")


def life_text(store: pb.StoreWear) -> Text:
    """Days of life left; in years from three years on."""
    if not store.has_life:
        return Text("-")
    days = store.life_days
    style = "red" if days < SHORT_LIFE_DAYS else "yellow" if days < LOW_LIFE_DAYS else "green"
    return Text(f"{days:,.0f} d" if days < 3 * DAYS_PER_YEAR else f"{days / DAYS_PER_YEAR:,.0f} y", style=style)
