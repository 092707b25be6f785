"""A sequence of a million tokens is one call."""

from __future__ import annotations

import numpy as np

from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tierd._proto import cache_pb2 as pb


def test_a_million_tokens_in_one_call() -> None:
    """65,536 blocks of 16 tokens are looked up and acquired in one call each, within the messages' bounds."""
    hashes = np.random.default_rng(0).bytes(65_536 * 32)
    with Daemon() as daemon, RawClient(daemon.target) as client:
        group = pb.Group(namespace=client.open_namespace(), hashes=hashes, tokens=1 << 20)
        assert len(client.call(client.cache.Lookup, pb.LookupRequest(groups=[group])).tier_of[0]) == 65_536
        assert client.call(client.cache.Acquire, pb.AcquireRequest(groups=[group], tier=1)).tokens == 0
