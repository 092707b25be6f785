"""Blocks that go from host memory to a GPU layer by layer, while a worker computes with the first."""

from __future__ import annotations

import pytest

from tests.system.device_driver import read_at, use_driver
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.test_by_layer import BLOCKS, FIRST_HIT, KEPT, LAYER_BYTES, LAYERS, NAMES, NOTE, SPEC, layer_of, put
from tests.system.test_encoded_stores import evict
from tests.system.warm import Daemon
from tierd.client import Client, Group

DEVICE = '[[device]]\nkind = "cuda"\ncapacity = "64 MiB"\nsegment = "32 MiB"\n\n'
SOON_S = 20.0


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later child processes use the driver."""
    use_driver(monkeypatch)


def layer_by_layer(talk: Talk, target: str) -> None:
    """Runs in the worker: acquires on the GPU, and says after each layer whether its bytes are right."""
    client = Client(target)
    space = client.open_namespace(SPEC)
    talk.say("ready")
    talk.hear()
    lease = client.acquire_by_layer(Group(space, NAMES), tier="device")
    views = lease.views()
    talk.say([len(lease), lease.await_layer(3, timeout_s=SOON_S), lease.await_layer(4, timeout_s=0.0)])
    for layer in range(LAYERS):
        came = lease.await_layer(layer, timeout_s=SOON_S)
        start, end = layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES
        pairs = zip(views, KEPT, strict=True)
        talk.say([came, all((read_at(view[start:end]) == layer_of(block, layer)).all() for view, block in pairs)])
    talk.say(lease.check())
    talk.hear()


@pytest.mark.parametrize("source", ["host", "nvme"])
def test_layers_come_to_a_gpu_in_order(source: str) -> None:
    """A layer of all blocks is on the GPU, with the right bytes, before later ones are copied."""
    with Daemon(DEVICE + FIRST_HIT, faults=True) as daemon:
        with Client(daemon.target) as client:
            put(client)
        if source == "nvme":
            evict(daemon)
        with Elsewhere(layer_by_layer, daemon.target) as worker, daemon.faults() as faults:
            assert worker.hear() == "ready"
            faults.arm(NOTE, f"delay:2@{5 if source == 'host' else 13}x1")
            worker.say("go")
            assert worker.hear() == [BLOCKS, True, False]
            assert [worker.hear() for _ in range(LAYERS)] == [[True, True]] * LAYERS
            assert worker.hear() == BLOCKS
