"""A worker with a pool of its own on the GPU, by cupy alone. tierd keeps what leaves the pool.

`python deploy/examples/cupy/worker.py` serves one prompt twice, with a model that writes one value
to a page. Everything runs in the worker's stream, and no call waits for the GPU but put.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy

from tierd.client import Client, NamespaceSpec, PutGroup

SPEC = NamespaceSpec("cupy-example", tokens_per_block=16, block_bytes=64 << 10)
PAGES = 8


class Worker:
    """Serves requests of at most PAGES blocks, one after another."""

    def __init__(self, client: Client) -> None:
        self.client, self.space = client, client.open_namespace(SPEC)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pool = cupy.empty((PAGES, SPEC.block_bytes), cupy.uint8)

    def serve(self, prompt: Sequence[int]) -> tuple[int, Any]:
        """How many blocks came from tierd, and the pages of all."""
        hashes = self.space.hash(prompt)
        pages = [self.pool[i] for i in range(len(hashes))]
        with self.stream:
            held = self.client.get(self.space, hashes, out=pages).blocks
            for i in range(held, len(pages)):
                compute(pages[i], prompt[i * SPEC.tokens_per_block :][: SPEC.tokens_per_block])
            if held < len(pages):
                parent = bytes(hashes[held - 1]) if held else bytes(32)
                group = PutGroup(self.space, hashes[held:], parent=parent, position=held)
                self.client.put(self.space, group, pages[held:])
        return held, pages


def compute(page: Any, tokens: Sequence[int]) -> None:
    """The model: KV of a block. A kernel of yours, launched in the current stream."""
    page.fill(sum(tokens) % 251)


def main() -> None:
    """Serves a prompt, overwrites the pool, and serves it again."""
    prompt = range(PAGES * SPEC.tokens_per_block)
    with Client() as client:
        worker = Worker(client)
        for _ in range(2):
            held, pages = worker.serve(prompt)
            with worker.stream:
                values = [int(page.get()[-1]) for page in pages]  # waits for the stream
                worker.pool.fill(0)
            print(f"{held} of {len(pages)} blocks from tierd; they hold {values}")


if __name__ == "__main__":
    main()
