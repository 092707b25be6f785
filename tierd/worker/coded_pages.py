"""Pages in this process's memory, stored encoded in the daemon.

As TierdPages, but attention reads no page in place: an acquire decodes blocks into pages of this
process, and a commit stores an encoded copy. The page keeps its exact values until it is released.
A block that cannot be decoded ends the prefix; `faults` counts it. Without a codec, TierdPages is
better: it copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from tierd.client import BlockStatus, Client, Lease, NamespaceSpec, PutGroup
from tierd.client.values import Hashes
from tierd.codecs.coding import Coding, coded_spec
from tierd.codecs.loops import scratch
from tierd.codecs.values import Bytes
from tierd.core.formats.model import ROOT
from tierd.errors import ConfigError
from tierd.worker.pages import Held, Page, PageShape
from tierd.worker.tierd_pages import TierdOptions, TierdPages


class CodedPages(TierdPages):
    """A source of pages over a daemon; one caller thread. The caller closes the client, after this."""

    def __init__(
        self,
        client: Client,
        spec: NamespaceSpec,
        *,
        shape: PageShape,
        coding: Coding,
        options: TierdOptions | None = None,
    ) -> None:
        """spec: of the pages as they are. coding: of blocks in the pages' shape.

        Raises ConfigError for pages on a GPU, and what Client.open_namespace raises.
        """
        if shape.backend.is_on_gpu:
            raise ConfigError(
                f"codec {coding.text}: pages lie on {shape.backend.device}; choose device='cpu', or no codec"
            )
        self.coding = coding
        super().__init__(client, coded_spec(spec, coding), shape=shape, options=options)

    @property
    def tier(self) -> str:
        """The kind of tier where encoded blocks lie."""
        return self._options.tier or "host"

    def acquire(self, tokens: Sequence[int], *, marks: Sequence[int] = (), by_layer: bool = False) -> Held:
        """Decoded pages of the longest stored prefix, with all layers."""
        return super().acquire(tokens, marks=marks)

    def reserve(self, count: int) -> list[Page]:
        """Private pages of this process's memory."""
        return self._memory.reserve(count)

    def commit(self, pages: Sequence[Page], tokens: Sequence[int], *, after: Page | None) -> list[Page]:
        """Stores copies of private pages and names these. Pages after one that was not stored stay private."""
        done, size = 0, self._shape.tokens_per_block
        for is_private, run in groupby(pages, key=lambda page: page.is_private):
            part = list(run)
            if is_private:
                said = tokens[done * size : (done + len(part)) * size]
                self._name_stored(part, said, after)
            if part[-1].is_private:
                break
            done, after = done + len(part), part[-1]
        return list(pages)

    def release(self, pages: Sequence[Page]) -> None:
        """Keeps own pages without a holder for the next reserve, unnamed. Decoded ones are dropped."""
        for page in pages:
            if page.origin is None:
                if page.holders == 1:
                    page.hash, page.position = b"", 0
                self._memory.release([page])
                continue
            page.holders -= 1
            if page.holders == 0:
                page.array = page.origin = None

    def _name_stored(self, pages: Sequence[Page], tokens: Sequence[int], after: Page | None) -> None:
        parent, number = (after.hash, after.position + 1) if after else (ROOT, 0)
        hashes = self._namespace.hash(tokens, parent=parent)
        stored = self._guarded(partial(self._stored, pages, tokens, hashes, parent, number), int)
        for i, page in enumerate(pages[:stored]):
            page.hash, page.position = hashes[i].tobytes(), number + i

    def _commit_tail(self, page: Page, tokens: Sequence[int], after: Page | None) -> bool:
        parent, number = (after.hash, after.position + 1) if after else (ROOT, 0)
        hashes = self._namespace.hash(tokens, parent=parent, with_tail=True)
        return self._stored([page], tokens, hashes, parent, number) == 1

    def _stored(self, pages: Sequence[Page], tokens: Sequence[int], hashes: Hashes, parent: bytes, number: int) -> int:
        """Stores encoded copies of pages; the last may be short. Returns how many leading ones are stored."""
        if len(hashes) != len(pages):  # no daemon
            return 0
        covered = self._namespace.block_tokens(len(pages), tokens=len(tokens)).tolist()
        blocks = [
            self.coding.encode(self._bytes_of(page, count), tokens=count, number=number + i)
            for i, (page, count) in enumerate(zip(pages, covered, strict=True))
        ]
        lengths = list(map(len, blocks))
        group = PutGroup(self._namespace, hashes, len(tokens), lengths, parent=parent, position=number)
        with self._client.reserve(group, tier=self.tier) as reservation:
            for i, buffer in enumerate(reservation.buffers()):
                if buffer is not None:
                    buffer[:] = blocks[i]
            statuses = reservation.statuses.copy()
            given = statuses == BlockStatus.RESERVED
            if given.any():
                statuses[given] = reservation.commit(durable=self._options.durable).statuses
        stored = np.isin(statuses, (BlockStatus.READY, BlockStatus.EXISTS))
        return int(np.argmin(stored)) if not stored.all() else len(stored)

    def _bytes_of(self, page: Page, tokens: int) -> Bytes:
        """The first tokens of a page as a block, until the next call of this thread."""
        block = scratch("block", self._shape.bytes_of(tokens))
        self._shape.backend.copy(page.array, self._shape.view(block, tokens), tokens=tokens)
        return block

    def _held(self, lease: Lease, hashes: Hashes, *, found: NDArray[np.int64]) -> Held:
        """Pages with the decoded blocks, up to the first that cannot be decoded."""
        if not lease:
            return Held()
        counts = lease.handles["tokens"].tolist()
        coded = [view.copy() for view in lease.views()]
        good = lease.check()
        lease.release()
        pages = list[Page]()
        for i, (data, count) in enumerate(zip(coded[:good], counts, strict=False)):
            block = self._guarded(partial(self.coding.decode, data, tokens=count), lambda: None)
            if block is None:
                break
            array = self._shape.view(block, count)
            pages.append(Page(array, hash=hashes[i].tobytes(), position=i, origin=block))
        left = served = sum(counts[: len(pages)])
        tail = pages.pop() if pages and counts[len(pages) - 1] < self._shape.tokens_per_block else None
        tiers = dict[str, int]()
        for name, tokens in zip(self._client.tiers, found.tolist(), strict=False):
            tiers[name], left = min(tokens, left), left - min(tokens, left)
        return Held(pages, tail, served, {name: tokens for name, tokens in tiers.items() if tokens})
