"""Long sequences: in one call, and through full tiers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tierd._proto import cache_pb2 as pb
from tierd.client import BlockStatus, Client, NamespaceSpec
from tierd.testing import chain

LONG = """\
[[host]]
capacity = "128 MiB"
segment = "8 MiB"
eviction = "{policy}"
[[nvme]]
capacity = "512 MiB"
segment = "32 MiB"
"""


def test_a_million_tokens_in_one_call() -> None:
    """One Lookup and one Acquire each take 65,536 blocks of 16 tokens, within message limits."""
    hashes = np.random.default_rng(0).bytes(65_536 * 32)
    with Daemon() as daemon, RawClient(daemon.target) as client:
        group = pb.Group(namespace=client.open_namespace(), hashes=hashes, tokens=1 << 20)
        assert len(client.call(client.cache.Lookup, pb.LookupRequest(groups=[group])).tier_of[0]) == 65_536
        assert client.call(client.cache.Acquire, pb.AcquireRequest(groups=[group], tier=1)).tokens == 0


@pytest.mark.parametrize(
    "policy",
    ["reuse-index", pytest.param("lru", marks=pytest.mark.slow), pytest.param("arc", marks=pytest.mark.slow)],
)
def test_long_prompts_hold_nobody_up(policy: str) -> None:
    """While prompts of 131,072 tokens pass through full tiers, no put fails and lookups are served."""
    length, config = 8192, LONG.format(policy=policy)
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=60) as writer, Client(daemon.target) as other:
        spec = NamespaceSpec(model="long", tokens_per_block=16, block_bytes=4096)
        space, near = writer.open_namespace(spec), other.open_namespace(spec)
        ended, asked = threading.Event(), [0]

        def ask() -> None:
            while not ended.wait(0.01):
                other.lookup(near, chain(10_000, 1))
                asked[0] += 1

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            try:
                for number in range(10):
                    names = chain(number, length)
                    assert not (writer.put(space, names, [bytes(4096)] * length).statuses == BlockStatus.FAILED).any()
            finally:
                ended.set()
            asking.result(60)
        assert asked[0] > 10
