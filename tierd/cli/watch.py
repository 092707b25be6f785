"""The verb `watch`: prints the client's events about blocks, as they happen.

A line has one event, and is written before the wait for the next one. No event is kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import click

from tierd._proto import admin_pb2 as pb
from tierd.cli.ask import Ask, verb
from tierd.cli.blocks import HASH_DIGITS
from tierd.cli.help import example
from tierd.cli.models import Models
from tierd.client import Client
from tierd.client.values import Event, EventKind
from tierd.errors import TierdError

HASHES_SHOWN = 3


@click.command(epilog=example("tierctl watch --json"))
@click.option("--count", type=click.IntRange(1), default=None, help="End after this many events.")
@verb
def watch(ask: Ask, *, count: int | None) -> None:
    """Prints events as they happen: blocks stored, blocks removed, epochs ended.

    It prints one line for each event until Ctrl-C, with exit code 130.
    """
    names = Names(ask)
    with Client(ask.target, name="tierctl watch") as client:
        for event in islice(client.watch(), count):
            tiers = client.tiers
            text = json.dumps(plain_event(event, tiers)) if ask.as_json else line_of(event, tiers, names)
            print(text, flush=True)


class Names:
    """The models of namespaces. An event with an unknown namespace makes it ask the daemon again."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._models = Models([])
        self._missed = set[int]()

    def of(self, namespace: int) -> str:
        """The model's short name; the namespace's id if the daemon does not list it."""
        if namespace not in self._models and namespace not in self._missed:
            try:
                with self._ask.connect() as daemon:
                    self._models = Models(daemon.ask(pb.NamespacesRequest()).namespaces)
            except TierdError:  # a remote daemon, or this user is no operator: show the id
                pass
            if namespace not in self._models:
                self._missed.add(namespace)
        return self._models.short_name(namespace)


def line_of(event: Event, tiers: Sequence[str], names: Names) -> str:
    """`04:12:33.123  stored   host.0  llama-3-8b  2 blocks  3f9a0c11e2d4 77aa01c3b5e6`."""
    now = time.time()
    clock = f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d}"
    if event.kind == EventKind.LOST:
        return f"{clock}  lost     events before this one: this program read too slowly"
    kind, model = event.kind.name.lower(), names.of(event.namespace)
    if event.kind == EventKind.ENDED:
        return f"{clock}  {kind:<7}  {model}: the old epoch; all of its blocks are misses"
    count = len(event.hashes)
    shown = " ".join(row.tobytes().hex()[:HASH_DIGITS] for row in event.hashes[:HASHES_SHOWN])
    more = f" +{count - HASHES_SHOWN}" if count > HASHES_SHOWN else ""
    why = f"  ({event.reason})" if event.reason not in ("", "none") else ""
    blocks = f"{count} block{'' if count == 1 else 's'}"
    return f"{clock}  {kind:<7}  {tier_of(event, tiers):<8}  {model}  {blocks}  {shown}{more}{why}"


def plain_event(event: Event, tiers: Sequence[str]) -> dict[str, Any]:
    """An event as plain values, with whole hashes."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "sequence": event.sequence,
        "kind": event.kind.name.lower(),
        "tier": tier_of(event, tiers),
        "namespace": event.namespace,
        "hashes": [row.tobytes().hex() for row in event.hashes],
        "reason": event.reason,
    }


def tier_of(event: Event, tiers: Sequence[str]) -> str:
    """The name of the event's tier."""
    return tiers[event.tier] if event.tier < len(tiers) else str(event.tier)
