"""Processes of one slab: `python -m tools.gpu.attending own|read|write DESCRIPTOR LENGTH FATBINS`.

The owner makes the slab and sends its descriptor over the socket. It then waits. A reader maps the
slab for reading, and attends to its pages until it is killed. A writer maps it for reading, and
writes. Both report by lines.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from pathlib import Path

from tierd.errors import TierdError
from tools.gpu import slabs
from tools.gpu.device import Gpu
from tools.gpu.shapes import MODELS, PAGE_TOKENS, Decode, Place, Pool

TOLD_S = 0.05
MODEL = MODELS["8b"]
PAGE_BYTES = 2 * MODEL.kv_heads * PAGE_TOKENS * MODEL.head_dim * 2


def pool_in(gpu: Gpu, slab: slabs.Slab, *, is_filled: bool) -> Pool:
    """The pages of a slab."""
    return Pool(gpu, MODEL, slab.length_bytes // PAGE_BYTES, Place(address=slab.address, is_filled=is_filled))


def own(descriptor: int, length_bytes: int) -> None:
    """Ends when it is killed, or when the socket closes."""
    gpu, peer = Gpu(with_kernels=False), socket.socket(fileno=descriptor)
    slab = slabs.made(gpu, length_bytes)
    pool_in(gpu, slab, is_filled=False)
    exported = slabs.exported(gpu, slab)
    socket.send_fds(peer, [str(slab.length_bytes).encode()], [exported])
    os.close(exported)
    peer.recv(1)


def read(descriptor: int, length_bytes: int, fatbins: Path) -> None:
    """Lines: the count of decodes, a digest of the outputs since the last line, right or wrong."""
    gpu = Gpu(fatbins)
    slab = slabs.imported(gpu, descriptor, length_bytes, rights="READ")
    with gpu.room() as room:
        pool = pool_in(gpu, slab, is_filled=True)
        decode = Decode(gpu, room, pool, [pool.pages * PAGE_TOKENS // 4 - 5] * 4, q_heads=MODEL.q_heads)
        decode.launch()
        found = decode.distances([(sequence, head) for sequence in range(4) for head in (0, 5)])
        right = "right" if found.are_right else f"wrong: {found}".replace(" ", "_")
        count, seen, told = 0, set[str](), time.monotonic()
        while True:
            decode.launch()
            seen.add(hashlib.sha256(gpu.read_back(decode.to.out).tobytes()).hexdigest()[:16])
            count += 1
            if time.monotonic() > told + TOLD_S or count == 1:
                print(count, "+".join(sorted(seen)), right, flush=True)
                seen, told = set(), time.monotonic()


def write(descriptor: int, length_bytes: int) -> None:
    """One line: the driver's answer."""
    gpu = Gpu(with_kernels=False)
    slab = slabs.imported(gpu, descriptor, length_bytes, rights="READ")
    try:
        gpu.ask("cuMemsetD8Async", slab.address, 0xEE, length_bytes, gpu.stream)
        gpu.finish()
        print("written", flush=True)
    except TierdError as error:
        print("refused", error, flush=True)


if __name__ == "__main__":
    role, place, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if role == "read":
        read(place, length, Path(sys.argv[4]))
    {"own": own, "write": write}[role](place, length)
