"""Sources of a worker's pages: the interface between the engine and tierd.

`PageSource` has operations on pages that the engine reads and writes in place. `LocalPages`
uses no daemon and reuses nothing; `tierd_pages.py` uses a daemon. A page is *private* (no name, one
writer) until it is committed; a named page is never written again. No source raises because a
daemon is slow, full or gone. It returns fewer named pages then, and plain memory for private ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

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
    """Shape of a worker's pages. scales: only for e4m3. Raises ConfigError."""

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
        """Keys and values of one layer, [tokens, kv_heads, head_dim] each, as written to pages."""
        if self.scales is None:
            return k, v
        xp = array_namespace(k, v)
        if k.dtype == xp.float32:  # the input type of kernels: bytes do not depend on the encoder
            k, v = xp.astype(k, xp.float16), xp.astype(v, xp.float16)
        keys, values = self.scales.values[layer]
        return encoded(k, keys), encoded(v, values)

    def read(self, pages: Sequence[Array], layer: int | None = None) -> Sequence[Array]:
        """Pages of one layer, or of all, as attention takes them."""
        some = pages if layer is None else _OneLayer(pages, layer)
        if self.scales is None:
            return some
        return ScaledPages(some, self.scales.values if layer is None else self.scales.values[layer])


@dataclass(frozen=True, slots=True)
class _OneLayer(Sequence[Array]):
    """One layer of pages; only those that are asked for are looked at."""

    pages: Sequence[Array]
    layer: int

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, page: Any) -> Array:
        return self.pages[page][self.layer]


def page_shape(model: Llama, *, tokens_per_block: int = 16, kv_dtype: str | None = None) -> PageShape:
    """Pages for a model. kv_dtype: float32, float16, float8_e4m3fn, or bfloat16 with torch; None:
    the backend's type. Raises ConfigError."""
    geometry = model.spec.geometry(kv_dtype or model.backend.kv_dtype)
    page_bytes(geometry, tokens_per_block)
    scales = scales_for(model.kv_bounds()) if geometry.dtype == E4M3 else None
    return PageShape(geometry, tokens_per_block, model.backend, scales)


@dataclass(eq=False, slots=True)
class Page:
    """One page in one or, after forks, several block tables.

    array: [layers, 2, tokens, kv_heads, head_dim] over the page's bytes; None: lost.
    hash: the block's name; empty while private. position: number of the block, once named.
    origin: the source's record for commit and release. holders: block tables that contain it.
    moves: counts private pages, of any source, that became others in place. Addresses may change,
    and contents may be lost. moved: its value when this one last did.
    """

    moves: ClassVar[int] = 0
    array: Array
    hash: bytes = b""
    position: int = 0
    origin: Any = None
    holders: int = 1
    moved: int = 0

    @property
    def is_private(self) -> bool:
        """Not committed: its holder may write to it."""
        return not self.hash

    def become(self, now: Page) -> None:
        """Turns into another page for all its holders."""
        self.array, self.hash, self.position, self.origin = now.array, now.hash, now.position, now.origin
        Page.moves += 1
        self.moved = Page.moves

    @property
    def is_lost(self) -> bool:
        """Whether its content is lost: a commit failed with an unknown outcome."""
        return self.array is None


@dataclass(frozen=True, slots=True)
class Held:
    """An acquire's result. The pages are named and pinned for the caller until released.

    tokens: covered by pages, the tail included. tier_tokens: by the name of the tier that had them.
    tail: a short last block, compact, to be copied into a private page; its array has its tokens.
    arriving: waits until a layer (None: all) is in the pages; False: they will not come. None: all
    are there. advised_compute_tokens: stored as well, but expected to be faster to compute.
    """

    pages: list[Page] = field(default_factory=list)
    tail: Page | None = None
    tokens: int = 0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    arriving: Callable[[int | None], bool] | None = None
    advised_compute_tokens: int = 0


class PagesMissing(Exception):
    """Pages of a stored prefix did not come. table: the sequence's."""

    def __init__(self, table: Any) -> None:
        super().__init__("pages of a stored prefix did not come; compute them")
        self.table = table


class PageSource(Protocol):
    """Pages for block tables. One caller thread."""

    @property
    def shape(self) -> PageShape:
        """Shape of every page."""
        ...

    def acquire(self, tokens: Sequence[int], *, marks: Sequence[int] = (), by_layer: bool = False) -> Held:
        """The longest stored prefix of these tokens. marks: ends of earlier turns, with short blocks perhaps.
        by_layer: also before all of its layers are in the pages."""
        ...

    def reserve(self, count: int) -> list[Page]:
        """Exactly so many private pages, writable, contents undefined."""
        ...

    def commit(self, pages: Sequence[Page], tokens: Sequence[int], *, after: Page | None) -> list[Page]:
        """Names full pages as the blocks of `tokens`, after the block of page `after` (None: the
        first).

        Returns the pages to continue with, in order. An already named page (committed by a fork) is
        unchanged. Others are the same page, now named, or the existing page of the same block; then
        the private one is released. A page that could not be stored stays private; it is lost if
        the outcome is unknown.
        """
        ...

    def commit_tail(self, page: Page, tokens: Sequence[int], *, after: Page | None) -> bool:
        """Stores a copy of the first len(tokens) of a private page as a short block. The page stays private."""
        ...

    def release(self, pages: Sequence[Page]) -> None:
        """Removes one holder from each page. Without holders a page is unpinned or, if private, free again."""
        ...

    def report_attention(self, pages: Sequence[Page], mass: Sequence[float]) -> None:
        """Reports the attention weight on each page, a hint for eviction."""
        ...

    def computed(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Reports a pass over prompts. parts: of each sequence, the tokens before and those computed.
        seconds: with the waits of `Held.arriving`."""
        ...

    def close(self) -> None:
        """Releases reserved pages."""
        ...


class LocalPages:
    """Pages in this process's memory, on the backend's device. Nothing is named, stored or reused:
    the worker without a cache."""

    def __init__(self, shape: PageShape) -> None:
        """shape: of every page."""
        self._shape = shape
        self._spare: list[Page] = []
        self.in_use = 0

    @property
    def shape(self) -> PageShape:
        """Shape of every page."""
        return self._shape

    def acquire(self, tokens: Sequence[int], *, marks: Sequence[int] = (), by_layer: bool = False) -> Held:
        """Nothing is ever stored."""
        return Held()

    def reserve(self, count: int) -> list[Page]:
        """So many private pages, released ones first."""
        if count < 0:
            raise InvalidArgument(f"reserve: {count} pages is below 0; give 0 or more")
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
        """Keeps pages without a holder for the next reserve."""
        for page in pages:
            page.holders -= 1
            if page.holders == 0:
                self.in_use -= 1
                self._spare.append(page)

    def report_attention(self, pages: Sequence[Page], mass: Sequence[float]) -> None:
        """Ignored."""

    def computed(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Ignored."""

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
