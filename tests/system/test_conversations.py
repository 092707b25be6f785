"""What a conversation leaves behind in the client when its call fails."""

from __future__ import annotations

import gc
import os
import signal
import weakref

from tierd.client import Client, NamespaceSpec
from tierd.errors import DeadlineExceeded
from tierd.testing import Daemon, chain


class Thing:
    """What a caller holds, such as a view."""


def test_a_failed_call_keeps_nothing_alive() -> None:
    """What the caller holds while a call fails goes when the caller lets go of it, not with the next collection: views are such things."""
    with Daemon() as daemon, Client(daemon.target) as client:
        namespace = client.open_namespace(NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096))
        os.kill(daemon.pid, signal.SIGSTOP)

        def call() -> weakref.ref[Thing]:
            thing = Thing()
            try:
                client.lookup(namespace, chain(1, 1), timeout_s=0.3)
            except DeadlineExceeded:
                return weakref.ref(thing)
            raise AssertionError("a daemon that was stopped has answered")

        gc.disable()
        try:
            assert call()() is None
        finally:
            gc.enable()
            os.kill(daemon.pid, signal.SIGCONT)
