"""`tierctl engines`: the connected engines, their configuration, and obstacles to sharing blocks.

It shows the sessions whose clients introduced an engine, and their namespaces. advice.py makes the
advice below the table. Columns missing from a table are in `--json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tierd._proto import admin_pb2 as pb
from tierd.cli.advice import Advice, Engine, Space, advise
from tierd.cli.ask import Ask, looking
from tierd.cli.figures import human_seconds
from tierd.cli.help import example
from tierd.cli.models import spec_of
from tierd.cli.render import Cell, Column, plain_of, show_table, state_text

NAMESPACES_SHOWN = 3
ENGINE_COLUMNS = (
    Column("engine", style="bold"),
    Column("version", spare=1),
    Column("pid", right=True),
    Column("role", spare=2),
    Column("model", style="cyan"),
    Column("namespaces", right=True),
    Column("rank", right=True, spare=3),
    Column("block", right=True, spare=4),
    Column("dtype", spare=5),
    Column("layout", spare=6),
    Column("hash", spare=7),
    Column("tenant", spare=8),
    Column("state", spare=10),
    Column("age", right=True, spare=9),
)


@click.command(epilog=example("tierctl engines"))
@looking
def engines(ask: Ask) -> None:
    """Lists the connected engines, and why some share no blocks."""
    with ask.connect() as daemon:
        sessions = [one for one in daemon.ask(pb.SessionsRequest()).sessions if one.engine]
        spaces = {one.id: spec_of(one.text) for one in daemon.ask(pb.NamespacesRequest()).namespaces}
    found = [engine_of(session, spaces) for session in sessions]
    said = advise([engine for engine, row in zip(found, sessions, strict=True) if row.state == "open"])
    if ask.as_json:
        ask.show_json({"engines": [plain_of(row) for row in sessions], "advice": [asdict(one) for one in said]})
    else:
        draw_engines(ask.console, [engine_row(*pair) for pair in zip(found, sessions, strict=True)], said)


def engine_of(session: pb.SessionInfo, spaces: Mapping[int, Mapping[str, object]]) -> Engine:
    """A session in the form of advice.py. spaces: specs by the id of rank 0."""
    opened = tuple(Space(number, spaces.get(number, {})) for number in session.namespaces)
    return Engine(session.id, session.pid, session.name, session.tenant, dict(session.engine), opened)


def draw_engines(console: Console, rows: Sequence[Sequence[Cell]], said: Iterable[Advice]) -> None:
    """Prints one row for each engine process, then the advice."""
    empty = "no engine is connected (`tierctl sessions` lists every client)"
    show_table(console, ENGINE_COLUMNS, rows, empty=empty)
    for advice in said:
        head = ("warning: ", "bold red") if advice.is_urgent else ("note: ", "yellow")
        text = Text.assemble(head, advice.fault), Text.assemble(("remedy: ", "green"), advice.remedy)
        console.print()
        console.print(text[0], soft_wrap=not console.is_terminal)
        console.print(
            Padding(text[1], (0, 0, 0, 2), expand=False) if console.is_terminal else text[1],
            soft_wrap=not console.is_terminal,
        )


def engine_row(engine: Engine, session: pb.SessionInfo) -> list[Cell]:
    """An engine's cells, in the order of ENGINE_COLUMNS."""
    words = engine.words
    return [
        engine.kind or "-",
        words.get("version", "-"),
        str(engine.pid),
        words.get("role", "-"),
        engine.model or "-",
        namespaces_text([space.id for space in engine.spaces]),
        words.get("ranks", "-"),
        *(engine.value(name) or "-" for name in ("tokens_per_block", "dtype", "layout")),
        " ".join(filter(None, (engine.value("hash_algorithm"), engine.value("hash_seed")))) or "tierd",
        engine.tenant,
        state_text(session.state),
        human_seconds(session.age_s),
    ]


def namespaces_text(ids: Sequence[int]) -> str:
    """The latest three, and the number of the others: `3 5 7 +2`."""
    shown = " ".join(str(number) for number in sorted(ids[-NAMESPACES_SHOWN:]))
    more = len(ids) - NAMESPACES_SHOWN
    return f"{shown} +{more}" if more > 0 else shown or "-"
