"""KV events as a router reads them: where a daemon publishes them, and the Stored events so far."""

from __future__ import annotations

from tierd.events.payloads import Stored
from tierd.integrations.events import Subscriber
from tierd.testing import Daemon

EVENTS = """
[events]
enabled = true
bind = "ipc://{root}/events"
replay_bind = "ipc://{root}/events-replays"
"""
"""A daemon's settings: it publishes under the name `events` in its own directory."""


def stored_events(daemon: Daemon, name: str = "events") -> list[Stored]:
    """All Stored events that this publisher in the daemon's directory has published, from the first on."""
    address = f"ipc://{daemon.root}/{name}"
    with Subscriber(address, f"{address}-replays") as subscriber:
        events = [event for message in subscriber.catch_up() for event in message.batch.events]
    return [event for event in events if isinstance(event, Stored)]
