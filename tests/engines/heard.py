"""What routers hear of a daemon, or of an engine: where it publishes, and what it has said of stored blocks so far."""

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
    """What the publisher of this name in the daemon's directory has told, from the first on."""
    address = f"ipc://{daemon.root}/{name}"
    with Subscriber(address, f"{address}-replays") as subscriber:
        events = [event for message in subscriber.catch_up() for event in message.batch.events]
    return [event for event in events if isinstance(event, Stored)]
