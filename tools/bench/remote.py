"""Put and get over loopback TCP, against raw gRPC streams of 2 MiB messages between two processes.

The streams have as many bytes, from memory as cold as the blocks', and no checksums, pages or
search. The server is grpc.aio, as the daemon's. A batch's first get, in which the daemon verifies
it, has a separate row. With lz4 the blocks are bf16 noise, of which five bytes in six travel. A
loopback is faster than any codec, so those rows promise nothing; their GB/s are of blocks.
"""

from __future__ import annotations

import itertools
import socket
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.client import Client, NamespaceSpec
from tierd.testing import Daemon, chain
from tools.bench.echo import Echo, cold_messages
from tools.bench.measure import COLD_BYTES, FULL, KIB, MIB, Cold, Effort, Work, cpus, interleaved, rates
from tools.bench.rows import Row, row_of

COUNT = 16
VERBS = (("get", "pull", "received"), ("get_first", "pull", "verified and received"), ("put", "push", "sent"))
"""Each with the stream that is its limit."""
HEAP_BYTES = 16 * MIB
"""Until glibc has freed a mapping of this size, it maps and faults in each message anew. Raw
streams then take twice as long, gets a third more."""
CONFIG = """\
nvme = []
[server]
tcp_listen = "127.0.0.1:{port}"
tcp_credential_file = "{secret}"
[[host]]
capacity = "{capacity} MiB"
eviction = "lru"
"""


def _noise() -> NDArray[np.uint8]:
    """Numbers of a normal distribution, as bf16, in bytes."""
    numbers = np.random.default_rng(0).standard_normal(16 * MIB, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


def _works(client: Client, echo: Echo, cold: Cold, block_bytes: int) -> dict[str, Work]:
    """Puts of new batches, first gets of the last one, second gets of the one before, and streams
    of as many bytes."""
    space = client.open_namespace(NamespaceSpec(model="bench-remote", tokens_per_block=16, block_bytes=block_bytes))
    messages, target = cold_messages(block_bytes), np.ones((COUNT, block_bytes), dtype=np.uint8)

    def put(number: int) -> None:
        blocks = list(cold.blocks(COUNT, block_bytes))
        assert client.put(space, chain(number, COUNT), blocks).stored == COUNT

    def get(number: int) -> None:
        assert client.get(space, chain(number, COUNT), out=list(target)).blocks == COUNT

    def push() -> None:
        assert echo.push(itertools.islice(messages, COUNT)) == COUNT * block_bytes

    def pull() -> None:
        assert echo.pull(block_bytes, COUNT) == COUNT * block_bytes

    put(0)
    return {
        "push": lambda _: push,
        "put": lambda n: lambda: put(n + 1),
        "pull": lambda _: pull,
        "get_first": lambda n: lambda: get(n),
        "get": lambda n: lambda: get(max(0, n - 1)),
    }


def rows(effort: Effort = FULL) -> list[Row]:
    """`remote_put_2MiB`, `remote_get_2MiB` and `remote_get_first_2MiB`, and these by lz4, GB/s."""
    length = effort.pick(COLD_BYTES, MIB)
    return _rows(Cold(length), effort) + _rows(Cold(length, content=_noise()), effort, codec="lz4")


def _rows(cold: Cold, effort: Effort, *, codec: str = "") -> list[Row]:
    block_bytes = effort.pick(2 * MIB, 4 * KIB)
    bytes(HEAP_BYTES)  # and frees it: as in a process that has run for a while
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as probe:
        port, secret = probe.getsockname()[1], Path(directory) / "secret"
        probe.close()
        secret.touch(mode=0o600)
        secret.write_text("a-secret-of-this-bench\n")
        config = CONFIG.format(port=port, secret=secret, capacity=effort.pick(512, 16))
        with Daemon(config) as daemon, Echo("127.0.0.1:0") as echo:
            target = f"127.0.0.1:{port}" + f"?codec={codec}" * bool(codec)
            with Client(target, credential_file=str(secret), timeout_s=60) as client:
                costs = interleaved(_works(client, echo, cold, block_bytes), runs=effort.runs, pid=daemon.pid)
    gigabytes, out = COUNT * block_bytes / 1e9, []
    name, what = (f"{codec}_2MiB", f"of bf16 noise by {codec}, ") if codec else ("2MiB", "")
    for verb, raw, meaning in VERBS:
        row = row_of(
            f"remote_{verb}_{name}",
            rates(costs[verb], gigabytes),
            unit="GB/s",
            limits=rates(costs[raw], gigabytes),
            meaning=f"{COUNT} blocks of 2 MiB {what}{meaning} over loopback TCP, against a raw gRPC stream of 2 MiB messages",
        )
        out.append(row.with_cpu(cpus(costs[verb]), gigabytes=gigabytes))
    return out
