"""Page gauges in /metrics: each page has one state, and pinned pages have a separate gauge."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.system.blocks import await_true
from tests.system.sdk import HOST, SMALL, put
from tests.system.tcp import free_port
from tests.system.warm import Daemon
from tierd.client import Client
from tierd.testing import chain

COUNT = 5


def test_states_do_not_overlap() -> None:
    """A pinned page counts once as ready and once as pinned; the states of a tier add up to its pages."""
    port = free_port()
    config = f'nvme = []\n[server]\nmetrics_listen = "127.0.0.1:{port}"\n{HOST}'
    with Daemon(config) as daemon, Client(daemon.target) as client:
        namespace = client.open_namespace(SMALL)
        assert put(client, namespace, 1, COUNT)
        lease = client.acquire(namespace, chain(1, COUNT - 1))

        def told() -> tuple[dict[str, float], float]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
                families = {f.name: f.samples for f in text_string_to_metric_families(reply.read().decode())}
            states = {sample.labels["state"]: sample.value for sample in families["tierd_tier_pages"]}
            return states, families["tierd_tier_pinned_pages"][0].value

        await_true(lambda: told()[0]["ready"] == COUNT and told()[1] == COUNT - 1, "the gauges")
        states, _ = told()
        assert "pinned" not in states
        pages = sum(states.values())
        assert pages * SMALL.block_bytes % (4 << 20) == 0, "whole segments"
        lease.release()
