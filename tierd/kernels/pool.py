"""Pages as kernels address them: numbers of a pool, and the tables and slots of a batch in them.

`Located` has the addresses of pages that are looked up once, not in each pass. So a pass over many
pages costs a few array operations, and no step in Python for each page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from tierd.errors import InvalidArgument
from tierd.kernels.arguments import DeviceBatch
from tierd.kernels.buffers import BYTES, Buffer
from tierd.kernels.e4m3 import ScaledPages
from tierd.kernels.pages import KvPages
from tierd.kernels.reference import PagedBatch

Array = Any
"""A numpy array or a torch tensor."""
LAST_NUMBER = 2**31 - 2
"""Of a page: kernels count pages in 31 bits."""
GRAIN_BYTES = 1 << 16
"""Most pages lie at multiples of it; so many steps of it reach all addresses of a GPU."""


@dataclass(frozen=True, slots=True)
class Located(Sequence[Any]):
    """Pages of one layout in one place, by their addresses. first: any one of them.

    addresses: int64 [pages]. dtype: as the arrays' library names it. It does not own the memory.
    """

    first: Buffer
    addresses: NDArray[np.int64]
    dtype: Any

    @classmethod
    def of(cls, pages: Sequence[Array], like: Buffer | None = None) -> Located:
        """At least one page. Raises InvalidArgument for pages that are not alike. like: one of them."""
        found = [Buffer.of(f"pages[{i}]", page) for i, page in enumerate(pages)]
        for page in found:
            _check_alike(page, like or found[0])
        return cls(found[0], np.array([page.address for page in found], np.int64), pages[0].dtype)

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, page: Any) -> Any:
        return replace(self.first, address=int(self.addresses[page]))


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages at multiples of one step from the lowest.

    first: the lowest, [layers, 2, page_tokens, kv_heads, head_dim]; dtype: as its array names it;
    numbers: int64 [pages], each one's multiple. scales: of e4m3 pages, f32 [layers, 2, kv_heads].
    """

    first: Buffer
    step: int
    dtype: Any
    numbers: NDArray[np.int64]
    scales: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, pages: Sequence[Array]) -> Pool:
        """pages: [2, page_tokens, kv_heads, head_dim] each, or several layers of that. Raises
        InvalidArgument for pages that are not alike, or too far apart."""
        if not len(pages):
            raise InvalidArgument("pages: there are none; kernels need an address")
        if isinstance(pages, ScaledPages):
            stored = pages.stored
            known = stored if isinstance(stored, Located) else Located.of(stored)
            return cls._at(replace(known, first=_as_e4m3(known.first), dtype="e4m3"))._scaled(pages.scales)
        return cls._at(pages if isinstance(pages, Located) else Located.of(pages))

    @classmethod
    def _at(cls, pages: Located) -> Pool:
        """Raises InvalidArgument."""
        starts = pages.addresses
        lowest = starts.min()
        first = replace(pages.first, address=int(lowest))
        if len(first.shape) == 4:
            first = replace(first, shape=(1, *first.shape), strides=(0, *first.strides))
        step = int(np.gcd.reduce(starts - lowest)) or first.shape[1] * first.strides[1]
        numbers = (starts - lowest) // step
        if numbers.max() > np.iinfo(np.int32).max:
            raise InvalidArgument(
                f"pages: lie {starts.max() - lowest} bytes apart in steps of {step}, above 2^31 steps; take them from one pool"
            )
        return cls(first, step, pages.dtype, numbers)

    def roomy(self) -> Pool:
        """The same with room below and above and in finer steps: numbers stay when pages come. Its
        `first` lies up to 2^30 steps lower, perhaps at no page. Its `numbers` has the greatest."""
        first, reach, step = self.first, int(self.numbers.max()) * self.step, math.gcd(self.step, GRAIN_BYTES)
        if reach // step >= LAST_NUMBER:
            step = self.step
        below = min(first.address // step, (LAST_NUMBER - reach // step) // 2)
        lower = replace(first, address=first.address - below * step)
        return replace(self, first=lower, step=step, numbers=np.array([LAST_NUMBER], np.int64))

    def find_numbers(self, addresses: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Numbers of pages of this layout; None if one does not lie at a whole step within reach."""
        numbers, rests = np.divmod(addresses - self.first.address, self.step)
        is_in = not rests.any() and numbers.min() >= 0 and numbers.max() <= self.numbers.max()
        return numbers if is_in else None

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.first.shape[2]

    def cast(self, array: Array) -> Array:
        """Queries or new tokens in a type that kernels take beside these pages."""
        if self.scales is None:
            return cast(array, self.dtype)
        return array if str(array.dtype).removeprefix("torch.") in ("bfloat16", "float16") else cast(array, "float16")

    def layer(self, layer: int, scales: Array) -> KvPages:
        """K and V of one layer. scales: those of the pool, placed."""
        first = self.first
        shape, strides = (int(self.numbers.max()) + 1, *first.shape[2:]), (self.step, *first.strides[2:])
        k = replace(first, address=first.address + layer * first.strides[0], shape=shape, strides=strides)
        v = replace(k, address=k.address + first.strides[1])
        if scales is None:
            return KvPages(k, v)
        heads = shape[2]
        every = Buffer.of("pages.k_scales", scales)
        k_scales = replace(
            every, address=every.address + layer * 2 * heads * BYTES["f32"], shape=(heads,), strides=(BYTES["f32"],)
        )
        return KvPages(k, v, k_scales, replace(k_scales, address=k_scales.address + heads * BYTES["f32"]))

    def slots(self, slots: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Turns slots by place in the list into slots of the pool. Raises InvalidArgument."""
        if slots is None:
            raise InvalidArgument("slots: not given; give a slot for each new token")
        pages, offsets = np.divmod(slots, self.page_tokens)
        numbers = self._numbers_of("slots", np.maximum(pages, 0))
        return np.where(slots < 0, -1, numbers * self.page_tokens + offsets)

    def batch(self, batch: PagedBatch, q: Array) -> DeviceBatch:
        """The batch in arrays beside the queries, tables padded with 0. Raises InvalidArgument."""
        tables = np.zeros((len(batch.tables), max(1, *map(len, batch.tables))), np.int32)
        for i, length in enumerate(batch.kv_lens):
            some = batch.tables[i][: -(-length // self.page_tokens)]
            used = np.arange(some.start, some.stop) if isinstance(some, range) else np.asarray(some, np.int64)
            tables[i, : len(used)] = self._numbers_of(f"tables[{i}]", used)
        lens = np.asarray(batch.kv_lens, np.int32)
        subsets, sizes = (placed(array, q) for array in _subsets(batch))
        return DeviceBatch(placed(lens, q), placed(tables, q), batch.sinks, batch.window, subsets, sizes)

    def _scaled(self, scales: NDArray[np.float32]) -> Pool:
        """The same with scales. Raises InvalidArgument if they do not fit these pages."""
        layers, kinds, _, heads, _ = self.first.shape
        if scales.size != layers * kinds * heads or scales.dtype != np.float32 or not scales.flags.c_contiguous:
            raise InvalidArgument(
                f"pages.scales: {scales.dtype} {list(scales.shape)}; pages of {layers} layers and {heads} kv heads take float32 {[layers, kinds, heads]}"
            )
        return replace(self, scales=scales)

    def _numbers_of(self, name: str, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of pages by their place in the list. Raises InvalidArgument."""
        for bad in places[(places < 0) | (places >= len(self.numbers))].tolist():
            raise InvalidArgument(f"{name}: page {bad} of {len(self.numbers)}; give all that are named, from 0 on")
        return self.numbers[places]


def _as_e4m3(found: Buffer) -> Buffer:
    """A page stored as bytes, as e4m3. Raises InvalidArgument for wider values."""
    if found.dtype not in ("u8", "e4m3"):
        raise InvalidArgument(f"{found.name}: has type {found.dtype}; pages with scales are of e4m3, or of bytes")
    return replace(found, dtype="e4m3")


def _check_alike(page: Buffer, first: Buffer) -> None:
    mine, its = ((one.shape, one.strides, one.dtype, one.device) for one in (page, first))
    if mine != its:
        raise InvalidArgument(
            f"{page.name}: {page.dtype} {page.shape} with strides {page.strides} on {page.device} is unlike the others, "
            f"{first.dtype} {first.shape} with {first.strides} on {first.device}; give pages of one layout in one place"
        )


def _subsets(batch: PagedBatch) -> tuple[Array, Array]:
    """i32 [n, kv_heads, most] and [n, kv_heads]; None twice if all pages are seen."""
    if batch.subsets is None:
        return None, None
    sizes = np.array([[len(head) for head in heads] for heads in batch.subsets], np.int32)
    subsets = np.zeros((*sizes.shape, max(1, int(sizes.max()))), np.int32)
    for i, heads in enumerate(batch.subsets):
        for j, head in enumerate(heads):
            subsets[i, j, : len(head)] = head
    return subsets, sizes


def cast(array: Array, dtype: Any) -> Array:
    """In this type, which may be another library's name for it."""
    xp = array_namespace(array)
    return xp.astype(array, getattr(xp, dtype) if isinstance(dtype, str) else dtype, copy=False)


def placed(array: NDArray[Any] | None, q: Array) -> Array:
    """The array in the library and on the device of these queries."""
    return None if array is None else array_namespace(q).asarray(array, device=device(q))


def joined(some: Sequence[Located]) -> Located:
    """Pages of several tables, one after another; at least one. Raises InvalidArgument for pages that
    are not alike."""
    for pages in some:
        _check_alike(pages.first, some[0].first)
    return replace(some[0], addresses=np.concatenate([pages.addresses for pages in some]))
