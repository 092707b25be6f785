"""Where the pages of a worker come from: the seam between the engine and tierd.

Purpose: `PageSource`, six verbs over pages that the engine reads and writes in place, and `LocalPages`, which knows no
daemon and reuses nothing. `tierd_pages.py` has the source over a daemon. Non-purpose: what is computed into pages.
Invariants: a page is *private* (no name, one writer) until it is committed; a named page is never written again; a
source never raises because a daemon is slow, full or gone: it gives fewer named pages, and plain memory in place of
private ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from array_api_compat import array_namespace

from tierd.core.formats.block import KVGeometry
from tierd.errors import InvalidArgument
from tierd.kernels.e4m3 import E4M3, ScaledPages, encoded
from tierd.worker.backend import Backend, page_bytes
from tierd.worker.model import Llama
from tierd.worker.scales import Scales, check_scales, scales_for

Array = Any
"""A numpy array, a torch tensor or, over memory of a GPU, a GpuArray."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """What a page of this worker looks like. scales: of e4m3, and of nothing else. Raises ConfigError."""

    geometry: KVGeometry
    tokens_per_block: int
    backend: Backend
    scales: Scales | None = None

    def __post_init__(self) -> None:
        check_scales(self.geometry, self.scales)

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block."""
        return self.bytes_of(self.tokens_per_block)

    def bytes_of(self, tokens: int) -> int:
        """Bytes of a block of so many tokens, compact."""
        return page_bytes(self.geometry, tokens)

    def view(self, buffer: Any, tokens: int | None = None) -> Array:
        """[layers, 2, tokens, kv_heads, head_dim] over a block's bytes, without a copy."""
        count = self.tokens_per_block if tokens is None else tokens
        return self.backend.page(buffer, geometry=self.geometry, tokens=count)

    def stored(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values of one layer, [tokens, kv_heads, head_dim] each, as they are written to pages."""
        if self.scales is None:
            return k, v
        xp = array_namespace(k, v)
        if k.dtype == xp.float32:  # as kernels are given them: bytes do not depend on who encodes
            k, v = xp.astype(k, xp.float16), xp.astype(v, xp.float16)
        keys, values = self.scales.values[layer]
        return encoded(k, keys), encoded(v, values)

    def read(self, pages: Sequence[Array], layer: int | None = None) -> Sequence[Array]:
        """Pages of one layer, or of all, as attention takes them."""
        some = pages if layer is None else [page[layer] for page in pages]
        if self.scales is None:
            return some
        return ScaledPages(some, self.scales.values if layer is None else self.scales.values[layer])


def page_shape(model: Llama, *, tokens_per_block: int = 16, kv_dtype: str | None = None) -> PageShape:
    """Pages for a model. kv_dtype: float32, float16, float8_e4m3fn, or bfloat16 with torch; None: what its backend attends to. Raises ConfigError."""
    geometry = model.spec.geometry(kv_dtype or model.backend.kv_dtype)
    page_bytes(geometry, tokens_per_block)
    scales = scales_for(model.kv_bounds()) if geometry.dtype == E4M3 else None
    return PageShape(geometry, tokens_per_block, model.backend, scales)


@dataclass(eq=False, slots=True)
class Page:
    """One page in a block table, perhaps in several (forks).

    array: [layers, 2, tokens, kv_heads, head_dim] over the page's bytes; None: lost, and its tokens are to be computed again. hash: the block's name; empty while private.
    position: number of the block in its sequence, once named. origin: what the source needs to commit or release it.
    holders: block tables that contain it.
    """

    array: Array
    hash: bytes = b""
    position: int = 0
    origin: Any = None
    holders: int = 1

    @property
    def is_private(self) -> bool:
        """Not committed: its holder may write to it."""
        return not self.hash

    @property
    def is_lost(self) -> bool:
        """Whether what it held is gone: a commit failed, and nobody knows how far it came."""
        return self.array is None


@dataclass(frozen=True, slots=True)
class Held:
    """What an acquire gave. The pages are named and pinned for the caller until released.

    tokens: covered by pages, the tail included. tail: a short last block (its array has as many tokens as it covers), in
    compact layout, to be copied into a private page. tier_tokens: tokens by the name of the tier where they were found.
    """

    pages: list[Page] = field(default_factory=list)
    tail: Page | None = None
    tokens: int = 0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)


class PageSource(Protocol):
    """Pages for block tables. One caller thread."""

    @property
    def shape(self) -> PageShape:
        """What every page looks like."""
        ...

    def acquire(self, tokens: Sequence[int], *, marks: Sequence[int] = ()) -> Held:
        """The longest stored prefix of these tokens. marks: counts at which an earlier turn ended, where a short block may be."""
        ...

    def reserve(self, count: int) -> list[Page]:
        """Exactly so many private pages, writable, contents undefined."""
        ...

    def commit(self, pages: Sequence[Page], tokens: Sequence[int], *, after: Page | None) -> list[Page]:
        """Names full pages as the blocks of `tokens`, which follow the block of page `after` (None: the first).

        A page that has its name already (a fork committed it) is returned as it is. Returns the pages to go on with, in order: the same, now named, or the page of the same block that was there
        before (then the private one is released); or the same, still private, if it could not be stored, and lost if nobody knows whether it was.
        """
        ...

    def commit_tail(self, page: Page, tokens: Sequence[int], *, after: Page | None) -> bool:
        """Stores a copy of the first len(tokens) tokens of a private page as a short block; the page stays private."""
        ...

    def release(self, pages: Sequence[Page]) -> None:
        """One block table each let go of these pages; with its last holder a page is unpinned or, if private, free again."""
        ...

    def report_attention(self, pages: Sequence[Page], mass: Sequence[float]) -> None:
        """Attention weight that fell on each page; a hint for eviction."""
        ...

    def close(self) -> None:
        """Gives back whatever is still set aside."""
        ...


class LocalPages:
    """Pages in this process's own memory, on the backend's device: nothing is named, stored or reused. The worker without a cache."""

    def __init__(self, shape: PageShape) -> None:
        """shape: of every page."""
        self._shape = shape
        self._spare: list[Page] = []
        self.in_use = 0

    @property
    def shape(self) -> PageShape:
        """What every page looks like."""
        return self._shape

    def acquire(self, tokens: Sequence[int], *, marks: Sequence[int] = ()) -> Held:
        """Nothing is ever stored."""
        return Held()

    def reserve(self, count: int) -> list[Page]:
        """So many private pages, those given back first."""
        if count < 0:
            raise InvalidArgument(f"reserve: {count} pages is below 0; ask for what the sequence needs")
        pages = [self._take() for _ in range(count)]
        self.in_use += count
        return pages

    def commit(self, pages: Sequence[Page], tokens: Sequence[int], *, after: Page | None) -> list[Page]:
        """Every page stays private."""
        return list(pages)

    def commit_tail(self, page: Page, tokens: Sequence[int], *, after: Page | None) -> bool:
        """Not stored."""
        return False

    def release(self, pages: Sequence[Page]) -> None:
        """Pages without a holder are kept for the next reserve."""
        for page in pages:
            page.holders -= 1
            if page.holders == 0:
                self.in_use -= 1
                self._spare.append(page)

    def report_attention(self, pages: Sequence[Page], mass: Sequence[float]) -> None:
        """Nobody listens."""

    def close(self) -> None:
        """Drops the spare pages."""
        self._spare.clear()
        self._shape.backend.trim()

    def _take(self) -> Page:
        if self._spare:
            page = self._spare.pop()
            page.holders = 1
            return page
        return Page(self._shape.view(self._shape.backend.memory(self._shape.block_bytes)))
